"""Files that are executed or believed: what another user owns, could write or could exchange is refused by name."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import exchange
from resilio_hpc.core.errors import Untrusted
from tests.support.environments import open_the_way_to
from tests.support.security.another_user import NOBODY, become_another_user, needs_root
from tests.support.waiting import until


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def given(path: Path) -> None:
    path.write_text("theirs")
    os.chown(path, NOBODY, NOBODY)


def writable(path: Path) -> None:
    path.write_text("anybody's")
    path.chmod(0o664)


def link(path: Path) -> None:
    path.with_name("target").write_text("elsewhere")
    path.symlink_to("target")


@needs_root
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (given, "belongs to user"),
        (writable, "can be written by other users"),
        (link, "is a link"),
        (lambda path: path.symlink_to("nowhere"), "is a link"),
        (os.mkfifo, "is no regular file"),
        (lambda path: path.mkdir(), "is no regular file"),
        (lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)), "is no regular file"),
    ],
)
def test_a_file_that_is_not_ours_alone_is_refused_by_name(
    make: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    make(path)
    for use in (trusted_files.read, trusted_files.read_object, trusted_files.open_file):
        with pytest.raises(Untrusted, match=f"^{path} {why}"):
            use(path)


def test_what_is_written_follows_no_link_and_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "file").symlink_to("precious")
    with pytest.raises(Untrusted, match="is a link"):
        trusted_files.open_file(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert (tmp_path / "precious").read_text() == "x"
    before = os.umask(0)
    try:
        os.close(trusted_files.open_file(tmp_path / "new", os.O_WRONLY | os.O_CREAT, 0o666))
        trusted_files.make_directory(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new") == 0o644
    assert mode_of(tmp_path / "one") == mode_of(tmp_path / "one" / "two") == 0o755


def test_own_directories_are_closed_and_missing_files_are_missing(tmp_path: Path) -> None:
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o2775)
    (directory / "file").write_text("{}")
    assert trusted_files.read_object(directory / "file") == {}
    assert mode_of(directory) == 0o2755
    assert trusted_files.read_object(directory / "missing") is None
    with pytest.raises(FileNotFoundError, match="missing"):
        trusted_files.read(directory / "missing")
    with pytest.raises(OSError, match="too large"):
        trusted_files.read(directory / "file", limit_bytes=1)


@needs_root
def test_directories_of_others_and_public_ones_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "file").write_text("mine")
    directory.chmod(0o1777)  # as /tmp: to close it would be wrong
    with pytest.raises(Untrusted, match=f"other users can write in {directory}"):
        trusted_files.read(directory / "file")
    assert mode_of(directory) == 0o1777
    directory.chmod(0o755)
    os.chown(directory, NOBODY, NOBODY)
    with pytest.raises(Untrusted, match=f"{directory} belongs to user"):
        trusted_files.read(directory / "file")
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(Untrusted, match="is a link"):
        trusted_files.read(tmp_path / "link" / "file")


@needs_root
def test_a_directory_that_is_exchanged_meanwhile_is_never_believed(tmp_path: Path) -> None:
    """The check is of what is open: in a shared directory another user exchanges ours for theirs, again and again."""
    open_the_way_to(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for name, owner in (("run", 0), ("theirs", NOBODY)):
        (shared / name).mkdir()
        (shared / name / "file").write_text("theirs" if owner else "mine")
        os.chown(shared / name, owner, owner)
        os.chown(shared / name / "file", owner, owner)
    child = os.fork()
    if child == 0:
        become_another_user()
        while True:
            exchange(shared / "run", shared / "theirs")
    seen: set[str] = set()

    def look() -> bool:
        try:
            seen.add(trusted_files.read_text(shared / "run" / "file"))
        except Untrusted:
            seen.add("refused")
        return {"mine", "refused"} <= seen

    try:
        until(look, "both directories", lambda: seen, poll_s=0.0)
        for _ in range(2000):
            look()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert seen == {"mine", "refused"}


@needs_root
def test_a_run_directory_may_be_named_by_a_link_of_its_user_only(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert trusted_files.run_directory(tmp_path / "link") == tmp_path / "real"
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(Untrusted, match="link belongs to user"):
        trusted_files.run_directory(tmp_path / "link")


def test_a_project_directory_is_not_closed_to_its_group_by_mistake(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    project.chmod(0o2775)
    with pytest.raises(Untrusted, match="name a new one"):
        trusted_files.run_directory(project)
    assert mode_of(project) == 0o2775
