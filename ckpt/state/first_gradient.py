"""Tells when a step's gradients begin to come: torch accumulates that of the model's last layer first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from resilio_hpc.ckpt.state.watched import Watched


class FirstGradient:
    """Watches one parameter: the last one of the last optimizer."""

    def __init__(self, came: Callable[[], None]) -> None:
        """``came``: a method, called by the thread of the backward pass; its object is not kept alive."""
        self._came = WeakMethod(came)
        self._parameter: Any = None
        self._hook: Any = None

    def watch(self, watched: Watched, is_wanted: bool) -> None:
        """Watch these optimizers' parameters, or none any more."""
        parameter = watched.last_trained if is_wanted else None
        if parameter is self._parameter:
            return
        if self._hook is not None:
            self._hook.remove()
        came = self._came

        def call(_: Any) -> None:
            method = came()
            if method is not None:
                method()

        self._parameter = parameter
        register = getattr(parameter, "register_post_accumulate_grad_hook", None)  # since torch 2.1
        self._hook = register(call) if register is not None else None

    def __del__(self) -> None:
        if self._hook is not None:
            self._hook.remove()
