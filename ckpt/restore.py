"""Bringing a saved state back: into the tensors of a given state, in place, or as new tensors.

First the whole state is matched against the description, so that a mismatch is found before anything is changed; then
the bytes are read and verified; then objects get their load_state_dict().
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from resilio_hpc.ckpt import overlap, tensors
from resilio_hpc.ckpt.records import TensorRecord
from resilio_hpc.ckpt.slab import Box, Shape, Slab, slab_of
from resilio_hpc.ckpt.source import Piece, Source, Wanted, WantedSlab
from resilio_hpc.ckpt.tree import NOTHING, TensorRef, decode, has_state, place, refs
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch, UsageError

Path = tuple[Any, ...]
Build = Callable[[], Any]


def restore(source: Source, state: Any, pool: ThreadPoolExecutor) -> Any:
    """The state that ``source`` holds, in ``state``'s own tensors and containers where it has them.

    ``state`` None: everything new. Raises LayoutMismatch naming the place (nothing is changed yet), CorruptCheckpoint
    or OSError (tensors may already be changed).
    """
    matching = _Matching(source)
    build = matching.match(NOTHING if state is None else state, decode(source.tree), ())
    matching.check_optimizers()
    matching.read(source, pool)
    return build()


class _Matching:
    """Collects which saved tensor goes into which live ones; ``match`` returns how to build the result afterwards."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._records: Sequence[TensorRecord] = []
        self._mine = len(source.tensors)  # the others come from elsewhere
        self._learn()
        self._is_shared_out_anew = False
        self._optimizers: list[Path] = []
        self._targets: dict[int, list[Any]] = {}
        self._slabs: list[tuple[Sequence[Piece], Shape, Any]] = []
        self._fresh: dict[int, Any] = {}
        self._first: dict[int, Any] = {}  # what the bytes of a tensor were read into
        self._meta: dict[int, Any] = {}  # by identity: tensors without memory, which get some

    # -- matching --------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Take the descriptions that the source has by now."""
        for record in self._source.tensors[len(self._records) :]:
            tensors.check_description(record.kind, record.dtype, record.shape, record.size_bytes)
        self._records = list(self._source.tensors)

    def _elsewhere(self, path: Path) -> Any:
        found = self._source.elsewhere(path)
        self._learn()
        return found

    def _in_parts(self, saved: Any) -> bool:
        """Does it hold parts of tensors, which others may take?"""
        return any(ref.index < len(self._records) and self._records[ref.index].slab is not None for ref in refs(saved))

    def match(self, live: Any, saved: Any, path: Path) -> Build:
        """How to make ``saved`` out of ``live`` once the bytes are read."""
        if isinstance(saved, TensorRef):
            return self._tensor(live, saved, path)
        if live is not NOTHING and _is_tensor(live):
            raise LayoutMismatch(f"{place(path)}: the state has a tensor, the checkpoint a {type(saved).__name__}")
        if live is not NOTHING and has_state(live):
            return self._object(live, saved, path)
        if isinstance(saved, dict):
            return self._dict(live, saved, path)
        if isinstance(saved, list | tuple):
            return self._sequence(live, saved, path)
        _refuse_to_lose(live, saved, path)
        return lambda: saved

    def _tensor(self, live: Any, saved: TensorRef, path: Path) -> Build:
        if saved.index >= len(self._records):
            raise CorruptCheckpoint(f"{place(path)}: the checkpoint has no tensor number {saved.index}")
        record = self._records[saved.index]
        if record.slab is not None or (live is not NOTHING and slab_of(live) is not None):
            return self._slab(live, saved, record, path)
        foreign = self._source.is_foreign or saved.index >= self._mine
        if foreign and record.size_bytes and not self._source.is_the_same_everywhere(record):
            raise LayoutMismatch(
                f"{place(path)}: the processes that saved this tensor had others each, and there were more or fewer of "
                "them; say with Slab or DTensor which part of a whole each process holds"
            )
        targets = self._targets.setdefault(saved.index, [])
        if live is NOTHING or not tensors.is_tensor(live):
            _refuse_to_lose(live, saved, path)
            return lambda: self._fresh[saved.index] if saved.index in self._fresh else self._copy_of(saved.index)
        self._check_fits(live, record, record.shape, path)
        self._note_meta(live)
        targets.append(live)
        return lambda: live

    def _slab(self, live: Any, saved: TensorRef, record: TensorRecord, path: Path) -> Build:
        """A part of a tensor into a part of it, the same or another; ``live`` may also be a plain tensor: all of it."""
        whole = record.slab.global_shape if record.slab is not None else record.shape
        first = record.slab.start if record.slab is not None else (0,) * len(whole)
        if live is NOTHING or not _is_tensor(live):
            _refuse_to_lose(live, saved, path)
            if self._source.is_foreign:
                raise LayoutMismatch(f"{place(path)}: saved in parts by others; give a state that says which to take")
            tensor = tensors.empty(record.kind, record.dtype, record.shape)
            live = made = Slab(tensor, whole, first, record.slab.replica if record.slab is not None else 0)
        else:
            made = slab_of(live) or Slab(live, tuple(live.shape), (0,) * live.ndim)
            self._note_meta(live.tensor if type(live) is Slab else live)
        self._check_fits(made.tensor, record, tuple(made.tensor.shape), path)
        if tuple(made.global_shape) != whole:
            raise LayoutMismatch(
                f"{place(path)}: the checkpoint holds shape {list(whole)}, the state {list(made.global_shape)}"
            )
        box = Box(tuple(made.start), tuple(made.tensor.shape))
        if record.offset >= 0 and box == Box(first, record.shape):
            self._targets.setdefault(saved.index, []).append(live)
        elif box.size:
            self._slabs.append((self._source.find(record, box), box.shape, live))
        return lambda: live

    @staticmethod
    def _check_fits(live: Any, record: TensorRecord, shape: Shape, path: Path) -> None:
        try:
            tensors.check_fits(live, record.kind, record.dtype, shape)
        except (LayoutMismatch, UsageError) as error:
            raise type(error)(f"{place(path)}: {error}") from error

    def _note_meta(self, live: Any) -> None:
        if tensors.is_meta(live):
            self._meta[id(live)] = live

    def _copy_of(self, index: int) -> Any:
        record = self._records[index]
        self._fresh[index] = tensors.empty(record.kind, record.dtype, record.shape)
        tensors.copy_into(self._fresh[index], self._first[index])
        return self._fresh[index]

    def _dict(self, live: Any, saved: dict[Any, Any], path: Path) -> Build:
        if not isinstance(live, dict):
            _refuse_to_lose(live, saved, path)
            fresh = {key: self.match(NOTHING, value, (*path, key)) for key, value in saved.items()}
            return lambda: _same_kind(saved, {key: build() for key, build in fresh.items()})
        more = [value for key, value in saved.items() if key not in live]
        is_other = any(key not in saved for key in live) or any(map(self._in_parts, more))
        wanted = {key: value for key, value in saved.items() if key in live or not is_other}
        for key in live:
            if key not in saved:
                wanted[key] = self._elsewhere((*path, key))
                if wanted[key] is NOTHING:
                    raise LayoutMismatch(f"{place((*path, key))}: the state has it, the checkpoint does not")
                self._is_shared_out_anew = True
        builds = {key: self.match(live.get(key, NOTHING), value, (*path, key)) for key, value in wanted.items()}

        def build() -> Any:
            for key, make in builds.items():
                live[key] = make()
            return live

        return build

    def _sequence(self, live: Any, saved: Any, path: Path) -> Build:
        if not isinstance(live, list | tuple) or len(live) != len(saved):
            _refuse_to_lose(live, saved, path)
            live = [NOTHING] * len(saved)
        same = isinstance(live, list) and isinstance(saved, list) and not (live and live[0] is NOTHING)
        builds = [
            self.match(mine, theirs, (*path, position))
            for position, (mine, theirs) in enumerate(zip(live, saved, strict=True))
        ]

        def build() -> Any:
            values = [make() for make in builds]
            if same:
                live[:] = values
                return live
            return type(saved)(values)

        return build

    def _object(self, live: Any, saved: Any, path: Path) -> Build:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(live, torch.nn.Module) and isinstance(saved, dict):
            return self._module(live, saved, path)
        if overlap.is_optimizer(live) and isinstance(saved, dict) and saved.get("state"):
            self._optimizers.append(path)
        build = self.match(self._template(live, saved), saved, path)

        def load() -> Any:
            try:
                live.load_state_dict(build())
            except (ValueError, KeyError, RuntimeError) as error:
                raise LayoutMismatch(f"{place(path)}: {type(live).__name__} refused its state: {error}") from error
            return live

        return load

    def _template(self, live: Any, saved: Any) -> Any:
        """For a torch optimizer whose state was saved in parts: where the parts of its own layout go.

        Its own state does not exist before the first step, and is laid out as the parameters are.
        """
        if not overlap.is_optimizer(live) or not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
            return NOTHING
        import torch

        parameters = [parameter for group in live.param_groups for parameter in group["params"]]
        state: dict[Any, Any] = {}
        for index, values in saved["state"].items():
            for name, ref in values.items() if isinstance(values, dict) and index in range(len(parameters)) else ():
                known = isinstance(ref, TensorRef) and ref.index < len(self._records)
                record = self._records[ref.index] if known else None
                like = parameters[index]
                if record is not None and record.slab is not None:
                    if record.slab.global_shape == tuple(like.shape):
                        fresh = torch.empty_like(like, dtype=tensors.torch_dtype(record.dtype), requires_grad=False)
                    else:  # of another shape, such as a number of steps: whole in every process
                        fresh = tensors.empty(record.kind, record.dtype, record.slab.global_shape)
                    state.setdefault(index, {})[name] = fresh
        return {"state": state} if state else NOTHING

    def _module(self, live: Any, saved: dict[Any, Any], path: Path) -> Build:
        """A module's state_dict() shows its live tensors, so the bytes go straight into them."""
        state = tensors.state_on_meta(live, place(path)) or live.state_dict()
        missing = [k for k in state if k not in saved and self._elsewhere((*path, k)) is NOTHING]
        unexpected = [k for k in saved if k not in state and not self._in_parts(saved[k])]
        if missing or unexpected:
            raise LayoutMismatch(
                f"{place(path)}: {type(live).__name__} and checkpoint differ; only in the module: {missing[:5]}, "
                f"only in the checkpoint: {unexpected[:5]}"
            )
        self._is_shared_out_anew |= any(key not in state for key in saved)
        build = self._dict(state, saved, path)
        if isinstance(saved, OrderedDict) and hasattr(saved, "_metadata"):
            state._metadata = saved._metadata

        def load() -> Any:
            try:
                live.load_state_dict(build())
            except RuntimeError as error:
                raise LayoutMismatch(f"{place(path)}: {type(live).__name__} refused its state: {error}") from error
            return live

        return load

    def check_optimizers(self) -> None:
        """An optimizer numbers its parameters: with other parameters the same number is another one."""
        if self._is_shared_out_anew and self._optimizers:
            raise LayoutMismatch(
                f"{place(self._optimizers[0])}: layers are shared out anew, and an optimizer knows parameters by "
                "number; save get_optimizer_state_dict(), with flatten_optimizer_state_dict=True, which names them"
            )

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, source: Source, pool: ThreadPoolExecutor) -> None:
        """Read every tensor that was matched; several places that share one get copies."""
        for live in self._meta.values():
            tensors.give_memory(live)
        wanted: list[Wanted] = []
        bounced: list[tuple[Any, Any]] = []
        slabs: list[WantedSlab] = []
        for pieces, shape, live in self._slabs:
            target = _local(live)
            memory = tensors.bytes_of(target)
            if memory is None:
                record = pieces[0].record
                into = tensors.empty(record.kind, record.dtype, shape)
                bounced.append((target, into))
                memory = tensors.bytes_of(into)
            assert memory is not None
            slabs.append((pieces, memory, shape))
        for index, lives in self._targets.items():
            record, targets = self._records[index], [_local(live) for live in lives]
            direct = next((target for target in targets if tensors.bytes_of(target) is not None), None)
            into = direct
            if into is None:
                into = tensors.empty(record.kind, record.dtype, record.shape)
                if not targets:
                    self._fresh[index] = into
            self._first[index] = into
            bounced += [(target, into) for target in targets if target is not direct]
            memory = tensors.bytes_of(into)
            assert memory is not None
            wanted.append((record, memory))
        source.fill(wanted, pool)
        source.fill_slabs(slabs, pool)
        for target, value in bounced:
            tensors.copy_into(target, value)


def _same_kind(saved: dict[Any, Any], values: dict[Any, Any]) -> Any:
    if type(saved) is dict:
        return values
    made: Any = type(saved)(values)  # OrderedDict or Counter, the only others that a tree can hold
    if hasattr(saved, "_metadata"):
        made._metadata = saved._metadata
    return made


def _refuse_to_lose(live: Any, saved: Any, path: Path) -> None:
    """A plain value may replace any plain value, but live tensors and objects must not be dropped silently."""
    if live is not NOTHING and _holds_live_parts(live):
        what = "a tensor" if isinstance(saved, TensorRef) else f"a {type(saved).__name__}"
        size = f" of {len(saved)}" if isinstance(saved, list | tuple) else ""
        raise LayoutMismatch(f"{place(path)}: the checkpoint holds {what}{size}, the state a {type(live).__name__}")


def _holds_live_parts(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_live_parts, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_live_parts, value))
    return _is_tensor(value) or has_state(value)


def _local(live: Any) -> Any:
    """What of it lies in this process."""
    slab = slab_of(live)
    return live if slab is None else slab.tensor


def _is_tensor(value: Any) -> bool:
    return type(value) is Slab or tensors.is_tensor(value)
