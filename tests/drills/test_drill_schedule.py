"""Lines for crontab and scrontab: what they run, when, and how they are put into a table that is there."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.drills.schedule import DrillSchedule, time_of_day, with_block

COMMAND = ("/opt/a b/resilio",)


def schedule(**more: object) -> DrillSchedule:
    fields = {"names": ("rank-sigkill",), "command": COMMAND, "evidence": Path("/data/drills"), "hour": 3, "minute": 17}
    return DrillSchedule(**{**fields, **more})  # type: ignore[arg-type]


def command_of(line: str) -> str:
    """What cron's shell gets: the sixth field, with its escapes undone."""
    return line.split(" ", 5)[5].replace("\\%", "%")


def test_cron_does_it_on_a_day_of_the_month_or_on_sundays() -> None:
    assert schedule(day=3).cron()[0].startswith("17 3 3 * * ")
    assert schedule(day=None).cron()[0].startswith("17 3 * * 0 ")


def test_crons_line_runs_the_drill_and_a_second_one_does_nothing_meanwhile(tmp_path: Path) -> None:
    program = tmp_path / "a 100%" / "resilio"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"; sleep 1\n')
    program.chmod(0o755)
    evidence = tmp_path / "my drills"
    (line,) = schedule(command=(str(program),), evidence=evidence, run=Path("/runs/it's")).cron()
    assert "%" not in line.replace("\\%", "")
    both = [subprocess.Popen(["/bin/sh", "-c", command_of(line)]) for _ in range(2)]
    assert [one.wait(30) for one in both] == [0, 0]
    said = (evidence / "schedule.log").read_text()
    assert said == f"drill run rank-sigkill --run /runs/it's --yes --evidence {evidence}\n"


def test_the_jitter_is_a_wait_by_chance(tmp_path: Path) -> None:
    (line,) = schedule(jitter_s=600, command=("/bin/true",), evidence=tmp_path).cron()
    wait = command_of(line).partition(";")[0]
    assert wait == "sleep $(shuf -i 0-600 -n 1)"
    drawn = subprocess.run(["/bin/sh", "-c", wait.replace("sleep", "echo")], capture_output=True, text=True, check=True)
    assert 0 <= int(drawn.stdout) <= 600


def test_scrontab_has_its_options_before_the_line() -> None:
    *options, line = schedule(run=Path("/runs/a"), limit_s=5400, names=("rank-sigkill", "rank-sigstop")).scrontab()
    assert options[:3] == [
        "#SCRON --job-name=resilio-drill-rank-sigkill-rank-sigstop", "#SCRON --time=01:30:00",
        "#SCRON --dependency=singleton",
    ]  # fmt: skip
    assert shlex.split(command_of(line))[:5] == [*COMMAND, "drill", "run", "rank-sigkill", "rank-sigstop"]
    with pytest.raises(UsageError, match="no path with spaces"):
        schedule(evidence=Path("/data/my drills")).scrontab()


def test_a_block_takes_the_place_of_the_one_before_and_leaves_the_others() -> None:
    others = "MAILTO=me\n0 1 * * * backup\n"
    once = with_block(others, "a", ["1"])
    assert once == f"{others}# resilio drill: a\n1\n# end of resilio drill: a\n"
    twice = with_block(with_block(once, "b", ["2"]), "a", ["3", "4"])
    assert twice.splitlines()[2:] == [
        "# resilio drill: b", "2", "# end of resilio drill: b",
        "# resilio drill: a", "3", "4", "# end of resilio drill: a",
    ]  # fmt: skip
    assert with_block(twice, "a", ["3", "4"]) == twice
    with pytest.raises(UsageError, match="mend it by hand"):
        with_block("# resilio drill: a\n1\n", "a", ["2"])


@pytest.mark.parametrize("text", ["24:00", "3:7", "noon", "-1:00", ""])
def test_a_time_of_day_is_checked(text: str) -> None:
    assert time_of_day("4:05") == (4, 5)
    with pytest.raises(UsageError, match="a time of day"):
        time_of_day(text)
