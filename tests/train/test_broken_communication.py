"""Connections that are shut down: those that a descriptor still is, and nothing is left open."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from resilio_hpc.train.broken_communication import _leave_store, _shut_down


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths


def name_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - no path of a file


def test_a_connection_is_shut_down_and_a_listening_socket_is_not() -> None:
    here, there = socket.socketpair()
    with here, there, socket.create_server(("127.0.0.1", 0)) as listening:
        before = open_files()
        _shut_down(here.fileno(), name_of(here.fileno()))
        assert there.recv(1) == b""
        _shut_down(listening.fileno(), name_of(listening.fileno()))
        with socket.create_connection(listening.getsockname()):
            listening.accept()[0].close()
        assert open_files() == before


def test_a_descriptor_that_is_another_socket_by_now_is_left_alone() -> None:
    here, there = socket.socketpair()
    with here, there:
        _shut_down(here.fileno(), "socket:[1]")
        here.send(b"x")
        assert there.recv(1) == b"x"


def test_a_descriptor_that_is_a_file_by_now_is_not_kept_open(tmp_path: Path) -> None:
    with (tmp_path / "arena").open("w") as file:
        before = open_files()
        _shut_down(file.fileno(), "socket:[1]")
        _shut_down(10_000, "socket:[1]")
        assert open_files() == before


def test_of_a_round_the_connection_to_its_store_is_shut_down_and_no_other() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as store,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(store.getsockname()),
        socket.create_connection(other.getsockname()) as kept,
        store.accept()[0] as theirs,
        other.accept()[0] as others,
    ):
        before = open_files()
        _leave_store(store.getsockname()[1])
        assert theirs.recv(1) == b""
        kept.send(b"x")
        assert others.recv(1) == b"x"
        assert open_files() == before
