"""Slurm's host list notation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.hostlist import MAX_NODES, expand, expand_counts, told


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("n[1-3,07],login", ["n1", "n2", "n3", "n07", "login"]),
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1]-ib,b2", ["a1-ib", "b2"]),
        (" n[1,2] \n", ["n1", "n2"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "n[2-1]",
        "(null)",
        "None assigned",
        "n1 n2",
        "n[\u0661-\u0663]",
        "n[\u00b2]",
        "kn\u00f6tchen1",
        "n1;id",
        "n[1-",
        "n[]",
        "n[a-b]",
        "n[1-2-3]",
        "n[-1]",
        "n]1",
        "n[1,]",
        "n[[1]]",
        ",",
        "a,,b",
    ],
)
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        expand(text)


@pytest.mark.parametrize("text", ["n[1-999999999]", "a[1-400]b[1-400]"])
def test_a_list_without_bound_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=str(MAX_NODES)):
        expand(text)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z-]{0,4}", fullmatch=True),
            st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20)), min_size=1, max_size=4),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_read_back(groups: list[tuple[str, list[tuple[int, int]], int]]) -> None:
    wanted: list[str] = []
    parts: list[str] = []
    for prefix, ranges, width in groups:
        inside = [f"{a:0{width}d}-{a + n:0{width}d}" if n else f"{a:0{width}d}" for a, n in ranges]
        parts.append(f"{prefix}[{','.join(inside)}]")
        # the first number's width pads the range, as Slurm does
        wanted += [f"{prefix}{k:0{max(width, len(str(a)))}d}" for a, n in ranges for k in range(a, a + n + 1)]
    assert expand(",".join(parts)) == wanted


@given(st.text(alphabet="n[]-,0123456789 x", max_size=30))
def test_any_text_is_a_list_or_a_usage_error(text: str) -> None:
    try:
        assert all(expand(text))
    except UsageError:
        pass


def test_an_answer_that_names_no_nodes() -> None:
    assert [told(text) for text in ("", "(null)", "None assigned\n", "n[1-2]")] == [[], [], [], ["n1", "n2"]]
    with pytest.raises(UsageError):
        told("n[2-1]")


def test_counts() -> None:
    assert expand_counts("8(x2),4") == [8, 8, 4]
    for text in ("", "8x2", "(x2)", "8(x2", "-1", "\u0668", "8(x\u0662)"):
        with pytest.raises(UsageError):
            expand_counts(text)
