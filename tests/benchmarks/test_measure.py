"""Series of timings: what never finished is not forgotten."""

import io
import json
from pathlib import Path

from rich.console import Console

from measure import NEVER, Series, print_table, write_json


def test_a_timing_that_never_came_counts_in_median_and_percentile() -> None:
    assert Series("a", "", [1.0, NEVER, 3.0]).median_s() == 3.0
    assert Series("a", "", [1.0, NEVER, NEVER]).median_s() == NEVER
    assert Series("a", "", [1.0, 2.0, NEVER]).percentile_s(95) == NEVER


def test_percentiles_are_timings_that_were_measured() -> None:
    series = Series("a", "", [float(value) for value in range(1, 101)])
    assert (series.percentile_s(50), series.percentile_s(95), series.percentile_s(100)) == (50, 95, 100)


def test_json_has_null_for_never(tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", "title", [Series("a", "best", [0.5, NEVER], [{"join": 0.5}])])
    (row,) = json.loads((tmp_path / "out.json").read_text())["series"]
    assert row["values_s"] == [0.5, None]
    assert (row["never"], row["max_s"], row["median_phases_s"]) == (1, None, {"join": 0.5})


def test_the_table_says_never_and_how_many_finished() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    print_table("t", [Series("a", "best", [0.5, NEVER, NEVER], [{"join": 0.25}])], console)
    (row,) = [line for line in console.export_text().splitlines() if "best" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["a", "best", "never", "never", "1/3", "0.250"]
