"""A workaround for a deadlock in torch's gloo backend (seen with 2.13), so that a rank that has finished can end.

When the last reference to a gloo process group goes while Python's lock is held (DDP's reducer being freed is enough),
its destructor waits for its own thread; that thread may be freeing the last collective, for which it needs the lock.
Seen with four ranks of a small DDP script whose model lives in a function: forked again and again without any launcher,
one hung within three lives; the rank then never ends. So one reference is never given back; the process's end frees
everything anyway. A process that goes on without its groups (``train.restartable``) frees them when their threads rest.

A kept group still answers at its address, which torch leaves in the store under the key of the next default group, too:
a rank that looks there early would meet the former group. So each default group in a store has keys of its own. That
store counts a rank's groups: one that was started again meets those that make their group again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import sys
import time
import types
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

MODULE = "torch.distributed.distributed_c10d"
_ROUND = "TORCHELASTIC_RESTART_COUNT"
_FILE = "TORCHELASTIC_ERROR_FILE"
_OURS = "RESILIO_COLLECTIVE_TIMEOUT_S"  # a limit that the launcher has proposed
_RANK, _STORE, _TIMEOUT = 1, 4, 7  # which arguments of torch's function are these; the backend is before the store
_REST_S = 0.012  # Python's lock is asked for each 5 ms


class MadeGroup(NamedTuple):
    """A group that was made here. ``sockets``: descriptor → what it is; ``threads``: the kernel's numbers."""

    group: object
    sockets: dict[int, str]
    threads: set[int]


_made: list[MadeGroup] = []
_before: list[dict[int, str]] = []  # the descriptors that were open before a group that is being made
_longest_s = 0.0  # the longest time limit of a group so far
_uncounted: set[str] = set()  # rounds in which a default group was made before ``keep_alive``


def keep_alive() -> None:
    """Keep all gloo process groups, present and future, alive until their process ends, or ``free`` is called.

    Does nothing where torch is not imported, and nothing further when called again.
    """
    module = sys.modules.get(MODULE)
    create = getattr(module, "_new_process_group_helper", None)
    if create is None or hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_and_keep(*arguments: Any, **options: Any) -> Any:
        if options.get("group_desc") == "default_pg":
            return create_default(*arguments, **options)
        return create_one(*arguments, **options)

    def create_default(*arguments: Any, **options: Any) -> Any:
        if len(arguments) <= _STORE or not _is_gloo(arguments[_STORE - 1]):
            return create_one(*arguments, **options)
        store, made_here = arguments[_STORE], f"resilio/made/{arguments[_RANK]}"
        number = store.add(made_here, 0) + (os.environ.get(_ROUND, "") in _uncounted)
        if number:
            own = module.PrefixStore(f"resilio/{number}", store)  # type: ignore[union-attr]
            arguments = (*arguments[:_STORE], own, *arguments[_STORE + 1 :])
        made = create_one(*arguments, **options)
        store.add(made_here, 1)  # where it fails, every rank tries the same keys again
        return made

    def create_one(*arguments: Any, **options: Any) -> Any:
        _tell_limit(options.get("timeout", (*arguments, *[None] * 8)[_TIMEOUT]))
        backend = options.get("backend", (*arguments, *[""] * 4)[3])
        if not _is_gloo(backend):
            return create(*arguments, **options)
        descriptors, threads = _descriptors(), _threads()
        _before.append(descriptors)
        try:
            made = create(*arguments, **options)
        finally:
            _before.pop()
        _keep(made[0] if isinstance(made, tuple) else made, _sockets(descriptors), _threads() - threads)
        return made

    for group, (backend, _) in module._world.pg_map.items():  # type: ignore[union-attr]  # mypy knows no such attribute
        if _is_gloo(backend):
            _keep(group, {}, set())
    if module.is_initialized():  # type: ignore[union-attr]
        _uncounted.add(os.environ.get(_ROUND, ""))
    setattr(module, "_new_process_group_helper", create_and_keep)  # noqa: B010 - nor this one


def _tell_limit(limit: object) -> None:
    """Write for how long torch lets this rank wait in a call, of all its groups the longest, where its agent looks."""
    global _longest_s
    path, seconds = os.environ.get(_FILE), limit.total_seconds() if isinstance(limit, timedelta) else 0.0
    if not path or f"{seconds:g}" == os.environ.get(_OURS):
        return
    _longest_s = max(_longest_s, seconds)
    with contextlib.suppress(OSError):  # the disk is full: the launcher keeps to its own limit
        new = Path(path).with_suffix(".waits.new")
        new.write_text(f"{os.getpid()} {_longest_s:.0f}")
        new.replace(Path(path).with_suffix(".waits"))


def _is_gloo(backend: object) -> bool:
    return "gloo" in str(backend).lower() or str(backend).lower() == "undefined"


def _keep(group: object, sockets: dict[int, str], threads: set[int]) -> None:
    import ctypes  # imported here, since every rank that is executed again runs the rest of this file

    # a reference that not even the end of the interpreter gives back
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _made.append(MadeGroup(group, sockets, threads))


def connections() -> dict[int, str]:
    """Return the sockets of all groups, and of one that is being made: descriptor → what it was."""
    found = {descriptor: what for one in _made for descriptor, what in one.sockets.items()}
    for before in list(_before):
        found |= _sockets(before)
    return found


def is_making() -> bool:
    """Return whether a thread makes a group now. It may wait for a peer's connection, of which there is nothing yet."""
    return bool(_before)


def free(patience_s: float = 1.0) -> int:
    """Free all groups that no other object holds, once their threads have freed their last collective.

    Then their threads wait, and need no lock of Python, so that the destructor can wait for them. For groups that have
    been destroyed, in a process that goes on without them. Returns how many are still kept: their threads did not rest.
    """
    import ctypes

    until = time.monotonic() + patience_s
    if not _rest({thread for one in _made for thread in one.threads}, until):
        return len(_made)
    while _made:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(_made.pop().group))
    return 0


def _rest(threads: set[int], until: float) -> bool:
    """Wait until none of these threads has run for a while; one that waits for Python's lock looks for it all the time.

    The one that waits for the network looks for its end all the time, too, and holds nothing of Python's.
    """
    before = None
    while time.monotonic() < until:
        now = {thread: _turns(thread) for thread in threads if not _is_network(thread)}
        if now == before:
            return True
        before = now
        time.sleep(_REST_S)
    return False


def _turns(thread: int) -> str:
    """Return how often a thread has run so far."""
    try:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
    except OSError:
        return ""
    return "".join(line for line in status.splitlines() if "ctxt_switches" in line or line.startswith("State"))


def _is_network(thread: int) -> bool:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().startswith("gloo_tcp_loop")
    except OSError:
        return True


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}  # noqa: PTH208 - names, not paths


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def _sockets(before: dict[int, str]) -> dict[int, str]:
    """Return the sockets that were opened since."""
    return {
        descriptor: what
        for descriptor, what in _descriptors().items()
        if what.startswith("socket:") and before.get(descriptor) != what
    }


def keep_alive_when_imported() -> None:
    """Call ``keep_alive()`` as soon as this process imports torch's collectives, if ever."""
    sys.meta_path.insert(0, _OnImport())


class _OnImport:
    """Finds torch's module as usual, once, and calls ``keep_alive()`` when it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_keep(module: types.ModuleType) -> None:
                execute(module)
                keep_alive()

            spec.loader.exec_module = execute_and_keep  # type: ignore[method-assign]
        return spec
