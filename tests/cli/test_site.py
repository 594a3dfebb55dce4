"""``resilio site``: parsers of all commands, manual pages, completion in bash, the module file."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.cli import main as cli
from resilio_hpc.cli.common.parser import Parser, parser_of
from resilio_hpc.cli.site import completion, man_page, module_file, parsers, site
from resilio_hpc.core.errors import UsageError
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

PAGES = {page.name: page.text for page in man_page.pages("2026-01-31")}
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
read -r _ _ _ _ function _ <<< "$(complete -p "$1")"
$function "$1" "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_every_command_gives_its_parser() -> None:
    made = {name: parser.prog for name, _, parser in parsers.commands_of(parsers.whole())}
    assert made == {one.name: f"resilio {one.name}".replace("resilio launch", "resilio-launch") for one in cli.COMMANDS}


def test_a_command_does_nothing_but_make_its_parser() -> None:
    did = []

    def command(argv: object) -> int:
        parser = Parser(prog="resilio example")
        parser.parse_args([])
        did.append(argv)
        return 0

    assert parser_of(command).prog == "resilio example"
    assert did == []
    assert command([]) == 0 and did == [[]]
    with pytest.raises(LookupError):
        parser_of(lambda argv: 0)


def plain(text: str) -> str:
    """The text of a page as it is read."""
    text = re.sub(r"\\f[BIR]|\\&", "", text)
    for one, written in man_page.OWN_CHARACTERS.items():
        text = text.replace(written, one)
    return text


def all_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [parser, *(one for _, _, below in parsers.commands_of(parser) for one in all_parsers(below))]


@pytest.mark.parametrize("name", [one.name for one in cli.COMMANDS])
def test_a_page_has_every_option_of_its_command(name: str) -> None:
    text = plain(PAGES[f"resilio-{name}"])
    below = {command: parser for command, _, parser in parsers.commands_of(parsers.whole())}[name]
    wanted = [
        spelling
        for parser in all_parsers(below)
        for action in parser._actions
        for spelling in parsers.spellings(action)
        if action.help is not argparse.SUPPRESS
    ]
    lines = {word for line in text.splitlines() if line.startswith("-") for word in re.split(r"[ ,]+", line)}
    assert [one for one in wanted if one not in lines] == []
    assert text.count("\n.SH SEE ALSO\n") == 1 and f"resilio-{name} - " in text


def test_a_page_is_made_of_plain_text_whatever_a_help_says() -> None:
    assert man_page.escaped("a\\b -x 'é…'\x1b") == "a\\(rsb \\-x \\(aq\\[u00E9]\\[u2026]\\(aq"
    parser = Parser(prog="resilio odd", epilog="examples:\n  .nothing\n\n  'quoted'\nexit codes: 0 done")
    parser.add_argument("--odd", help=".so /etc/passwd %(default)s", default=7)
    (page,) = [man_page.page_of("resilio-odd", "odd", parser, ["resilio"], "2026-01-31")]
    requests = {line.split()[0] for line in page.text.splitlines() if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".TP", ".nf", ".fi", ".BR"}
    assert "\\&.so /etc/passwd 7" in page.text and '.SH "EXIT CODES"\n0 done' in page.text
    assert all(text.isascii() for text in PAGES.values())


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("bash")
    for name, text in completion.scripts("bash").items():
        (where / name).write_text(text)
    return where


def completed(scripts: Path, *words: str, cwd: Path | None = None) -> list[str]:
    """What bash offers for the last of these words."""
    argv = ["bash", "-c", BASH, "bash", str(scripts / words[0]), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=cwd, env=scrubbed())
    assert done.stderr == ""
    return [one for one in done.stdout.splitlines() if one]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("resilio", "undr"), ["undrain"]),
        (("resilio", "ckpt", "e"), ["export"]),
        (("resilio", "ckpt", "show", "--t"), ["--tree"]),
        (("resilio", "plan", "profile"), ["profile", "profile-comm"]),
        (("resilio", "plan", "predict", "--cal"), ["--calibration"]),
        (("resilio", "health", "run", "--context", ""), ["health", "idle", "start"]),
        (("resilio", "launch", "--no-t"), ["--no-torch"]),
        (("resilio-launch", "--mode", ""), ["observe", "checkpoint", "recover"]),
        (("resilio-launch", "--no-z"), ["--no-zygote"]),
        (("resilio-launch", "--mode", "observe", "tr"), ["train.py"]),
        (("resilio-launch", "--run-dir", ""), ["runs"]),
        (("resilio", "status", "r"), ["runs"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_bash_offers(scripts: Path, tmp_path: Path, words: tuple[str, ...], offered: list[str]) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "runs").mkdir()
    assert completed(scripts, *words, cwd=tmp_path) == offered


def test_scripts_of_both_commands_live_in_one_shell(scripts: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.write_text("\n".join((scripts / name).read_text() for name in ("resilio-launch", "resilio")))
    shutil.copy(both, tmp_path / "resilio")
    assert completed(tmp_path, "resilio", "launch", "--no-z") == ["--no-zygote"]
    assert completed(tmp_path, "resilio", "undr") == ["undrain"]


def test_all_of_it_is_written_below_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = site.files(tmp_path, {"SOURCE_DATE_EPOCH": "1767225600"})
    assert ' 1 2026-01-01 "resilio ' in files["man/man1/resilio-launch.1"]
    assert "bash-completion/completions/resilio" in files and module_file.PLACE not in files
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "resilio").touch()
    assert site.main(["install", str(tmp_path)]) == 0
    assert set(site.files(tmp_path, {})) == {
        str(path.relative_to(tmp_path / "share")) for path in (tmp_path / "share").rglob("*") if path.is_file()
    }
    assert f"prepend-path PATH {{{tmp_path}/bin}}" in (tmp_path / "share" / module_file.PLACE).read_text()
    with pytest.raises(UsageError, match="no directory"):
        site.main(["install", str(tmp_path / "none")])
    with pytest.raises(UsageError, match="without spaces, braces"):
        module_file.text(Path("/a{b"))


def test_without_shtab_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(UsageError, match=r"pip install 'resilio_hpc\[site\]'"):
        completion.scripts("bash")
