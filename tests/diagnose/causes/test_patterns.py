"""The table of failure patterns, and the index that searches it."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.diagnose.causes.log_line import MOST_CHARACTERS, stated
from resilio_hpc.diagnose.causes.pattern_index import PatternIndex, alternatives, literals_of
from resilio_hpc.diagnose.causes.pattern_table import CauseClass, LineRole, find, parse, shipped

PATTERNS = shipped().pattern
COMPILED = [re.compile(pattern.text, re.IGNORECASE) for pattern in PATTERNS]
PARTS = [part for pattern in PATTERNS for part in alternatives(pattern.text)]
# letters of logs: a match of ".*" with any letter of Unicode would be no line
_LETTERS = st.characters(codec="ascii", exclude_categories=["Cc"])


def searched(line: str) -> str | None:
    """What a plain search from the first pattern to the last finds."""
    return next((one.name for one, regex in zip(PATTERNS, COMPILED, strict=True) if regex.search(line)), None)


def test_the_table_is_large_and_each_pattern_has_its_own_name_and_a_source() -> None:
    assert len(PATTERNS) >= 120
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert all(pattern.source and pattern.says and not pattern.says.endswith(".") for pattern in PATTERNS)
    assert shipped().todo.keys() == set(CauseClass)


def test_a_guess_is_never_sure() -> None:
    assert {hint.role for hint in shipped().hint} == {LineRole.HINT}
    assert all(hint.sure <= 0.3 for hint in shipped().hint)
    assert all(pattern.role is not LineRole.HINT for pattern in PATTERNS)


def test_an_echo_or_an_undecided_line_is_never_sure() -> None:
    unsure = [one for one in PATTERNS if one.role is LineRole.ECHO or one.cause is CauseClass.UNKNOWN]
    assert unsure
    assert [one.name for one in unsure if one.sure >= 0.7] == []


@pytest.mark.parametrize("examples", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_the_index_finds_what_a_plain_search_finds(examples: int) -> None:
    reached: set[str] = set()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)
    @given(st.data())
    def each(data: st.DataObject) -> None:
        for pattern in PATTERNS:
            part = data.draw(st.sampled_from(alternatives(pattern.text)))
            line = data.draw(st.from_regex(re.compile(part), alphabet=_LETTERS))
            found = find(line)
            name = None if found is None else found.name
            assert name == searched(line)
            reached.add(name or "")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each()
    if examples > 1:  # else a pattern above takes all of its lines
        assert {pattern.name for pattern in PATTERNS} <= reached


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.sampled_from(PARTS))
def test_any_text_is_searched_alike(text: str, part: str) -> None:
    line = text + part.replace("\\", "")
    found = find(line)
    assert (None if found is None else found.name) == searched(line)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a|b", ["a", "b"]),
        ("a(b|c)|d", ["a(b|c)", "d"]),
        (r"a\|b|[|)]c|\(d", [r"a\|b", "[|)]c", r"\(d"]),
        ("", [""]),
    ],
)
def test_a_pattern_is_cut_at_its_outermost_level(text: str, parts: list[str]) -> None:
    assert alternatives(text) == parts


@pytest.mark.parametrize(
    ("part", "literals"),
    [
        ("Out of memory", ["out of memory"]),
        (r"abc?defg.*hi", ["defg"]),
        (r"abcd\.efg", ["abcd.efg"]),
        (r"(first|second) x", ["first", "second"]),
        (r"(first|no) x", []),
        (r"(first|second)? x", []),
        (r"x(?!later)", []),
        (r"ab{2,3}cdef", ["cdef"]),
        (r"[a-z]+\d", []),
    ],
)
def test_what_every_match_contains(part: str, literals: list[str]) -> None:
    assert literals_of(part) == literals


def test_a_hostile_line_is_cut_and_answered() -> None:
    for line in (
        "(" * 5000,
        "shm" + "x shm" * 100_000,
        "a" * 1_000_000,
        "\x1b[" * 10_000,
        "[rank1]:" * 50_000,
        "\0" * 100,
    ):
        statement = stated(line)
        assert len(statement) <= MOST_CHARACTERS + 10
        find(statement)


@pytest.mark.parametrize(
    ("line", "statement"),
    [
        ("[rank3]: RuntimeError: x", "RuntimeError: x"),
        ("[default0]:[rank0]: RuntimeError: x", "RuntimeError: x"),
        ("[1,2]<stderr>:boom", "boom"),
        ("12: 2026-11-27 10:00:01,123 boom", "boom"),
        ("(Worker pid=12) boom", "boom"),
        ("\x1b[31mboom\x1b[0m\x07", "boom"),
        (" 46%|##  | 1/3\r 47%|##  | 2/3 boom\r", " 47%|##  | 2/3 boom"),
        ("It failed. This may be caused by a full disk", "It failed. "),
        ("which usually means: No space left on device", ""),
        ("may the force", "may the force"),
    ],
)
def test_prefixes_and_suppositions_are_no_statement(line: str, statement: str) -> None:
    assert stated(line) == statement.rstrip()


@pytest.mark.parametrize(
    "text",
    [
        "[[pattern]]\nname = 'a'",
        "nonsense = ",
        "[todo]\n[[pattern]]\nname='a'\ntext='('\nclass='data'\nrole='root'\nsure=1\nsays='a'\nsource='b'",
        "[todo]\n[[pattern]]\nname='a'\ntext='a'\nclass='date'\nrole='root'\nsure=1\nsays='a'\nsource='b'",
        "[todo]\n[[pattern]]\nname='a'\ntext='a'\nclass='data'\nrole='root'\nsure=2\nsays='a'\nsource='b'",
    ],
)
def test_a_wrong_table_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ResilioError, match=r"^table of failure patterns: [^\n]*$"):
        parse(text)


def test_an_index_of_short_patterns_tries_them_always() -> None:
    index = PatternIndex(["ab", "xyz$", "long enough"])
    assert [index.first(line) for line in ("..AB", "xyz", "LONG ENOUGH ab", "none", "")] == [0, 1, 0, None, None]
