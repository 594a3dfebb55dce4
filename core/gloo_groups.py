"""A workaround for a deadlock in torch's gloo backend (seen with 2.13), so that a rank that has finished can end.

When the last reference to a gloo process group goes while Python's lock is held (DDP's reducer being freed is enough),
its destructor waits for its own thread; that thread may be freeing the last collective, for which it needs the lock.
Seen with four ranks of a small DDP script whose model lives in a function: forked again and again without any launcher,
one hung within three lives; the rank then never ends. So one reference is never given back; the process's end frees
everything anyway.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

MODULE = "torch.distributed.distributed_c10d"


def keep_alive() -> None:
    """Keep all gloo process groups, present and future, alive until their process ends.

    Does nothing where torch is not imported, and nothing further when called again.
    """
    module = sys.modules.get(MODULE)
    create = getattr(module, "_new_process_group_helper", None)
    if create is None or hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_and_keep(*arguments: Any, **options: Any) -> Any:
        made = create(*arguments, **options)
        _keep(made[0] if isinstance(made, tuple) else made, options.get("backend", (*arguments, *[""] * 4)[3]))
        return made

    for group, (backend, _) in module._world.pg_map.items():  # type: ignore[union-attr]  # mypy knows no such attribute
        _keep(group, backend)
    setattr(module, "_new_process_group_helper", create_and_keep)  # noqa: B010 - nor this one


def _keep(group: object, backend: object) -> None:
    if "gloo" in str(backend).lower() or str(backend).lower() == "undefined":
        import ctypes  # imported here, since every rank that is executed again runs the rest of this file

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


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
