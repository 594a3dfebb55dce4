"""``resilio simulate``: its forms of output, and what it says of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.cli import main

SMALL = ("simulate", "--gpus", "64", "--mtbf-h", "10", "--days", "3", "--repeats", "2", "--spares", "1")


def test_a_table_an_object_and_a_page_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(list(SMALL)) == 0
    table = capsys.readouterr().out
    assert main.main([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main.main([*SMALL, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for row in found["rows"]:
        assert any(line.startswith(row["policy"]) and f"{row['ettr']['median']:.1%}" in line
                   for line in table.splitlines())  # fmt: skip
        assert f"{row['ettr']['median']:.2%}" in page
    assert found["rows"][0]["policy"] == "resilio" and "queue_s" in found["guesses"]


def test_values_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--compare", "spares=0,2", "--compare", "save-every=60,auto", "--compare", "partner-copies=on", "--json")
    assert main.main([*SMALL, *more, "--set", "by_hand_s=60"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["differs"].split(",")[0] for row in rows] == ["spares 0", "spares 0", "spares 2", "spares 2"]
    assert {row["setup"]["save_every_s"] for row in rows} > {60.0} and all(
        row["setup"]["partner_copies"] for row in rows
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--compare", "cake=1"), "cake is not known"), (("--compare", "spares=many"), "a whole number from 0"),
        (("--set", "queue_s"), "NAME=VALUE"), (("--set", "queue_s=long"), "a number is needed"),
        (("--set", "queue_s=nan"), "from 0 to"), (("--domain", "16"), "NODES:HOURS"), (("--gpus", "0"), "from 1 to"),
        (("--from-run", "no-such-run"), "no-such-run"), (("--policy", "magic"), "no policy is named magic"),
        (("--save-every", "0"), "from 0.001"), (("--html", "."), "is a directory"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(more: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*SMALL, *more]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1
