"""Where a ``torch.utils.data.DataLoader`` is in its epoch, so that a restart goes on with the next batch.

A loader draws its order when an iteration begins: from the global random number generators, or from its own. The
position is the state of these at that moment, and the number of batches that were taken since. To go on, the iteration
is begun again in the same state, and what was taken is passed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from resilio_hpc.ckpt.state.rng import rng_state, set_rng_state


class LoaderPosition:
    """The position in one loader, for loops that iterate over it themselves, as ``iter(loader)``.

    A loader with ``state_dict()`` and ``load_state_dict()`` of its own (torchdata's StatefulDataLoader) keeps its
    position itself, within an epoch. Loaders of other kinds begin in no known state: their batches are counted alone.
    """

    def __init__(self, loader: Any, looks_ahead: bool = False) -> None:
        """Take note of the loader's iterations from here on.

        ``looks_ahead``: what iterates over it has always fetched the batch after the one in use.
        """
        self.loader = loader
        self._looks_ahead = looks_ahead
        self._before_last: Any = None  # the global generators before the last batch was fetched
        self.is_own = _has_state(loader)
        self._goes_on = False  # the iteration that begins next goes on from the loader's own state
        self._is_persistent = bool(getattr(loader, "persistent_workers", False))
        self._had_workers = False  # a life before had workers that stay, when the iteration that begins next began
        self._begun: Any = None  # the generators when this iteration began
        self._pending: tuple[int, Any, Any] | None = None  # batches to pass over, in the iteration that begins next
        self._to_replay = 0
        self._is_fresh = False  # an iteration has begun, and drawn nothing
        self._now: Any = None  # the global generators, to be put back when these are passed over
        place = _index_place(loader)
        self._place = "" if self.is_own else place
        self._of_own: list[bytes] | None = None  # the generators when the iteration began that a state goes on with
        if place and not (self.is_own and any(_has_state(one) for one in _samplers(loader))):
            inner = getattr(loader, place)
            begin = self._begin_own if self.is_own else self._begin
            loader.__dict__[place] = _Indices(inner.inner if type(inner) is _Indices else inner, begin)

    def state(self, taken: int) -> dict[str, Any]:
        """Return the position after ``taken`` batches of this iteration."""
        if self.is_own:
            has_begun = getattr(self.loader, "_iterator", self) is not None  # else the state would begin an iteration
            own = self.loader.state_dict() if has_begun else None
            found = {"own": own, "data": self._state_of_data(), "begun": self._begun}
            return {**found, "taken": taken, "generators": self._generators()}
        if self._pending is not None:
            taken, begun, before = self._pending
            return {"begun": begun, "taken": taken, "before": before, "generators": self._generators()}
        found = {"begun": self._begun, "taken": taken, "generators": self._generators()}
        return {**found, "before": self._before_last}

    def load(self, state: dict[str, Any], between: bool = False) -> None:
        """Have the iteration that begins next go on from there. ``between``: it is a new one."""
        if self.is_own:
            self._load_own(state, between)
            return
        self._set_generators(state["generators"])
        if self._is_persistent:
            self.loader._iterator = None  # workers that it has by now have another seed
            self._had_workers = state["begun"] is not None
        self._pending = None if between else (state["taken"], state["begun"], state["before"])

    def _load_own(self, state: dict[str, Any], between: bool) -> None:
        """Have the loader take its own state. Between two epochs it has none that an iteration could go on from."""
        if state.get("own") is not None and not (between and _index_place(self.loader)):
            self.loader.load_state_dict(state["own"])
            self._of_own = self._begun = state.get("begun")
            self._goes_on = True
            return
        self._set_generators(state.get("generators", []))
        self._goes_on = self._is_persistent and state.get("own") is not None  # new workers draw a seed
        if state.get("data") is not None:
            self.loader.dataset.load_state_dict(state["data"])

    def _state_of_data(self) -> Any:
        """Return the state of a data set that has one, and is read in this process."""
        data: Any = getattr(self.loader, "dataset", None)
        return data.state_dict() if _has_state(data) and getattr(self.loader, "num_workers", 1) == 0 else None

    def begin(self, iteration: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an iteration over the loader. One that goes on from a state draws nothing more."""
        goes_on, self._goes_on = self._goes_on, False
        now = rng_state() if goes_on else None
        batches = iteration()
        if now is not None:
            set_rng_state(now)
        return batches

    def pass_over(self, take: Callable[[], object]) -> None:
        """Take batches that were taken before, where it is so done, and put the global generators back."""
        replayed, self._to_replay = self._to_replay, 0
        if self._pending is not None and self._place and self._is_replayed():
            replayed = self._pending[0]  # the iteration begins with the first
        for _ in range(replayed):
            take()
        self._to_replay = 0
        if self._now is not None:
            set_rng_state(self._now)
            self._now = None

    def begin_other(self) -> None:
        """Begin an iteration of a loader of another kind, whose beginning is not seen."""
        if not self._place and not self.is_own and self._pending is not None:
            (self._to_replay, _, _), self._pending, self._now = self._pending, None, rng_state()

    # -- within the loader -----------------------------------------------------------------------------------------

    def _begin(self, inner: Any) -> Iterator[Any]:
        """Begin an iteration over the indices of batches. The loader has drawn nothing for it yet.

        With new workers it begins each one twice, and draws their seed in between.
        """
        is_second, self._is_fresh = self._is_fresh and self.loader.num_workers > 0, True
        if self._pending is None:
            if not is_second:
                had, self._had_workers = self._had_workers or getattr(self.loader, "_iterator", None) is not None, False
                self._begun = {"random": rng_state(), "generators": self._generators(), "workers": had}
            elif self._is_persistent and self._begun.get("workers"):
                set_rng_state(self._begun["random"])  # no seed was drawn then: it had its workers
                self._set_generators(self._begun["generators"])
            return self._seen(iter(inner))
        (taken, begun, before), self._pending = self._pending, None
        now = rng_state()
        if begun is not None:
            set_rng_state(begun["random"])
            self._set_generators(begun["generators"])
            self._begun = begun
        if self._is_replayed():
            self._to_replay, self._now = taken, now
            return self._seen(iter(inner))
        return self._passed(iter(inner), taken, before, now)

    def _begin_own(self, inner: Any) -> Iterator[Any]:
        """Begin an iteration of a loader that keeps its position: it draws the order again, and passes indices over.

        It may begin several times. The order is the one of the last time.
        """
        if self._of_own is None:
            self._begun = self._generators()
        else:
            self._set_generators(self._of_own)
        return self._drawn(iter(inner))

    def _drawn(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            self._of_own = None
            yield index

    def _passed(self, indices: Iterator[Any], taken: int, before: Any, now: Any) -> Iterator[Any]:
        """Draw what was taken, then go on. ``before``: the generators before the batch that was fetched ahead."""
        self._is_fresh = False
        for _ in range(taken):
            next(indices, None)
        if self._looks_ahead and before is not None:
            set_rng_state(before)
            self._before_last = before
            yield from itertools.islice(indices, 1)
        set_rng_state(now)
        yield from self._seen(indices)

    def _seen(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            self._is_fresh = False
            if self._looks_ahead:
                self._before_last = rng_state()
            yield index

    def _is_replayed(self) -> bool:
        """Return whether batches are taken again: what workers, or an iterable, hand out depends on those before."""
        from torch.utils.data import IterableDataset

        return self.loader.num_workers > 0 or isinstance(self.loader.dataset, IterableDataset)

    def _own_generators(self) -> list[Any]:
        """Return the generators of the loader and of its samplers, which may lie in one another."""
        found = {}
        for owner in (self.loader, *_samplers(self.loader)):
            generator = getattr(owner, "generator", None)
            if hasattr(generator, "get_state"):
                found[id(generator)] = generator
        return list(found.values())

    def _generators(self) -> list[bytes]:
        return [one.get_state().numpy().tobytes() for one in self._own_generators()]

    def _set_generators(self, states: list[bytes]) -> None:
        import torch

        for one, state in zip(self._own_generators(), states, strict=True):
            one.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class TrackedLoader:
    """A loader that knows its position, for loops of your own: ``for batch in loader``, or ``next(batches)``.

    It belongs into the state: ``{"model": model, …, "data": loader}``. After a restore, call ``set_rng_state`` first;
    the next iteration goes on with the batch after those that were taken. See docs/exact-resume.md.
    """

    def __init__(self, loader: Any) -> None:
        """``loader``: a DataLoader, or a StatefulDataLoader."""
        self.loader = loader
        self.positions = [LoaderPosition(loader)]
        self.epoch = 0
        self._taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position."""
        return {"epoch": self.epoch, "position": self.positions[0].state(self._taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on from there."""
        self.epoch, position = state["epoch"], state["position"]
        self._taken = position["taken"]
        self.positions[0].load(position, between=self._taken == 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left in this epoch, each counted as taken."""
        position = self.positions[0]
        for sampler in (getattr(self.loader, name, None) for name in ("sampler", "batch_sampler")):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        batches = position.begin(lambda: iter(self.loader))
        position.begin_other()
        position.pass_over(lambda: next(batches))
        for batch in batches:
            self._taken += 1
            yield batch
        self.epoch, self._taken = self.epoch + 1, 0

    def batches(self) -> Iterator[Any]:
        """Yield the batches of all epochs from here on."""
        while True:
            yield from self

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return len(self.loader)


class _Indices:
    """A loader's batch sampler, or sampler, whose iterations are seen as they begin."""

    def __init__(self, inner: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        self.inner, self._begin = inner, begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers of a loader, which may lie in one another."""
    owners = [loader]
    for owner in owners:
        inner = [getattr(owner, name, None) for name in ("sampler", "batch_sampler")]
        inner.append(getattr(getattr(owner, "dataset", None), "_sampler", None))  # that Lightning makes distributed
        owners += [one for one in inner if one is not None and all(one is not other for other in owners)]
    return owners[1:]


def _has_state(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _index_place(loader: Any) -> str:
    """Return the attribute of a DataLoader that gives the indices of its batches; "" for other loaders."""
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader):
        return ""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"
