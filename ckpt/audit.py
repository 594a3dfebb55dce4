"""What lives in this process and is not in a state: the forgotten parts of a checkpoint.

It looks at all objects that Python's collector knows. So it finds what a script has made, not what it meant to save.
Call it at a step boundary, after the first step: optimizers have their state then, and loaders their iterators.
"""

from __future__ import annotations

import gc
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, GeneratorType, GenericAlias, GetSetDescriptorType
from typing import Any

from resilio_hpc.ckpt.state import containers, tensors
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.module_names import persistent_buffers
from resilio_hpc.ckpt.state.rng import rng_state
from resilio_hpc.ckpt.state.slab import Slab
from resilio_hpc.ckpt.state.tree import has_state
from resilio_hpc.ckpt.state.watched import Key, key_of

_NO_OWNERS = frozenset((FunctionType, tuple, BuiltinFunctionType, type, GenericAlias, GetSetDescriptorType))
"""Types of most objects of a process, which refer to no generator of a script."""


def audit(state: Any) -> list[str]:
    """Return one line for each part that lives and is not in ``state``; [] where all is there.

    ``state``: as for ``Checkpointer.save``, or a function that returns it. Looked for are parameters that optimizers
    train and the buffers of their modules, optimizers, schedules of learning rates, scalers, loaders under iteration,
    torch's generators, and the global generators. Takes a second in a large process; for a script's first run.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    saved = _Saved(state() if callable(state) and not has_state(state) else state)
    live = _Live(torch)
    optimizers = [one for one in live.of(torch.optim.Optimizer) if one.param_groups]
    return [
        *_forgotten_tensors(optimizers, list(live.of(torch.nn.Module)), saved),
        *(f"optimizer {_name(one)} with {_groups(one)}" for one in optimizers if not saved.has_optimizer(one)),
        *_forgotten_schedules(list(live.of(torch.optim.lr_scheduler.LRScheduler)), saved),
        *(f"scaler {_name(one)}" for one in live.of(torch.amp.GradScaler) if not saved.has_values_of(one)),
        *_forgotten_loaders(live, saved),
        *_forgotten_generators(torch, live, saved),
    ]


class _Live:
    """The objects that the collector knows, and those that these refer to."""

    def __init__(self, torch: Any) -> None:
        kinds = (torch.Generator, torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        wanted = (*kinds, torch.amp.GradScaler, torch.utils.data.DataLoader, iterator)
        tracked = gc.get_objects()
        found = {id(one): one for one in tracked if issubclass(type(one), wanted)}
        owners = [one for one in tracked if type(one) not in _NO_OWNERS and not _is_samplers(one)]
        held = [*gc.get_referents(*owners), *_locals()]
        found.update((id(one), one) for one in held if type(one) is torch.Generator)  # the collector does not know it
        self._found = list(found.values())

    def of(self, kind: Any) -> Iterator[Any]:
        """Yield those of a kind."""
        return (one for one in self._found if issubclass(type(one), kind))


class _Saved:
    """What is in a state: objects, tensors, and plain values."""

    def __init__(self, state: Any) -> None:
        self._objects: set[int] = set()
        self.positions: list[Any] = []  # of loaders
        self._keys: set[Key] = set()
        self._nests: list[Any] = []  # containers and plain values
        self._walk(state)
        self._ranges: list[tuple[int, int]] = []  # of memory that saved tensors have, without overlaps, in order
        for start, size in sorted(self._keys):
            if self._ranges and start <= self._ranges[-1][1]:
                self._ranges[-1] = self._ranges[-1][0], max(self._ranges[-1][1], start + size)
            else:
                self._ranges.append((start, start + size))

    def _walk(self, value: Any) -> None:
        if containers.is_container(value):
            self._nests.append(value)
            for _, item in containers.parts(value):
                self._walk(item)
        elif type(value) is AnyLayout:
            self._walk(value.saved)
        elif type(value) in (Slab, FlatSlab):
            self._walk(value.tensor)
        elif tensors.is_tensor(value):
            if hasattr(value, "detach"):
                self._keys.add(key_of(value))
                self._nests.append(value)
        elif has_state(value):
            self._objects.add(id(value))
            for one in getattr(value, "stands_for", ()):
                self._objects.add(id(one))
                self._keys.update(key_of(each) for each in getattr(one, "parameters", tuple)())
            self.positions += [value, *getattr(value, "positions", ())]
            self._walk(value.state_dict())
        elif isinstance(value, bytes):
            self._nests.append(value)

    def has(self, value: Any) -> bool:
        """Return whether this very object is in the state."""
        return id(value) in self._objects

    def has_tensor(self, value: Any) -> bool:
        """Return whether a tensor's elements are in the state."""
        start, size = key_of(value)
        number = bisect(self._ranges, (start, sys.maxsize)) - 1
        return not size or (number >= 0 and start + size <= self._ranges[number][1])

    def has_optimizer(self, optimizer: Any) -> bool:
        """Return whether an optimizer is there: itself, or all of its state's tensors and its groups."""
        if self.has(optimizer):
            return True
        own = [one for state in optimizer.state.values() for one in _values(state) if hasattr(one, "detach")]
        groups = optimizer.state_dict()["param_groups"]
        has_groups = any(isinstance(nest, dict) and _is_same(nest.get("param_groups"), groups) for nest in self._nests)
        return has_groups and all(self.has_tensor(one) for one in own)

    def has_values_of(self, value: Any) -> bool:
        """Return whether an object is there: itself, or a dict with the values of its state."""
        return self.has(value) or self.has_values(value.state_dict())

    def has_values(self, wanted: Any) -> bool:
        """Return whether the state holds these values."""
        return any(type(one) is type(wanted) and _is_same(one, wanted) for one in self._nests)


def _is_samplers(one: Any) -> bool:
    """Return whether it is an iteration of torch's samplers or loaders: what it draws from, its position has."""
    return type(one) is GeneratorType and "/torch/utils/data/" in one.gi_code.co_filename


def _locals() -> list[Any]:
    """Return the variables of the functions that run, but for this module's: a frame keeps what is asked of it."""
    frames: list[FrameType | None] = list(sys._current_frames().values())
    found: list[Any] = []
    while frames:
        frame = frames.pop()
        while frame is not None:
            if frame.f_code.co_filename != __file__:
                found += frame.f_locals.values()
            frame = frame.f_back
    return found


def _forgotten_tensors(optimizers: list[Any], modules: list[Any], saved: _Saved) -> Iterator[str]:
    """Yield the parameters that are trained and not saved, and the buffers of modules with such parameters."""
    trained = {id(one): one for each in optimizers for group in each.param_groups for one in group["params"]}
    names: dict[int, str] = {}
    buffers: dict[int, tuple[str, Any]] = {}
    children = {id(child) for module in modules for child in module.children()}
    for root in (module for module in modules if id(module) not in children):
        own = {id(one): name for name, one in root.named_parameters() if id(one) in trained}
        names.update(own)
        if own:
            buffers.update((id(one), (name, one)) for name, one in persistent_buffers(root))
    lost = [names.get(key, "without a module") for key, one in trained.items() if not saved.has_tensor(one)]
    yield from _listed("parameter", "that an optimizer trains", lost)
    yield from _listed("buffer", "", [name for name, one in buffers.values() if not saved.has_tensor(one)])


def _forgotten_schedules(schedules: list[Any], saved: _Saved) -> Iterator[str]:
    inner = {id(one) for each in schedules for one in getattr(each, "_schedulers", ())}
    for one in schedules:
        if id(one) not in inner and not saved.has_values_of(one):
            yield f"schedule {_name(one)}"


def _forgotten_loaders(live: _Live, saved: _Saved) -> Iterator[str]:
    """Yield loaders that are iterated over now. One whose iteration has ended begins again in the next epoch."""
    torch = sys.modules["torch"]
    iterators = [one for one in live.of(torch.utils.data.dataloader._BaseDataLoaderIter) if one._num_yielded > 0]
    for loader in live.of(torch.utils.data.DataLoader):
        under_way = any(one._index_sampler is loader._index_sampler for one in iterators)
        is_saved = saved.has(loader) or any(getattr(one, "loader", None) is loader for one in saved.positions)
        if under_way and not is_saved and not (has_state(loader) and saved.has_values_of(loader)):
            yield f"position of {_name(loader)} over {_name(loader.dataset)} (train.LoaderPosition)"


def _forgotten_generators(torch: Any, live: _Live, saved: _Saved) -> Iterator[str]:
    now = rng_state()
    if not any(isinstance(one, dict) and _is_same(one.get("torch"), now["torch"]) for one in saved._nests):
        own = torch.get_rng_state()
        if not saved.has_values(own) and not saved.has_values(own.numpy().tobytes()):
            yield "the global random number generators (ckpt.rng_state())"
    globals_ = [torch.default_generator, *getattr(torch.cuda, "default_generators", ())]
    of_loaders = [one for position in saved.positions for one in _generators_of(position)]
    for generator in live.of(torch.Generator):
        if any(generator is other for other in (*globals_, *of_loaders)):
            continue
        state = generator.get_state()
        if not saved.has_values(state) and not saved.has_values(state.numpy().tobytes()):
            yield f"a torch.Generator on {generator.device} (seed {generator.initial_seed()})"


def _generators_of(position: Any) -> Iterable[Any]:
    own: Callable[[], Iterable[Any]] | None = getattr(position, "_own_generators", None)
    return own() if own is not None else ()


def _values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, dict) else []


def _is_same(one: Any, other: Any) -> bool:
    """Compare, also nests of tensors."""
    if hasattr(one, "detach") or hasattr(other, "detach"):
        torch = sys.modules["torch"]
        both = hasattr(one, "detach") and hasattr(other, "detach")
        return both and one.dtype == other.dtype and one.device == other.device and bool(torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _listed(what: str, which: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f", {len(names) - 3} more" if len(names) > 3 else ""
        words = f"{len(names)} {what}{'s' * (len(names) > 1)} {which}".rstrip()
        yield f"{words}: {', '.join(names[:3])}{more}"


def _groups(optimizer: Any) -> str:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return f"{count} parameter{'s' * (count != 1)}"


def _name(value: Any) -> str:
    return type(value).__name__
