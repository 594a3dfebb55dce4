"""Plain words: a text uses none of the words below, whose message says why and what to write instead."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.environments import ROOT

PERSON = "a process is no person"
FIELD = "the field has a word for it"
BANNED: dict[str, tuple[str, str]] = {  # word: why not, what to write instead
    "whoever": (PERSON, "name it: the process, the user, the node"),
    "nobody": (PERSON, "no process, no user"),
    "somebody": (PERSON, "name it: a process, a user"),
    "anybody": (PERSON, "any process, any user"),
    "what there is of": ("it is hard to read", "the available ..."),
    "as good as": ("it is vague", "almost, or equal to"),
    "hindmost": ("it is hard to read", "slowest"),
    "tenure": (FIELD, "leadership"),
    "enrolment": (FIELD, "voters"),
    "regrouping": (FIELD, "membership change"),
    "ballot": (FIELD, "vote record"),
    "roster": (FIELD, "node list"),
}


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def page_text(path: Path) -> str:
    """Return a page's running text, without code blocks and quoted names."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)


def sources() -> list[Path]:
    """Return the sources of the product, each once: the links inside the package are not followed."""
    folders = (
        "resilio_hpc",
        "autoparallel",
        "ckpt",
        "core",
        "native",
        "prolog_epilog",
        "slurm",
        "benchmarks",
        "examples",
    )
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in {".py", ".c", ".h", ".toml", ".sh"})


def source_text(path: Path) -> str:
    """Return what a person reads in a source: of Python comments and strings, of others all; no names in quotes."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = "\n".join(one.string for one in tokens if one.type in {tokenize.COMMENT, tokenize.STRING})
    return re.sub(r"``[^`\n]*``", "", text)


# What is held: files, and how the text to look at is read from one. A line more holds more.
HELD: list[tuple[Callable[[], list[Path]], Callable[[Path], str]]] = [
    (pages, page_text),
    (sources, source_text),
]


def banned_words(text: str) -> list[str]:
    """Return one line for every banned word in a text."""
    plain = re.sub(r"\s+", " ", text)
    return [
        f"{word!r}: {why}; write: {instead}"
        for word, (why, instead) in BANNED.items()
        if re.search(rf"\b{word}s?\b", plain, re.IGNORECASE)
    ]


@pytest.mark.parametrize(("files", "text"), HELD)
def test_no_banned_word(files: Callable[[], list[Path]], text: Callable[[Path], str]) -> None:
    found = {str(path.relative_to(ROOT)): banned_words(text(path)) for path in files()}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize("sample", ["Nobody waits.", "two rosters", "what there\nis of it"])
def test_a_banned_word_is_seen(sample: str) -> None:
    assert banned_words(sample) != []


def test_names_in_code_are_not_running_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The field `roster`.\n```sh\nnobody\n```\n")
    assert banned_words(page_text(page)) == []
