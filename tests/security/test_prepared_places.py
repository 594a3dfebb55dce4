"""Somebody else was there first: a directory, a file or a link in /tmp and /dev/shm that bears our name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch import leftovers, run_directory
from tests.support.security.another_user import NOBODY, as_another_user, needs_root


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A directory like /tmp."""
    place = tmp_path / "public"
    place.mkdir()
    place.chmod(0o1777)
    for path in tmp_path.parents:
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    return place


PREPARED: dict[str, Callable[[Path, Path], None]] = {
    "a directory": lambda path, _target: path.mkdir(mode=0o777),
    "a link to a directory of the victim": lambda path, target: path.symlink_to(target),
    "a link to nowhere": lambda path, target: path.symlink_to(target / "missing"),
    "a file": lambda path, _target: path.write_text(""),
    "a pipe": lambda path, _target: os.mkfifo(path),
}


@needs_root
@pytest.mark.parametrize("what", PREPARED)
def test_a_place_that_somebody_else_prepared_is_refused(what: str, public: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir(mode=0o755)
    path = public / "resilio-0-abc"
    as_another_user(lambda: PREPARED[what](path, target))
    assert path.lstat().st_uid == NOBODY
    with pytest.raises(UsageError, match="belongs to somebody else"):
        run_directory.make_private(path)
    assert list(target.iterdir()) == []
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_link_of_our_own_is_refused_too(public: Path, tmp_path: Path) -> None:
    (public / "resilio-0-abc").symlink_to(tmp_path)
    with pytest.raises(UsageError):
        run_directory.make_private(public / "resilio-0-abc")


def test_a_directory_of_ours_that_was_open_is_closed(public: Path) -> None:
    path = public / "resilio-0-abc"
    path.mkdir(mode=0o777)
    run_directory.make_private(path)
    assert path.stat().st_mode & 0o777 == 0o700


@needs_root
def test_what_somebody_else_left_under_our_name_is_not_swept(public: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    name = f"resilio-{os.geteuid()}"

    def plant() -> None:
        (public / f"{name}-1").mkdir()
        (public / f"{name}-1" / "link").symlink_to(precious)
        (public / f"{name}-2").symlink_to(precious)
        for planted in (public / f"{name}-1", public / f"{name}-2"):
            os.utime(planted, (1, 1), follow_symlinks=False)

    as_another_user(plant)
    assert leftovers.sweep([public], 0.0) == []
    assert (precious / "file").read_text() == "x"
    assert (public / f"{name}-1" / "link").is_symlink()


def test_sweeping_our_own_follows_no_link(public: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    ours = public / f"resilio-{os.geteuid()}-1"
    ours.mkdir()
    (ours / "link").symlink_to(tmp_path / "precious")
    os.utime(ours, (1, time.time() - 1000))
    assert leftovers.sweep([public], 10.0) == [ours]
    assert (tmp_path / "precious").read_text() == "x"


@needs_root
def test_a_secret_that_is_somebody_elses_or_open_is_refused(public: Path) -> None:
    run_directory.open_run(public / "run")
    secret = public / "run" / "secret"
    secret.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        run_directory.read_run(public / "run")
    secret.chmod(0o600)
    os.chown(secret, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="must belong to you"):
        run_directory.read_run(public / "run")
