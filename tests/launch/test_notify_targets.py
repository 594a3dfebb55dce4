"""Targets of --notify: what is understood, and that their secrets are shown nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.rundir.notify_targets import check_targets, kept, masked, parse_target, put_away, read_targets

HOOK = "https://hooks.example.com/services/T00/SECRET"


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        (HOOK, "webhook", "webhook https://hooks.example.com"),
        ("HTTP://Host.example:8080/x?token=SECRET", "webhook", "webhook http://host.example:8080"),
        ("http://[::1]:99/SECRET", "webhook", "webhook http://::1:99"),
        ("mail -s 'a SECRET' me@example.com", "command", "command mail"),
        ("/opt/site/page --url https://x/SECRET", "command", "command page"),
        ("slack://SECRETA/SECRETB/SECRETC/#x", "apprise", "apprise slack"),
        ("mailto://me:SECRET@example.org", "apprise", "apprise mailto"),
    ],
)
def test_targets_and_the_names_that_may_be_shown(text: str, kind: str, name: str) -> None:
    target = parse_target(text)
    assert (target.kind, target.name) == (kind, name)
    assert "SECRET" not in target.name


def test_a_commands_words_are_a_shells_without_its_powers() -> None:
    assert parse_target("sh -c 'echo $HOME; a|b' \"x y\"").argv == ["sh", "-c", "echo $HOME; a|b", "x y"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"), ("   ", "is empty"),
        ("https:///SECRET", "without a host"), ("https://h/SECRET with space", "with a space"),
        ("https://me:SECRET@h/x", "user:password@"), ("https://h:port/SECRET", "cannot be read"),
        ("https://[h/SECRET", "cannot be read"), ("https://h/SECRETé", "letters that a URL cannot have"),
        ("mail 'SECRET", "quotes do not match"), ("a\nSECRET", "cannot be printed"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_is_refused_without_being_shown(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_target(text)
    assert why in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_a_file_holds_one_target_per_line(tmp_path: Path) -> None:
    (tmp_path / "targets").write_text(f"# who is told\n\n{HOOK}\n  logger -t x \n")
    targets = read_targets(["@targets", "logger -t x", HOOK], tmp_path)
    assert [target.text for target in targets] == [HOOK, "logger -t x"]


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"# nothing\n", "no target"), (b"\xff\n", "not UTF-8"), (b"x" * 70_000, "too big")],
)
def test_a_file_that_holds_none_is_refused(content: bytes | None, why: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "targets").write_bytes(content)
    with pytest.raises(UsageError, match=why):
        read_targets(["@targets"], tmp_path)


def test_commands_must_exist_where_they_will_run(tmp_path: Path) -> None:
    (tmp_path / "page.sh").write_text("#!/bin/sh\n")
    check_targets(read_targets(["cat -", HOOK], tmp_path), tmp_path)
    for command in ("no-such-command SECRET", "./page.sh SECRET"):  # the second is not executable
        with pytest.raises(UsageError, match="not found or is not executable") as refused:
            check_targets(read_targets([command], tmp_path), tmp_path)
        assert "SECRET" not in str(refused.value)


def test_agents_find_the_targets_in_the_run_directory_and_others_cannot_read_them(tmp_path: Path) -> None:
    targets = read_targets([HOOK, "logger -t x"], tmp_path)
    put_away(tmp_path, targets)
    assert kept(tmp_path) == targets
    assert (tmp_path / "notify").stat().st_mode & 0o777 == 0o600
    put_away(tmp_path, ())
    assert kept(tmp_path) == ()
    assert not (tmp_path / "notify").exists()


@pytest.mark.parametrize("content", ["", "{", "3", "[3]", json.dumps(["https://h:port/x"])])
def test_a_spoilt_file_tells_nobody(content: str, tmp_path: Path) -> None:
    (tmp_path / "notify").write_text(content)
    assert kept(tmp_path) == ()


def test_a_command_line_is_written_down_without_secrets() -> None:
    argv = ["resilio-launch", "--notify", HOOK, f"--notify={HOOK}", "--noti", "mail SECRET", "--notify", "@file",
            "--notify", "'SECRET", "--node-rank", "1", "train.py", "--lr", "1"]  # fmt: skip
    shown = masked(argv)
    assert shown == [
        "resilio-launch", "--notify", "<webhook https://hooks.example.com>",
        "--notify=<webhook https://hooks.example.com>", "--noti", "<command mail>", "--notify", "@file",
        "--notify", "<not shown>", "--node-rank", "1", "train.py", "--lr", "1",
    ]  # fmt: skip
