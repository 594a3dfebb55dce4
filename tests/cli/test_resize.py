"""`resilio resize`: mistakes in its command line are one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.measure import profile_file
from resilio_hpc.autoparallel.measure.comm_fit import Curve
from resilio_hpc.autoparallel.search.model_speed import any_degrees
from resilio_hpc.cli import resize
from resilio_hpc.cli.main import main
from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.launch.resize.facts import ResizeDecision


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: RUN"),
        (["/nowhere"], "resilio resize /nowhere: there is no such run directory"),
        (["/nowhere", "--watch", "0"], "--watch 0: at least 1 s"),
        (["/nowhere", "--min-nodes", "-1"], "--min-nodes: -1 is not possible"),
        (["/nowhere", "--min-nodes", "3", "--max-nodes", "2"], "--min-nodes 3 is more than --max-nodes 2"),
        (["/nowhere", "--micro-batch", "0"], "--micro-batch: 0 is not possible"),
        (["/nowhere", "nodes=3"], "nodes is chosen by resilio resize itself"),
        (["/nowhere", "Run-Dir=x"], "run_dir is chosen by resilio resize itself"),
        (["/nowhere", "--watch", "9", "walltime=1:00:00"], "template joiner has no key 'walltime': did you mean time?"),
        (["/nowhere", "time=soon"], "time: 'soon' is not a time limit"),
        (["/nowhere", "time"], "'time' is not of the form KEY=VALUE"),
        (["/nowhere", "--policy", "/nowhere/p.toml"], "/nowhere/p.toml: No such file or directory"),
    ],
)
def test_a_mistake_is_told_in_a_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resize", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_holds_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resize", str(tmp_path), "--dry-run"]) == 2
    assert "no run was started in this directory" in capsys.readouterr().err


def test_the_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resize", "--help"])
    assert "exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--watch", "9"], "--watch is not for a resizer beside a launch"),
        (["--json"], "--json is not for a resizer beside a launch"),
        (["--max-nodes", "-1"], "--max-nodes: -1 is not possible"),
        (["--model", "llama3-70b"], "--model needs --global-batch N"),
        (["--profile", "cluster.h5"], "--calibration and --profile are for --model"),
        (["--model", "llama3-70b", "--global-batch", "8", "--calibration", "/no/c.toml"], "/no/c.toml: No such file"),
        (["--model", "llama3-07b", "--global-batch", "8"], "llama3-07b"),
        (["nodes=3"], "nodes is chosen by resilio resize itself"),
        (["--maxnodes", "3"], "unrecognized arguments: --maxnodes 3"),
    ],
)
def test_what_a_launcher_is_to_pass_on_is_checked_first(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        resize.check_words(words)
    assert str(error.value).startswith("--resize-options: ") and said in str(error.value)


def test_options_of_the_command_may_be_passed_on_by_a_launcher() -> None:
    resize.check_words(["--max-nodes", "16", "--model", "llama3-70b", "--global-batch", "1024", "time=1:00:00"])


MODEL = ["--model", "llama2-7b", "--global-batch", "64", "--gpu", "h100"]


def seconds_on_two_nodes(*words: str) -> float:
    """Of a step, as the planner sees it."""
    model = resize._model(resize._parser().parse_intermixed_args([".", *MODEL, *words]))
    assert model is not None
    return model.speed((), 2, 8, ("", 8), any_degrees).step_s(2)


def test_what_was_measured_of_the_cluster_makes_the_speed_of_the_model(tmp_path: Path) -> None:
    profile, calibration = tmp_path / "cluster.h5", tmp_path / "cluster.toml"
    slow = tuple(
        Curve(name, span, ranks, 8, 1e-3, 1e9, 0.0, (1024, 4096), ((1e-3, 1e-3), (1e-3, 1e-3)))
        for name in ("all-reduce", "all-gather", "reduce-scatter")
        for span, ranks in (("node", 8), ("network", 16))
    )
    profile_file.write_communication(profile, slow, {"device": "NVIDIA H100 80GB HBM3", "backend": "nccl"})
    shipped_s = seconds_on_two_nodes()
    assert seconds_on_two_nodes("--profile", str(profile)) > 1.5 * shipped_s
    calibration.write_text(f"gemm_hopper = {shipped().gemm_hopper * 0.9}\n")
    assert seconds_on_two_nodes("--calibration", str(calibration)) > 1.05 * shipped_s


class Looks:
    """A fake resizer, and its view: each look fails with an error, or gives a decision."""

    def __init__(self, *outcomes: Exception | ResizeDecision) -> None:
        self._outcomes = list(outcomes)

    def watch(self) -> None:
        pass

    def step(self) -> tuple[ResizeDecision, str]:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, ""


def test_a_watch_outlives_slurm_and_the_run_directory_and_asks_more_seldom_meanwhile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stay, over = (
        ResizeDecision("stay", "nothing_idle", "0 nodes idle"),
        ResizeDecision("stay", "over", "the run is over"),
    )
    away, stale = SlurmError("no answer"), OSError(116, "Stale file handle")
    looks = Looks(away, away, stale, away, away, away, stay, away, over)
    pauses: list[float] = []
    options = resize._parser().parse_args(["run", "--watch", "30"])
    assert resize._watch(looks, looks, options, pauses.append) == 0  # type: ignore[arg-type]
    assert pauses == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 30.0, 60.0]
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == [f"resilio: {error}; looking again" for error in (away, stale, away)]


def test_what_it_says_beside_a_launch_is_a_line_of_the_launchers_and_no_reason_to_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = resize._parser().parse_args(["run", "--watch", "30", "--launcher", "1", "--observe"])
    resize._say(ResizeDecision("stay", "nothing_idle", "0 nodes idle"), "", options)
    resize._say(ResizeDecision("grow", "idle_nodes", "1 idle node", 3), "", options)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("[resilio] ") and told.err.endswith("--resize: would grow to 3 nodes: 1 idle node\n")


def test_a_dry_run_says_that_it_was_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = resize._parser().parse_args(["run", "--dry-run"])
    resize._say(ResizeDecision("stay", "nothing_idle", "0 nodes idle"), "", options)
    assert capsys.readouterr().out == "stay: 0 nodes idle (dry run: nothing is done or written)\n"
