"""``--join``: what may be given with it, which runs can be joined, and by whom."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.allocation.placements import Site, SiteMode, joining_site
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.chain.joining import Facts, LaunchRecord, judge
from resilio_hpc.launch.cli.join_plan import join_plan
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import JoinRequest, parse_join
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.output_options import OutputOptions
from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.controller_view import ControllerView
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client.allocation import Allocation

OPTIONS = LaunchOptions(
    script="train.py", kind="script", run_dir="/run", notify=("https://hook/secret",), output=OutputOptions(view=True)
)
RECORD = LaunchRecord("7", "7", OPTIONS, "/work", True)
RUN = Path("/run")


def ask(*argv: str, environment: dict[str, str] | None = None) -> JoinRequest | None:
    return parse_join(argv, Caller(environment or {}, Path("/here"), 0.0, 11))


def facts(
    record: LaunchRecord | None = RECORD,
    verdict: str = "",
    has_next_job: bool = False,
    leads: bool = True,
    endpoint: str = "n1:4000",
    agents: tuple[str, ...] = ("n1", "n2"),
) -> Facts:
    told = {"verdict": verdict, "exit_code": 0} if verdict else None
    return Facts(record, told, has_next_job, leads, endpoint, agents)


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_directory_is_all_that_is_needed() -> None:
    assert ask("--join", "runs/7") == JoinRequest("runs/7")
    assert ask("--join=/runs/7", "--join-timeout", "5", "--dry-run", "--json") == JoinRequest(
        "/runs/7", 5.0, 0, True, True
    )
    assert ask("--join", "r", environment={"RESILIO_LOCAL_NODES": "2", "PET_NNODES": "4"}) == JoinRequest(
        "r", local_nodes=2
    )


def test_a_script_with_a_flag_of_that_name_is_no_join() -> None:
    assert ask("train.py", "--join", "x") is None
    assert ask("--nnodes", "2", "train.py") is None
    assert ask() is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--join",), "--join: needs a value"),
        (("--join", "r", "train.py"), "takes no script, 'train.py'"),
        (("--nnodes", "2", "--join", "r"), "--nnodes cannot be given with --join"),
        (("--join", "r", "--chain"), "--chain cannot be given with --join"),
        (("--join", " "), "is empty"),
        (("--join", "r", "--json"), "--json belongs to --dry-run"),
        (("--join", "r", "--join-timeout", "-1"), "must be 0 or more"),
        (("--join", "r", "--dryrun"), "did you mean --dry-run"),
    ],
)
def test_mistakes_are_named(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ask(*argv)


# -- may they join? --------------------------------------------------------------------------------------------------


def test_nodes_of_another_job_may_join_a_run_that_has_a_controller() -> None:
    assert judge(facts(), RUN, ("n8", "n9"), on_this_machine=False) == ""
    assert judge(facts(endpoint="127.0.0.1:4000"), RUN, ("j1n0",), on_this_machine=True) == ""


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (facts(record=None), "has not begun"),
        (facts(leads=False, agents=()), "no controller just now"),
        (facts(verdict="time_limit", has_next_job=True, leads=False), "next job of its chain"),
    ],
)
def test_what_may_pass_is_waited_for(state: Facts, words: str) -> None:
    assert words in judge(state, RUN, ("n9",), on_this_machine=False)


@pytest.mark.parametrize(
    ("state", "nodes", "words"),
    [
        (facts(verdict="completed"), ("n9",), r"/run: the run is over \(completed\)"),
        (facts(verdict="completed", has_next_job=True), ("n9",), "is over"),
        (facts(verdict="time_limit"), ("n9",), r"is over \(time limit\): start it again with --run-dir"),
        (facts(), ("n9", "n2"), "n2 already takes part in this run: .*--exclude=n2"),
        (facts(endpoint="127.0.0.1:4000"), ("n9",), "lives outside of Slurm, on one machine"),
        (facts(msgspec.structs.replace(RECORD, package="0.0.1")), ("n9",), r"uses resilio_hpc 0\.0\.1, this is"),
    ],
)
def test_what_never_passes_is_an_error(state: Facts, nodes: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        judge(state, RUN, nodes, on_this_machine=False)


def test_this_machine_cannot_join_a_run_in_slurm() -> None:
    with pytest.raises(UsageError, match="lives in Slurm"):
        judge(facts(), RUN, ("here",), on_this_machine=True)


# -- the run directory -----------------------------------------------------------------------------------------------


def begun(path: Path) -> Path:
    run_directory.open_run(path)
    site = Site(SiteMode.BATCH, "7", ("n1", "n2"), True)
    joining.write_record(path, joining.record_of(OPTIONS, site, chained=True))
    return path


def test_the_record_is_for_its_owner_only_and_holds_no_secret(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert stat.S_IMODE((run / "launch.json").stat().st_mode) == 0o600
    assert "secret" not in (run / "launch.json").read_text()
    record = joining.read_record(run)
    assert record is not None
    assert (record.key, record.job, record.chained, record.cwd) == ("7", "7", True, str(Path.cwd()))
    options = joining.options_for(record, Path("/elsewhere"), 2, 7.0)
    assert (options.script, options.run_dir, options.local_nodes) == ("train.py", "/elsewhere", 2)
    assert not options.output.view
    assert options.join_timeout_s == 7.0


def test_a_record_of_another_version_names_it(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run / "launch.json").write_text('{"package": "9.9", "options": 3}')
    with pytest.raises(UsageError, match=r"resilio_hpc 9\.9"):
        joining.read_record(run)
    (run / "launch.json").write_text("")
    with pytest.raises(UsageError, match="of another version"):
        joining.read_record(run)


def test_no_run_and_another_users_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such run directory"):
        joining.find_run(tmp_path / "none")
    with pytest.raises(UsageError, match="no run was started"):
        joining.find_run(tmp_path)
    run = begun(tmp_path / "run")
    assert joining.find_run(run).run_id
    if os.geteuid() == 0:
        os.chown(run / "run.json", 4242, 4242)
        with pytest.raises(UsageError, match="belongs to user 4242"):
            joining.find_run(run)


def test_a_look_finds_a_living_controller_of_the_newest_job_only(tmp_path: Path) -> None:
    run, view = begun(tmp_path), ControllerView(tmp_path)
    assert not joining.look(run, view).leads

    def status(pulse: int) -> None:
        (run / "status.json").write_text(f'{{"epoch": 1, "pulse": {pulse}, "agents": {{"n1": {{}}}}, "lost": []}}')

    run_directory.claim_epoch(run, EpochRecord(1, "n1", "n1:4000", "7"))
    for pulse, leads in ((1, False), (2, True), (2, False), (3, True)):
        status(pulse)
        found = joining.look(run, view)
        assert (found.leads, found.agents) == (leads, ("n1",) if leads else ())
    assert found.endpoint == "n1:4000"
    run_directory.claim_epoch(run, EpochRecord(2, "m1", "m1:4000", "8"))
    status(4)
    assert not joining.look(run, view).leads


def test_a_look_between_two_jobs_of_a_chain(tmp_path: Path) -> None:
    run, view = begun(tmp_path), ControllerView(tmp_path)
    chain.write_links(run, [chain.Link(1, "7"), chain.Link(2, "8")])
    run_directory.write_verdict(run, "7", {"verdict": "time_limit", "exit_code": 0})
    found = joining.look(run, view)
    assert found.has_next_job
    assert "next job" in judge(found, run, ("n9",), on_this_machine=False)
    chain.write_links(run, [chain.Link(1, "6"), chain.Link(2, "7")])
    assert not joining.look(run, view).has_next_job


# -- the joining job -------------------------------------------------------------------------------------------------


def test_where_a_joiners_agents_run() -> None:
    batch = joining_site(Allocation("9", ("n8", "n9"), "n8", False, restart_count=1), 0)
    assert (batch.mode, batch.key, batch.nodes, batch.leads) == ("batch", "9r1", ("n8", "n9"), True)
    step = joining_site(Allocation("9", ("n8", "n9"), "n9", True, task=1), 0)
    assert (step.mode, step.leads) == ("step", False)
    local = joining_site(None, 2)
    assert local.mode == "local"
    assert not set(local.nodes) & {"local0", "local1"}
    assert len(set(local.nodes)) == 2


def test_what_a_dry_run_tells() -> None:
    site = Site(SiteMode.BATCH, "9", ("n8", "n9"), True)
    plan = join_plan(facts(), RUN, site, "")
    assert plan.nodes_joining == ("n8", "n9")
    text = plan.as_text()
    assert "train.py" in text and "2 nodes: n8, n9" in text and "it can join now" in text
    assert msgspec.json.decode(plan.as_json())["waits_for"] == ""
    waiting = join_plan(facts(record=None, agents=()), RUN, site, "the run has not begun")
    assert "the run has not begun" in waiting.as_text()
