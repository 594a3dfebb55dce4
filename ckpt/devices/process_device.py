"""The reference for devices of third parties: tensors whose memory is in another process.

Torch knows its type, ``privateuseone``, and none of its kernels: what changes a tensor is a method of it. The
checkpoint engine uses it through ``interface.Device`` alone, as it would any other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from resilio_hpc.ckpt.devices.interface import Mark
from resilio_hpc.ckpt.devices.process_session import DeviceSession
from resilio_hpc.ckpt.devices.registry import DEVICES

KIND = "privateuseone"
_aten = torch.ops.aten


class _Buffer:
    """A buffer that is freed when no tensor has it any more."""

    def __init__(self, session: DeviceSession, number: int) -> None:
        self.session, self.number, self.is_owned = session, number, True

    def __del__(self) -> None:
        if self.is_owned:
            self.session.free_later(self.number)


class ProcessTensor(torch.Tensor):
    """A contiguous tensor, or a part of one, on a ``ProcessDevice``."""

    buffer: _Buffer
    offset: int
    is_rebuilt: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(buffer: _Buffer, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> ProcessTensor:
        """Return a tensor of a buffer's elements from ``offset`` (bytes) on."""
        made = torch.Tensor._make_wrapper_subclass(
            ProcessTensor, tuple(shape), dtype=dtype, device=torch.device(KIND, 0)
        )
        made.buffer, made.offset, made.is_rebuilt = buffer, offset, False
        return made

    @property
    def session(self) -> DeviceSession:
        """Return the device's session."""
        return self.buffer.session

    def data_ptr(self) -> int:
        """Return an address that is this device's only."""
        return ((self.buffer.number + 1) << 40) + self.offset

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return what it is; its content is not asked for."""
        return f"ProcessTensor({list(self.shape)}, {self.dtype}, buffer {self.buffer.number})"

    def __deepcopy__(self, memo: Any) -> ProcessTensor:
        """Return a copy on the device."""
        made: ProcessTensor = self.detach().clone()  # type: ignore[assignment]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what the engine asks of a tensor. Raises NotImplementedError for all that it does not."""
        one = arguments[0]
        if function is _aten.detach.default:
            return _view(one, one.dtype, one.shape)
        if function is _aten.view.default:
            shape = list(arguments[1])
            known = prod(length for length in shape if length >= 0)
            return _view(one, one.dtype, [one.numel() // known if length < 0 else length for length in shape])
        if function is _aten.view.dtype and arguments[1].itemsize == one.itemsize:
            return _view(one, arguments[1], one.shape)
        if function is _aten.split.Tensor:
            size, row = arguments[1], one.nbytes // max(1, len(one))
            return [
                _view(one, one.dtype, (min(size, len(one) - at), *one.shape[1:]), at * row)
                for at in range(0, len(one), size)
            ]
        if function is _aten.clone.default:
            return _clone(one)
        if function is _aten.copy_.default and type(one) is torch.Tensor:
            one.copy_(arguments[1].fetch().reshape(one.shape))
            return one
        if function is _aten._to_copy.default:
            return one.fetch().to(**{name: value for name, value in (options or {}).items() if name != "pin_memory"})
        raise NotImplementedError(f"the device {KIND} does not do {function}")

    # -- what changes it -------------------------------------------------------------------------------------------

    def fetch(self) -> torch.Tensor:
        """Return the content as a tensor of the CPU."""
        room = bytearray(self.nbytes)
        if self.nbytes:
            self.session.wait(self.session.read(self.buffer.number, self.offset, memoryview(room)))
        return (
            torch.frombuffer(room, dtype=self.dtype).view(self.shape)
            if room
            else torch.empty(self.shape, dtype=self.dtype)
        )

    def store(self, source: torch.Tensor) -> ProcessTensor:
        """Assign a tensor of the CPU or of this device, of as many elements."""
        torch.autograd.graph.increment_version(self)
        number, whole = self.buffer.number, self._is_whole
        if isinstance(source, ProcessTensor):
            if whole and source._is_whole and source.nbytes == self.nbytes and source.session is self.session:
                self.session.submit("copy", (source.buffer.number,), (number,))
                return self
            source = source.fetch()
        data = source.detach().to(self.dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if len(data) != self.nbytes:
            raise ValueError(f"{len(data)} bytes are not the {self.nbytes} of the tensor")
        if data:
            self.session.submit("write", () if whole else (number,), (number,), (self.offset,), data)
        return self

    copy_ = store  # type: ignore[assignment]

    @property
    def _is_whole(self) -> bool:
        about = self.session.log.live.get(self.buffer.number)
        return self.offset == 0 and about is not None and about[1] == self.nbytes

    def _do(self, name: str, others: Sequence[ProcessTensor], arguments: Sequence[float | int] = ()) -> ProcessTensor:
        """Replace all of a whole tensor by what a command makes of others."""
        if not all(one._is_whole for one in (self, *others)):
            raise NotImplementedError(f"{name} takes whole tensors, and no parts")
        torch.autograd.graph.increment_version(self)
        reads = tuple(one.buffer.number for one in others)
        self.session.submit(name, reads, (self.buffer.number,), tuple(arguments))
        return self

    def set_sum(self, one: ProcessTensor, other: ProcessTensor, factor: float = 1.0) -> ProcessTensor:
        """Become ``one + factor * other``."""
        return self._do("add", (one, other), (float(factor),))

    def set_product(self, one: ProcessTensor, other: ProcessTensor) -> ProcessTensor:
        """Become ``one * other``, by elements."""
        return self._do("multiply", (one, other))

    def set_scaled(self, one: ProcessTensor, factor: float) -> ProcessTensor:
        """Become ``factor * one``."""
        return self._do("scale", (one,), (float(factor),))

    def set_matmul(self, one: ProcessTensor, other: ProcessTensor) -> ProcessTensor:
        """Become ``one @ other``, of two matrices."""
        return self._do("matmul", (one, other), (one.shape[0], one.shape[1], other.shape[1]))

    def set_normal(self, seed: int | None = None) -> ProcessTensor:
        """Become random numbers: of a seed, or (None) others each time, which the log then holds."""
        if seed is not None:
            return self._do("normal", (), (seed,))
        torch.autograd.graph.increment_version(self)
        self.session.draw("normal", self.buffer.number, (-1,))
        return self


def _view(one: ProcessTensor, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> ProcessTensor:
    made = ProcessTensor.of(one.buffer, dtype, shape, one.offset + offset)
    made.is_rebuilt = one.is_rebuilt
    return made


def _clone(one: ProcessTensor) -> ProcessTensor:
    made = zeros(one.session, one.shape, one.dtype)
    made.store(one)
    made.is_rebuilt = one.is_rebuilt
    return made


def zeros(session: DeviceSession, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> ProcessTensor:
    """Return a new tensor of zeros on a session's device. ``dtype``: one that numpy has."""
    size = prod(shape) * dtype.itemsize
    number = session.allocate(str(dtype).removeprefix("torch."), size)
    device().sessions.add(session)
    DEVICES.add(device())
    return ProcessTensor.of(_Buffer(session, number), dtype, shape)


class _Position:
    """A ``Mark``: a request of a session."""

    def __init__(self, sessions: Sequence[DeviceSession]) -> None:
        self._tickets = [(session, session.ticket) for session in sessions]

    def wait(self) -> None:
        """See Mark."""
        for session, ticket in self._tickets:
            session.wait(ticket)


class ProcessDevice:
    """``Device``. Commands and copies are done in one order, so no work has to be held back for a copy."""

    kind = KIND
    classes: tuple[type, ...] = (ProcessTensor,)
    rebuilds = True
    refusal = ""

    def __init__(self) -> None:
        self.sessions: weakref.WeakSet[DeviceSession] = weakref.WeakSet()

    def place(self, value: Any) -> Any:
        """See Device."""
        return value.device if isinstance(value, ProcessTensor) else None

    def follow(self, where: Any) -> None:
        """See Device."""

    def copy(self, part: Any, target: memoryview) -> None:
        """See Device."""
        part.session.read(part.buffer.number, part.offset, target)

    def mark(self, where: Any) -> Mark:
        """See Device."""
        return _Position(list(self.sessions))

    def hold(self, where: Any, mark: Mark) -> None:
        """See Device."""

    def boundary(self, where: Any) -> Any:
        """See Device."""
        return None

    def beside(self, boundaries: Mapping[Any, Any]) -> contextlib.AbstractContextManager[None]:
        """See Device. No command waits for another rank."""
        return contextlib.nullcontext()

    def lock_pages(self, memory: memoryview) -> Callable[[], None] | None:
        """See Device."""
        return None

    def copy_in(self, target: Any, source: Any) -> None:
        """See Device."""
        target.store(source)

    def synchronize(self, where: Any, timeout_s: float) -> bool:
        """See Device."""
        return all(session.synchronize(timeout_s) for session in list(self.sessions))

    def free_bytes(self, where: Any) -> int | None:
        """See Device."""
        return None

    def rng_state(self) -> Any:
        """See Device. Each command that draws has its seed, or its result, in the log."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """See Device."""

    def is_rebuilt(self, value: Any) -> bool:
        """See Device."""
        return isinstance(value, ProcessTensor) and value.is_rebuilt

    def loses_state(self, error: BaseException) -> bool:
        """See Device."""
        return any(session.is_lost for session in list(self.sessions))

    def rebuild(self) -> None:
        """See Device."""
        for session in list(self.sessions):
            if session.is_lost:
                session.rebuild()


_devices: list[ProcessDevice] = []


def device() -> ProcessDevice:
    """Return this process's one: what an entry point names. ``zeros`` registers it without one."""
    if not _devices:
        _devices.append(ProcessDevice())
    return _devices[0]
