"""Commands of ``resilio`` that pages show: each command and option exists, and the planner's are run."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from resilio_hpc.cli import main as cli
from tests.support.page_rehearsals import REHEARSALS
from tests.support.pages import PAGES, blocks, commands, of, to_run

NAMES = {command.name for command in cli.COMMANDS}


def shown(page: Path) -> list[list[str]]:
    """The words after ``resilio`` of every command on a page."""
    found = []
    for text in re.findall(r"(?<![\w/.-])resilio ([a-z][^`\n|…]*)", page.read_text()):
        with contextlib.suppress(ValueError):  # a sentence with an apostrophe
            words = shlex.split(text.partition(" > ")[0], comments=True)
            if words and words[0] in NAMES:
                found.append(words)
    return found


def _own(words: list[str]) -> list[str]:
    """The words before the user's own command."""
    return words[: words.index("--")] if "--" in words else words


@functools.cache
def help_of(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return out.getvalue()


def options_of(words: list[str]) -> str:
    """The help of a command, and of its part where it has such a one."""
    if words[0] == "plan" and not help_of(*words[:2]).startswith(f"usage: resilio plan {words[1]}"):
        return help_of("plan", "search")
    part = help_of(*words[:2]) if len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]) else ""
    return help_of(words[0]) + part


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_a_page_shows_exist(page: Path) -> None:
    unknown = [
        f"resilio {' '.join(words)}: {option}"
        for words in shown(page)
        for option in (word.partition("=")[0] for word in _own(words) if re.match(r"--[a-z]", word))
        if option not in options_of(words)
    ]
    assert unknown == []


def planned(page: Path) -> list[list[str]]:
    """The planner's commands that need neither a cluster nor a file."""
    needs = {"--partition", "--profile", "--calibration", "--inventory", "--submit", "--module", "--out", "--run"}
    return [
        words
        for words in shown(page)
        if words[0] == "plan"
        and "--global-batch" in words
        and "--gpu" in words
        and not needs & set(words)
        and not any(".py:" in word for word in words)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if planned(page)], ids=lambda page: page.name)
def test_the_planners_commands_answer(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a drawing
    text = " ".join(page.read_text().split())
    for words in planned(page):
        code = cli.main(words)
        out, err = capsys.readouterr()
        assert out if code == 0 else " ".join(err.split()) in text, (words, err)


def test_the_pages_show_commands() -> None:
    assert sum(len(shown(page)) for page in PAGES) > 150
    assert sum(len(planned(page)) for page in PAGES) >= 4


def test_every_command_is_typed_on_a_dev_cluster_or_says_where_else() -> None:
    with_commands = {page.stem: page for page in PAGES if commands(page)}
    assert with_commands.keys() == REHEARSALS.keys()
    stale = [
        (name, beginning)
        for name, rehearsal in REHEARSALS.items()
        for beginning in {**rehearsal.elsewhere, **rehearsal.codes, **rehearsal.then}
        if not any(command.startswith(beginning) for command in commands(with_commands[name]))
    ]
    assert stale == []
    typed = sum(len(to_run(page, REHEARSALS[name])) for name, page in with_commands.items())
    assert typed > 100
    assert of({"sbatch": 1}, "srun") is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_that_holds_commands_says_so(page: Path) -> None:
    command = re.compile(r"^\$ |^(resilio(-launch)?|sbatch|srun) [a-z-]+", re.MULTILINE)
    hidden = [text for text in blocks(page, "") if command.search(text)]
    assert [text for text in hidden if not text.startswith("resilio run ")] == []
