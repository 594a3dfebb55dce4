"""A rank that has finished must be able to end: a way round a deadlock in torch's gloo backend (seen with 2.13).

When the last reference to a gloo process group goes while Python's lock is held (DDP's reducer being freed is enough),
its destructor waits for its own thread; that thread may be freeing the last collective, for which it needs the lock.
Seen with four ranks of a small DDP script whose model lives in a function: forked again and again without any launcher,
one hung within three lives; the rank then never ends. So one reference is never given back; the process's end frees
everything anyway.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any


def keep_alive() -> None:
    """Gloo process groups, those made already and those to come, live as long as their process.

    Does nothing where torch is not imported, and nothing further when called again.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
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
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
