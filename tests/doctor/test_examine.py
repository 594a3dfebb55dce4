"""Each check runs in a child: what hangs, crashes or raises says so, and all others go on."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.doctor import finding, registry
from resilio_hpc.doctor.examine import DoctorResult, examine
from resilio_hpc.doctor.finding import DoctorCheck, DoctorFinding, DoctorState, DoctorView, Look
from resilio_hpc.prolog_epilog.base.isolated import Child, Ended
from tests.support import mounts
from tests.support.doctor.machines import COMMAND
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

VIEW = DoctorView({}, Path("/nonexistent/run"))


def check(name: str, look: Look, needed: bool = True, after: tuple[str, ...] = (), budget_s: float = 60) -> DoctorCheck:
    return DoctorCheck(name, "group", look, "", "", needed, after, budget_s)


def fine(view: DoctorView) -> DoctorFinding:
    return finding.ok("fine")


def hangs(view: DoctorView) -> DoctorFinding:
    view.mark("the hook")
    while True:
        signal.pause()


def crashes(view: DoctorView) -> DoctorFinding:
    view.mark("the edge")
    os.kill(os.getpid(), signal.SIGKILL)  # as the out-of-memory killer does
    return finding.ok("not reached")


def raises(view: DoctorView) -> DoctorFinding:
    raise ZeroDivisionError("by zero")


def lacks(view: DoctorView) -> DoctorFinding:
    raise ModuleNotFoundError("No module named 'h5py'", name="h5py")


def states(results: list[DoctorResult]) -> dict[str, DoctorState]:
    return {result.check.name: result.findings[0].state for result in results}


def test_what_hangs_is_named_and_the_rest_goes_on() -> None:
    results = examine([check("first", hangs, budget_s=0.2), check("second", fine)], VIEW)
    assert states(results) == {"first": DoctorState.FAILED, "second": DoctorState.OK}
    assert results[0].findings[0].seen == "no answer within 0.2 s at the hook"


@pytest.mark.parametrize(
    ("look", "words"),
    [(crashes, "its process ended by SIGKILL at the edge"), (raises, "ZeroDivisionError: by zero"),
     (lacks, "the Python package h5py is missing")],
)  # fmt: skip
def test_what_breaks_is_named_and_the_rest_goes_on(look: Look, words: str) -> None:
    results = examine([check("first", look, needed=False), check("second", fine)], VIEW)
    assert states(results) == {"first": DoctorState.WARNING, "second": DoctorState.OK}
    assert results[0].findings[0].seen == f"cannot be looked at: {words}"


def test_a_check_whose_ground_is_missing_is_not_tried() -> None:
    absent = check("absent", lambda view: finding.not_here("no such thing"))
    chain = [check("third", fine, after=("second",)), check("second", fine, after=("first",)), check("first", raises)]
    results = examine([*chain, absent, check("fourth", fine, after=("absent",))], VIEW)
    assert states(results)["first"] is DoctorState.FAILED
    assert {states(results)[name] for name in ("second", "third", "fourth")} == {DoctorState.NOT_HERE}
    assert results[1].findings[0].seen == "not tried, since this failed: first"
    assert results[-1].findings[0].seen == "no such thing"


def test_a_warning_is_ground_enough() -> None:
    doubtful = check("doubtful", lambda view: finding.warning("seen", "means", "todo"))
    assert states(examine([doubtful, check("next", fine, after=("doubtful",))], VIEW))["next"] is DoctorState.OK


def test_many_checks_run_a_few_at_a_time_in_the_order_given() -> None:
    many = [check(str(number), fine) for number in range(40)]
    assert [result.check.name for result in examine(many, VIEW)] == [str(number) for number in range(40)]


def test_hostile_text_is_one_printable_line() -> None:
    said = examine([check("odd", lambda view: finding.ok("a\x1b[31m\nb"))], VIEW)[0].findings[0].seen
    assert said == "a?[31m b"


def test_what_a_check_prints_stays_off_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(view: DoctorView) -> DoctorFinding:
        os.write(1, b"noise")
        os.write(2, b"noise")
        return finding.ok("fine")

    examine([check("loud", loud)], VIEW)
    assert capfd.readouterr() == ("", "")


def test_a_hung_run_directory_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "data" / "file"
    place.parent.mkdir()
    with mounts.hanging(place, b"x"):
        chosen = [replace(one, budget_s=2.0) for one in registry.select(["run-directory", "direct-io", "clock"], False)]
        wanted = [one for one in chosen if one.name not in ("extensions",)]
        results = examine(wanted, DoctorView({}, tmp_path / "hung"))
    said = {result.check.name: result.findings[0] for result in results}
    assert said["run-directory"].state is DoctorState.FAILED
    assert said["run-directory"].seen.startswith(f"no answer within 2 s at {tmp_path}/hung on {tmp_path}/hung (")
    assert "fuse" in said["run-directory"].seen
    assert said["direct-io"].seen == "not tried, since this failed: run-directory"
    assert said["clock"].state in (DoctorState.OK, DoctorState.NOTICE)


@pytest.mark.slow
def test_an_interrupted_command_removes_its_files(tmp_path: Path, local: Path) -> None:
    """The recovery is on its way, so its launch ends, too."""
    argv = [*COMMAND, "loopback-recovery"]
    environment = scrubbed(RESILIO_LOCAL_DIR=local)
    process = subprocess.Popen(
        argv,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until(
        lambda: list(local.glob("resilio-doctor-*/run/run.json")),
        "a run began",
        alive=lambda: process.poll() is None,
    )
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    until(lambda: not list(local.iterdir()), "all is removed", lambda: list(local.iterdir()), patience_s=30)


def test_a_low_limit_on_processes_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("resilio_hpc.doctor.examine.Child", refused)
    result = examine([check("first", fine)], VIEW)[0]
    assert result.findings[0].seen == "no process can be started: Resource temporarily unavailable"


def test_where_few_processes_may_run_checks_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[Child] = []

    class OneChild(Child):
        def __init__(self, *words: Any, **more: Any) -> None:
            if len(running) > len(ended):
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*words, **more)
            running.append(self)

        def collect(self) -> Ended | None:
            found = super().collect()
            if found is not None:
                ended.append(self)
            return found

    ended: list[Child] = []
    monkeypatch.setattr("resilio_hpc.doctor.examine.Child", OneChild)
    results = examine([check(str(number), fine) for number in range(5)], VIEW)
    assert {result.findings[0].state for result in results} == {DoctorState.OK}
    assert len(running) == 5


def test_checks_are_chosen_by_name_with_what_they_build_on() -> None:
    assert [one.name for one in registry.select(["direct-io"], False)] == ["extensions", "run-directory", "direct-io"]
    assert registry.RECOVERY not in {one.name for one in registry.select([], True)}
    assert len(registry.select([], False)) == len(registry.CHECKS)


def test_the_registry_is_sound() -> None:
    names = [one.name for one in registry.CHECKS]
    assert len(set(names)) == len(names)
    assert all(set(one.after) <= set(names) for one in registry.CHECKS)
    assert all(one.looks_at and one.matters and one.helps for one in registry.CHECKS)
