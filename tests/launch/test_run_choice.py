"""Which run directory a launch of a batch script gets: in a job, in its requeued run, in a chain's next job."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import msgspec
import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.chain.run_choice import LaunchRequest, choose, note_visit
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.rundir import holder, run_claim, run_directory
from resilio_hpc.slurm.chain import chain
from tests.support.waiting import PATIENCE_S, until


class Script:
    """What the launches of one batch script do."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def environment(self, job: str = "12", restarts: int = 0, **more: str) -> dict[str, str]:
        nodes = {"SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
        return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restarts), **nodes, **more}

    def launch(
        self, *words: str, environment: dict[str, str] | None = None, run_dir: str = "", chained: bool = False
    ) -> LaunchOptions:
        environment = self.environment() if environment is None else environment
        default = self.where / "resilio-runs" / environment["SLURM_JOB_ID"]
        path = self.where / run_dir if run_dir else default
        options = LaunchOptions("stage.py", "script", str(path), words, chain=chained)
        return choose(LaunchRequest(options, bool(run_dir), environment))

    def begin(self, options: LaunchOptions, environment: dict[str, str], lives: bool = False) -> str:
        """The launch takes its turn. Returns its part."""
        path = run_directory.open_run(Path(options.run_dir), program=options.program).path
        process = holder.this_process(environment)
        process = process if lives else msgspec.structs.replace(process, born=process.born + 1)
        job, restarts = environment["SLURM_JOB_ID"], int(environment["SLURM_RESTART_COUNT"])
        site = Site(SiteMode.BATCH, job, ("n1",), True, restarts, options.launch)
        turn = run_claim.Turn(run_claim.next_number(path), site.key, job, 1, ("n1",), -1, 0.0, process)
        assert run_claim.take(path, turn)
        joining.write_record(path, joining.record_of(options, site, options.chain))
        return site.key

    def run(self, options: LaunchOptions, verdict: str, environment: dict[str, str] | None = None) -> None:
        part = self.begin(options, environment or self.environment())
        run_directory.write_verdict(Path(options.run_dir), part, {"verdict": verdict})


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def name(options: LaunchOptions) -> str:
    return Path(options.run_dir).name


def test_programs_of_one_job_get_directories_of_their_own(script: Script) -> None:
    first = script.launch("pretrain")
    assert (name(first), first.launch) == ("12", 1)
    script.run(first, "completed")
    second = script.launch("finetune")
    assert (name(second), second.launch) == ("12-2", 1)
    assert name(script.launch("finetune")) == "12-2"  # nobody has had it
    script.run(second, "completed")
    again = script.environment(restarts=1)  # Slurm requeues the job: each finds its own
    assert [name(script.launch(stage, environment=again)) for stage in ("pretrain", "finetune")] == ["12", "12-2"]


def test_a_launch_that_failed_is_tried_again_where_it_was(script: Script) -> None:
    first = script.launch("train")
    script.run(first, "no_progress")
    second = script.launch("train")
    assert (name(second), second.launch) == ("12", 2)
    assert script.begin(second, script.environment()) == "12r0.2"


def test_the_same_program_once_more_runs_once_more(script: Script) -> None:
    script.run(script.launch("bench"), "completed")
    assert name(script.launch("bench")) == "12-2"


def test_while_one_lives_the_other_gets_its_own(script: Script) -> None:
    script.begin(script.launch("bench"), script.environment(), lives=True)
    assert name(script.launch("bench")) == "12-2"


def test_in_a_requeued_job_a_loop_goes_on_where_it_was(script: Script) -> None:
    script.run(script.launch("bench"), "completed")
    script.run(script.launch("bench"), "terminated")
    again = script.environment(restarts=1)
    first = script.launch("bench", environment=again)
    assert name(first) == "12"  # and finds it complete
    note_visit(Path(first.run_dir), again)
    assert name(script.launch("bench", environment=again)) == "12-2"


def test_a_directory_that_is_named_is_meant(script: Script) -> None:
    first = script.launch("train", run_dir="mine")
    script.run(first, "completed")
    assert name(script.launch("train", run_dir="mine")) == "mine"
    with pytest.raises(UsageError, match=r"complete run of stage.py train, and this is stage.py evaluate"):
        script.launch("evaluate", run_dir="mine")


def test_without_slurm_nothing_is_chosen(tmp_path: Path) -> None:
    options = LaunchOptions("stage.py", "script", str(tmp_path / "20261122-7"))
    assert choose(LaunchRequest(options, False, {})) == options
    assert not (tmp_path / "20261122-7").exists()


def next_job(script: Script, options: LaunchOptions, before: dict[str, str], job: str) -> dict[str, str]:
    """The environment of the job that a chained launch has submitted."""
    path, number = Path(options.run_dir), chain.link_number(before)
    links = [link for link in chain.read_links(path) if link.number < number]
    chain.write_links(path, [*links, chain.Link(number, before["SLURM_JOB_ID"]), chain.Link(number + 1, job)])
    kept = chain.successor_environment(before, path, number, before["SLURM_JOB_ID"], options.program)
    return {**script.environment(job), **kept}


def test_in_a_chains_next_job_only_the_chained_launch_goes_on(script: Script) -> None:
    script.run(script.launch("prepare", run_dir="prep-12"), "completed")
    main = script.launch("train", run_dir="main", chained=True)
    script.run(main, "time_limit")
    second = next_job(script, main, script.environment(), "13")
    assert name(script.launch("prepare", environment=second, run_dir="prep-13")) == "prep-13"
    assert name(script.launch("train", environment=second, run_dir="another", chained=True)) == "main"
    assert name(script.launch("report", environment=second)) == "13"


def test_two_chained_stages_each_find_their_run(script: Script) -> None:
    stage1 = script.launch("pretrain", chained=True)
    script.run(stage1, "time_limit")
    second = next_job(script, stage1, script.environment(), "13")
    again = script.launch("pretrain", environment=second, chained=True)
    assert name(again) == "12"
    script.run(again, "completed", second)
    stage2 = script.launch("finetune", environment=second, chained=True)
    assert name(stage2) == "13"  # though the chain hands on the first stage's
    script.run(stage2, "time_limit", second)
    third = next_job(script, stage2, second, "14")
    assert name(script.launch("pretrain", environment=third, chained=True)) == "12"
    assert name(script.launch("finetune", environment=third, chained=True)) == "13"


@pytest.mark.parametrize("words", [("--seed", "13"), ("--name=run-13",), ("--resume", "latest")])
def test_arguments_may_change_from_job_to_job(words: tuple[str, ...], script: Script) -> None:
    first = script.launch(*(word.replace("13", "12") for word in words[:-1]), "at first", chained=True)
    script.run(first, "time_limit")
    second = next_job(script, first, script.environment(), "13")
    assert name(script.launch(*words, environment=second, chained=True)) == "12"


def test_a_job_of_an_older_version_hands_on_its_directory(script: Script) -> None:
    first = script.launch("train", chained=True)
    script.run(first, "time_limit")
    second = next_job(script, first, script.environment(), "13")
    del second[chain.RUNS]
    assert name(script.launch("whatever", environment=second, chained=True)) == "12"


def test_a_job_that_inherits_a_chains_variables_is_none_of_its(script: Script) -> None:
    first = script.launch("train", chained=True)
    script.run(first, "time_limit")
    strange = {**next_job(script, first, script.environment(), "13"), "SLURM_JOB_ID": "99"}
    assert name(script.launch("train", environment=strange, chained=True)) == "99"


def test_damaged_variables_name_no_run() -> None:
    for text in ("", "[", "{}", "[1]", '[{"program": [], "run_dir": "x", "job": "1"}]'):
        assert chain.known_runs({chain.RUNS: text}) == ()


def test_a_second_task_on_a_node_chooses_nothing(script: Script) -> None:
    script.begin(script.launch("train"), script.environment(), lives=True)
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    assert name(script.launch("train", environment=script.environment(**step))) == "12"
    assert not (script.where / "resilio-runs" / "12-2").exists()


def test_the_tasks_of_a_step_agree(script: Script) -> None:
    script.run(script.launch("pretrain"), "completed")
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]"}
    environments = [script.environment(**step, SLURM_PROCID=str(task)) for task in (0, 1)]
    heard: list[LaunchOptions] = []
    other = threading.Thread(target=lambda: heard.append(script.launch("finetune", environment=environments[1])))
    other.start()
    meeting = script.where / "resilio-runs" / "12" / "links" / "12.step3.json"
    until(meeting.exists, "the other task", alive=other.is_alive)
    first = script.launch("finetune", environment=environments[0])
    other.join(PATIENCE_S)
    assert name(first) == "12-2"
    assert heard == [first]
    assert json.loads(meeting.read_text()) == {"run_dir": first.run_dir, "launch": 1}


def test_where_the_first_task_of_a_step_is_refused_the_others_end(script: Script) -> None:
    script.run(script.launch("train", run_dir="mine"), "completed")
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(UsageError, match="complete run"):
        script.launch("evaluate", environment=script.environment(**step, SLURM_PROCID="0"), run_dir="mine")
    with pytest.raises(SystemExit):
        script.launch("evaluate", environment=script.environment(**step, SLURM_PROCID="1"), run_dir="mine")
