"""Restores a saved state: into the tensors of a given state, in place, or as new tensors.

First the whole state is matched against the description; then new tensors are read, and objects get their state. Only
when nothing can refuse any more, live tensors are filled and values assigned: a refusal leaves everything as it was.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.format.source import CheckpointSource
from resilio_hpc.ckpt.restore import module_state
from resilio_hpc.ckpt.restore.live_parts import is_slab, is_tensor, refuse_to_lose
from resilio_hpc.ckpt.restore.loads import Loads, Undo
from resilio_hpc.ckpt.restore.optimizers import Optimizers
from resilio_hpc.ckpt.restore.saved_parts import SavedParts, check_fits
from resilio_hpc.ckpt.restore.targets import Path, Targets
from resilio_hpc.ckpt.state import containers, decoded_tree, meta_device, overlap, tensors
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.containers import NOTHING, SEQUENCES
from resilio_hpc.ckpt.state.decoded_tree import TensorRef, refs
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.paths import place
from resilio_hpc.ckpt.state.plain_values import SCALARS
from resilio_hpc.ckpt.state.slab import Slab, slab_of
from resilio_hpc.ckpt.state.tree import has_state
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch

Build = Callable[[], Any]


def restore(source: CheckpointSource, state: Any, pool: ThreadPoolExecutor) -> Any:
    """Return the state in ``source``, in ``state``'s own tensors and containers where it has them.

    ``state`` None: everything new. Raises LayoutMismatch or UsageError naming the place: nothing is changed then.
    CorruptCheckpoint or OSError: live tensors may be overwritten, all else is unchanged.
    """
    matching = _Matching(source, state)
    build = matching.match(NOTHING if state is None else state, matching.saved, ())
    matching.check_optimizers()
    targets, loads, undo = matching.targets, matching.loads, Undo()
    targets.check()
    try:
        targets.give_memory(undo)
        targets.read_new(source, pool)
        loads.load_objects(undo)
        targets.read_live(source, pool)
        loads.load_modules()
    except BaseException:
        undo.roll_back()
        raise
    return build()


class _Matching:
    """Collects what goes into which live tensors and objects; ``match`` returns how to build the rest afterwards."""

    def __init__(self, source: CheckpointSource, state: Any) -> None:
        self._source = source
        self._records: list[TensorRecord] = []
        self._mine = len(source.tensors)  # the others come from elsewhere
        self._learn()
        self.saved, parameters = decoded_tree.read(source.tree)
        self._optimizers = Optimizers(self._records, parameters, state)
        self.targets = Targets(self._records)
        self._parts = SavedParts(source, self._records, self.targets)
        self.loads = Loads()
        self._is_new = False  # what is matched now belongs to an object, which gets it later
        self._is_shared_out_anew = False

    # -- matching --------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Take the descriptions that the source has by now."""
        for record in self._source.tensors[len(self._records) :]:
            tensors.check_description(record.kind, record.dtype, record.shape, record.size_bytes)
            self._records.append(record)

    def _elsewhere(self, path: Path) -> Any:
        found = self._source.elsewhere(path)
        self._learn()
        return found

    def _in_parts(self, saved: Any) -> bool:
        """Return whether it holds parts of tensors, which can be cut differently."""
        return any(ref.index < len(self._records) and self._records[ref.index].slab is not None for ref in refs(saved))

    def match(self, live: Any, saved: Any, path: Path) -> Build:
        """Return how to make ``saved`` out of ``live`` once the bytes are read."""
        if live is not NOTHING and type(live) not in SCALARS and has_state(live):
            return self._object(live, saved, path)
        if type(live) is AnyLayout:
            return self._any_layout(live, saved, path)
        if isinstance(saved, TensorRef):
            return self._tensor(live, saved, path)
        if live is not NOTHING and is_tensor(live):
            raise LayoutMismatch(f"{place(path)}: the state has a tensor, the checkpoint a {type(saved).__name__}")
        if isinstance(saved, dict):
            return self._dict(live, saved, path)
        if type(saved) in SEQUENCES:
            return self._sequence(live, saved, path)
        refuse_to_lose(live, saved, path)
        return lambda: saved if type(saved) in SCALARS else copy.deepcopy(saved)

    def _tensor(self, live: Any, saved: TensorRef, path: Path) -> Build:
        if saved.index >= len(self._records):
            raise CorruptCheckpoint(f"{place(path)}: the checkpoint has no tensor number {saved.index}")
        record = self._records[saved.index]
        if record.slab is not None or (live is not NOTHING and is_slab(live)):
            return self._slab(live, saved, record, path)
        foreign = self._source.is_foreign or saved.index >= self._mine
        if foreign and record.size_bytes and not self._source.is_the_same_everywhere(record):
            raise LayoutMismatch(
                f"{place(path)}: the processes that saved this tensor had others each, and there were more or fewer of "
                "them; say with Slab or DTensor which part of a whole each process holds"
            )
        if live is NOTHING or not tensors.is_tensor(live):
            refuse_to_lose(live, saved, path)
            self.targets.want(saved)
            return lambda: self.targets.fresh(saved.index)
        check_fits(live, record, record.shape, path)
        self.targets.note_meta(live)
        self.targets.add(path, live, self._is_new, saved.index)
        return lambda: live

    def _slab(self, live: Any, saved: TensorRef, record: TensorRecord, path: Path) -> Build:
        """Return the copy of a part of a tensor into a part of it, the same or another.

        ``live`` may also be a plain tensor: all of it.
        """
        whole = record.slab.global_shape if record.slab is not None else record.shape
        first = record.slab.start if record.slab is not None else (0,) * len(whole)
        if live is NOTHING or not is_tensor(live):
            refuse_to_lose(live, saved, path)
            if self._source.is_foreign:
                raise LayoutMismatch(f"{place(path)}: saved in parts by others; give a state that says which to take")
            if self._parts.has_several(record.path):
                raise LayoutMismatch(f"{place(path)}: saved as a flat shard; give a state that says which to take")
            tensor = tensors.empty(record.kind, record.dtype, record.shape)
            live = Slab(tensor, whole, first, record.slab.replica if record.slab is not None else 0)
            self._parts.add(path, live, live, saved.index, True)
            return lambda: live
        if type(live) is FlatSlab:
            for part in live.parts():
                self._parts.add(path, part, part, saved.index, self._is_new)
            return lambda: live
        made = slab_of(live) or Slab(live, tuple(live.shape), (0,) * live.ndim)
        self.targets.note_meta(live.tensor if type(live) is Slab else live)
        self._parts.add(path, live, made, saved.index, self._is_new)
        return lambda: live

    def _any_layout(self, live: AnyLayout, saved: Any, path: Path) -> Build:
        try:
            layout = live.as_in(saved)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{place(path)}: {error}") from error
        try:
            build = self.match(layout, saved, path)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{error}{live.hint(next(iter(layout)))}") from error

        return lambda: (build(), live)[1]

    def _dict(self, live: Any, saved: dict[Any, Any], path: Path) -> Build:
        if not isinstance(live, dict):
            refuse_to_lose(live, saved, path)
            if containers.holds_scalars_only(saved):
                return lambda: copy.copy(saved)
            fresh = {key: self.match(NOTHING, value, (*path, key)) for key, value in saved.items()}
            return lambda: containers.alike_dict(saved, {key: build() for key, build in fresh.items()})
        if containers.holds_scalars_only(saved) and containers.holds_scalars_only(live) and live.keys() == saved.keys():
            return lambda: containers.fill_dict(live, saved)
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
        return lambda: containers.fill_dict(live, {key: make() for key, make in builds.items()})

    def _sequence(self, live: Any, saved: Any, path: Path) -> Build:
        is_alike = type(live) in SEQUENCES and len(live) == len(saved)
        if not is_alike:
            refuse_to_lose(live, saved, path)
        if containers.holds_scalars_only(saved) and (not is_alike or containers.holds_scalars_only(live)):
            return lambda: _filled(live, saved, list(saved))
        parts = live if is_alike else [NOTHING] * len(saved)
        builds = [
            self.match(mine, theirs, (*path, position))
            for position, (mine, theirs) in enumerate(zip(parts, saved, strict=True))
        ]
        return lambda: _filled(live, saved, [make() for make in builds])

    def _object(self, live: Any, saved: Any, path: Path) -> Build:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(live, torch.nn.Module) and isinstance(saved, dict):
            return self._module(live, saved, path)
        template: Any = NOTHING
        if overlap.is_optimizer(live) and isinstance(saved, dict) and isinstance(saved.get("state"), dict):
            saved = self._optimizers.arranged(live, saved, path)
            template = self._optimizers.template(live, saved)
        elif hasattr(live, "restore_template"):
            template = self._own_template(live, saved, path)
        self._is_new, before = True, self._is_new
        build = self.match(template, saved, path)
        self._is_new = before
        fills_tensors = not overlap.is_optimizer(live) and next(refs(saved), None) is not None
        self.loads.add(live, path, build, fills_tensors)
        return lambda: live

    def _own_template(self, live: Any, saved: Any, path: Path) -> Any:
        """Return the places that an object has made for what was saved of it in parts."""

        def saved_at(*keys: Any) -> Any:
            found = containers.look_up(saved, keys)
            return self._elsewhere((*path, *keys)) if found is NOTHING else found

        def dtype_of(ref: Any) -> Any:
            is_part = isinstance(ref, TensorRef) and self._in_parts(ref)
            return tensors.torch_dtype(self._records[ref.index].dtype) if is_part else None

        try:
            return live.restore_template(saved_at, dtype_of)
        except ValueError as error:
            raise LayoutMismatch(f"{place(path)}: {error}") from error

    def _module(self, live: Any, saved: dict[Any, Any], path: Path) -> Build:
        """Match a module: its state_dict() shows its live tensors, so the bytes go straight into them."""
        state = meta_device.state_on_meta(live, place(path)) or live.state_dict()
        saved = module_state.by_names_of(state, saved)
        missing = [k for k in state if k not in saved and self._elsewhere((*path, k)) is NOTHING]
        unexpected = [k for k in saved if k not in state and not self._in_parts(saved[k])]
        if (missing or unexpected) and not module_state.loads_other_names(live):
            raise LayoutMismatch(
                f"{place(path)}: {type(live).__name__} and checkpoint differ; only in the module: {missing[:5]}, "
                f"only in the checkpoint: {unexpected[:5]}"
            )

        def fits(name: str, value: Any) -> bool:
            return self._fits(saved.get(name), value)

        names = [*(name for name in state if name not in missing), *unexpected]
        self._is_shared_out_anew |= not saved.keys() <= set(names)
        state, overwrites = module_state.own_tensors(live, state, names, fits)
        build = self._dict(state, saved, path)
        if isinstance(saved, OrderedDict) and hasattr(saved, "_metadata"):
            state._metadata = saved._metadata  # type: ignore[attr-defined]
        self.loads.add_module(live, path, build, overwrites)
        return lambda: live

    def _fits(self, saved: Any, live: Any) -> bool:
        """Return whether what was saved has the shape of a live tensor, or is no tensor of a known shape."""
        if not isinstance(saved, TensorRef) or saved.index >= len(self._records):
            return True
        return self._records[saved.index].shape == tuple(live.shape) or self._in_parts(saved)

    def check_optimizers(self) -> None:
        """Check that optimizers number the same parameters: otherwise the same number means another one."""
        if self._is_shared_out_anew:
            self._optimizers.refuse_other_numbers()


def _filled(live: Any, saved: Any, values: Sequence[Any]) -> Any:
    """Return a sequence with these values: the live one, if it can hold them as the saved one did."""
    if type(live) is type(saved) is list:
        live[:] = values
        return live
    if type(live) is type(saved) is deque and live.maxlen == saved.maxlen:
        live.clear()
        live.extend(values)
        return live
    return containers.alike(saved, values)
