"""Another user of the same machine: uid 65534, without any group of ours. Needs root to become that user."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_another_user(act: Callable[[], Any]) -> Any:
    """What ``act`` returned (JSON values) in a process of another user; an OSError comes back as its class's name."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # newer Pythons warn of forking among threads; the child calls what is loaded
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        _act_and_exit(act, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def become_another_user() -> None:
    """For good, in a child process."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _act_and_exit(act: Callable[[], Any], writer: int) -> None:
    try:
        become_another_user()
        try:
            answer = act()
        except OSError as error:
            answer = type(error).__name__
        os.write(writer, json.dumps(answer).encode())
    finally:
        os._exit(0)
