"""The command line: torchrun's, with the same values, and ours."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.cli.option_table import GROUPS
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import build_parser, parse
from resilio_hpc.launch.config.flags import FlagGroup, own_rows, rows
from resilio_hpc.launch.config.metrics_options import MetricsOptions
from resilio_hpc.launch.config.options import LaunchOptions
from tests.support.waiting import PATIENCE_S

# torchrun's defaults that are not ours, and why
OTHER_DEFAULTS = {
    "nnodes": "inside an allocation the whole of it is meant, not one node",
    "max_restarts": "ours counts only restarts without progress, so a few are safe",
}
VALUES = {
    "nnodes": "1:2",
    "nproc_per_node": "3",
    "max_restarts": "7",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "redirects": "0:1,1:2",
    "tee": "3",
    "local_ranks_filter": "0,1",
    "duplicate_stdout_filters": "a,b,,c",
    "duplicate_stderr_filters": "x",
    "node_rank": "4",
    "master_port": "1234",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "9",
    "rdzv_conf": "timeout=3,join_timeout=4",
}


def torchruns_parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def torchruns_flags() -> list[argparse.Action]:
    return [action for action in torchruns_parser()._actions if action.option_strings and action.dest != "help"]


def given(*argv: str, environment: dict[str, str] | None = None, cwd: Path = Path("/work here")) -> LaunchOptions:
    return parse(argv, Caller(environment or {}, cwd, 0.0, 11)).options


def test_which_checkpoints_are_kept_travels_to_the_agents() -> None:
    options = given("--keep-checkpoints", "2", "--keep-every", "1000", "--keep-hours", "0.5", "--keep-gb=300", "t.py")
    kept = LaunchOptions.from_json(options.to_json()).checkpoints
    assert (kept.keep_checkpoints, kept.keep_every, kept.keep_hours, kept.keep_gb) == (2, 1000, 0.5, 300)
    kept = given("t.py").checkpoints
    assert (kept.keep_checkpoints, kept.keep_every, kept.keep_hours, kept.keep_gb) == (5, 0, None, None)


@pytest.mark.parametrize("transport", ["auto", "tcp", "fabric"])
def test_how_snapshots_go_travels_to_the_agents(transport: str) -> None:
    options = given("--snapshot-transport", transport, "t.py")
    assert LaunchOptions.from_json(options.to_json()).checkpoints.snapshot_transport == transport
    assert given("t.py").checkpoints.snapshot_transport == "tcp"


@pytest.mark.parametrize("policy", ["in-process", "failed", "all"])
def test_what_a_failure_restarts_travels_to_the_agents(policy: str) -> None:
    options = given("--restart-policy", policy, "--spare-ranks", "2", "--process-images", "on", "t.py")
    reentry = LaunchOptions.from_json(options.to_json()).reentry
    assert (reentry.restart_policy, reentry.spare_ranks, reentry.process_images) == (policy, 2, "on")
    bare = given("t.py").reentry
    assert (bare.restart_policy, bare.spare_ranks, bare.process_images) == ("in-process", 0, "off")


def test_without_a_flag_every_field_has_its_default_and_every_bound_is_held() -> None:
    bare, bounds = given("t.py"), 0
    parts: tuple[Any, ...] = (
        bare, bare.checkpoints, bare.devices, bare.environment, bare.hangs, bare.metrics, bare.output, bare.resizing,
        bare.slow, bare.correctness, bare.reentry, bare.planning,
    )  # fmt: skip
    fields = {(part, field.name): field.default for part in parts for field in dataclasses.fields(part)}
    flags = {(part, name): flag for part in parts for name, flag in own_rows(type(part)).items()}
    assert sorted(flag.names for flag in flags.values()) == sorted(
        flag.names for group in FlagGroup for flag in rows(LaunchOptions, group)
    )
    for (part, name), flag in flags.items():
        if fields[part, name] is not dataclasses.MISSING:
            assert getattr(part, name) == fields[part, name], name
        bound = flag.least if flag.above is None else flag.above
        if bound is not None:
            with pytest.raises(UsageError, match=f"{flag.names[-1]}: .* is not possible, it must be "):
                given(f"{flag.names[-1]}={bound - (flag.above is None):g}", "t.py")
            bounds += 1
    assert bounds >= 15


def test_every_flag_of_torchrun_means_the_same_in_every_spelling() -> None:
    theirs, ours = torchruns_parser(), build_parser({})
    compared = 0
    for action in torchruns_flags():
        for name in action.option_strings:
            value = [] if action.nargs == 0 else [VALUES.get(action.dest, "some-text")]
            argv = [name, *value, "train.py", "--lr", "1", name]
            expected, got = theirs.parse_args(argv), ours.parse_args(argv)
            assert getattr(got, action.dest) == getattr(expected, action.dest), name
            assert type(getattr(got, action.dest)) is type(getattr(expected, action.dest)), name
            assert (got.training_script, got.training_script_args) == ("train.py", ["--lr", "1", name])
            compared += 1
    assert compared >= 50


def test_defaults_are_torchruns_but_for_the_listed_ones() -> None:
    theirs, ours = torchruns_parser().parse_args(["x.py"]), build_parser({}).parse_args(["x.py"])
    different = {a.dest for a in torchruns_flags() if getattr(theirs, a.dest) != getattr(ours, a.dest)}
    assert different == set(OTHER_DEFAULTS)


def test_defaults_come_from_the_same_environment_variables_as_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for action in torchruns_flags():
        name = f"PET_{action.dest.upper()}"
        value = "1" if action.nargs == 0 else VALUES.get(action.dest, "some-text")
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            expected = getattr(torchruns_parser().parse_args(["x.py"]), action.dest)
        got = getattr(build_parser({name: value}).parse_args(["x.py"]), action.dest)
        if action.dest not in OTHER_DEFAULTS or expected == value:
            assert got == expected, name


def test_the_command_line_beats_the_environment() -> None:
    assert given("--max-restarts", "1", "x.py", environment={"PET_MAX_RESTARTS": "8"}).max_restarts == 1
    assert given("x.py", environment={"PET_MAX_RESTARTS": "8"}).max_restarts == 8


def test_options_survive_the_way_to_an_agent() -> None:
    options = given(
        *("--nnodes", "1:3", "--spares", "1", "--preload", "numpy,h5py", "--tee", "0:3", "--local-ranks-filter", "1,0"),
        *("--duplicate-stderr-filters", "NaN,inf", "--stop-grace", "2.5", "-m", "pkg.train", "--", "--lr", "ü"),
        environment={"RESILIO_LOCAL_NODES": "4"},
    )
    assert LaunchOptions.from_json(options.to_json()) == options
    assert (options.min_nodes, options.max_nodes, options.local_nodes) == (1, 3, 4)
    assert options.preload == ("numpy", "h5py") and options.output.local_ranks_filter == (0, 1)
    assert (options.kind, options.script, options.script_args) == ("module", "pkg.train", ("--lr", "ü"))


@pytest.mark.parametrize(
    ("argv", "kind", "script", "arguments"),
    [
        (("train.py", "-m", "--help"), "script", "train.py", ("-m", "--help")),
        (("-m", "train", "x"), "module", "train", ("x",)),
        (("--no-python", "./solver", "in"), "command", "./solver", ("in",)),
        (("--run-path", "--no-python", "/a/train.py"), "script", "/a/train.py", ()),
    ],
)
def test_what_runs(argv: tuple[str, ...], kind: str, script: str, arguments: tuple[str, ...]) -> None:
    options = given(*argv)
    assert (options.kind, options.script, options.script_args) == (kind, script, arguments)


def test_another_interpreter_is_started_as_torchrun_would_start_it() -> None:
    options = given("-m", "train", "x", environment={"PYTHON_EXEC": "/opt/python"})
    assert (options.kind, options.script) == ("command", "/opt/python")
    assert options.script_args == ("-u", "-m", "train", "x")


SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "8"}


@pytest.mark.parametrize(
    ("argv", "environment", "nodes"),
    [
        ((), {}, (1, 1)),
        ((), SLURM, (8, 8)),
        (("--spares", "1"), SLURM, (7, 7)),
        (("--spares", "1", "--node-unit", "2"), SLURM, (6, 6)),
        (("--standalone",), SLURM, (1, 1)),
        (("--nnodes", "2:6", "--spares", "2"), SLURM, (2, 6)),
        (("--nnodes", "4:16"), SLURM, (4, 16)),  # joiners from outside may come
        ((), {"RESILIO_LOCAL_NODES": "3"}, (3, 3)),
        ((), {"SLURM_JOB_NUM_NODES": "8"}, (1, 1)),  # left over, no job
    ],
)
def test_nodes(argv: tuple[str, ...], environment: dict[str, str], nodes: tuple[int, int]) -> None:
    options = given(*argv, "x.py", environment=environment)
    assert (options.min_nodes, options.max_nodes) == nodes


def test_the_run_directory_is_named_after_the_job_or_the_time() -> None:
    assert given("x.py", environment=SLURM).run_dir == "/work here/resilio-runs/42"
    assert given("x.py").run_dir.startswith("/work here/resilio-runs/19")
    assert given("--run-dir", "runs/a", "x.py", environment=SLURM).run_dir == "/work here/runs/a"
    assert given("--run-dir", "/scratch/a", "x.py").logs_directory == Path("/scratch/a/logs")
    assert given("--log-dir", "l", "x.py").logs_directory == Path("/work here/l")


def test_the_directory_on_the_nodes_own_disks_is_absolute_and_there_is_none_unless_it_is_named() -> None:
    assert given("x.py").checkpoints.local_checkpoints == ""
    assert given("--local-checkpoints", "nvme", "x.py").checkpoints.local_checkpoints == "/work here/nvme"
    assert given("--keep-local", "3", "x.py").checkpoints.keep_local == 3
    with pytest.raises(UsageError, match="--keep-local"):
        given("--keep-local", "0", "x.py")
    with pytest.raises(UsageError, match="--local-checkpoints is empty"):
        given("--local-checkpoints", "", "x.py")


@pytest.mark.parametrize(
    ("argv", "environment", "grace"),
    [
        ((), {}, 10.0),
        ((), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 7.0),
        (("--shutdown-timeout", "4"), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 4.0),
        (("--stop-grace", "1.5", "--shutdown-timeout", "4"), {}, 1.5),
    ],
)
def test_stop_grace(argv: tuple[str, ...], environment: dict[str, str], grace: float) -> None:
    assert given(*argv, "x.py", environment=environment).stop_grace_s == grace


def test_join_timeout_may_come_from_the_rendezvous_configuration() -> None:
    assert given("--rdzv-conf", "join_timeout=33,timeout=5", "x.py").join_timeout_s == 33
    assert given("--rdzv-conf", "join_timeout=33", "--join-timeout", "2", "x.py").join_timeout_s == 2


def test_flags_without_effect_are_named_once_and_only_when_given() -> None:
    caller = Caller({"PET_RDZV_BACKEND": "c10d", "PET_MASTER_PORT": "1"}, Path("/"), 0.0, 1)
    argv = ["--master_addr", "n1", "--rdzv-conf", "timeout=5", "--numa-binding", "node", "--standalone", "x.py"]
    notes = parse(argv, caller).notes
    named = [note.split(" has no effect")[0] for note in notes]
    assert sorted(named) == [
        "--master-addr",
        "--master-port",
        "--numa-binding",
        "--rdzv-backend",
        "--rdzv-conf timeout",
    ]
    assert parse(["x.py"], Caller({}, Path("/"), 0.0, 1)).notes == ()


def test_arguments_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(UsageError, match="not valid UTF-8"):
        given("x.py", "\udcff")


def test_the_help_names_every_flag_once_in_its_hyphen_spelling() -> None:
    text = build_parser({}).format_help()
    for _, flags in GROUPS:
        for flag in flags:
            assert flag.names[-1] in text
    assert "nproc_per_node" not in text
    assert "sbatch" in text and "on this machine" in text


def test_parsing_imports_nothing_heavy() -> None:
    code = (
        "import sys, resilio_hpc.launch.cli.options_parser\n"
        "print([m for m in ('torch','numpy','h5py','zmq','rich','msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("flag", ["--checkpoint", "--keep", "--log", "--node=3", "--no", "--keep-g", "--local-c"])
def test_a_flag_of_the_script_may_begin_as_flags_of_ours_do(flag: str) -> None:
    options = given("--nnodes", "1", "x.py", "--steps", "3", flag, "here")
    assert options.script_args == ("--steps", "3", flag, "here")


def test_before_the_script_it_is_an_unknown_flag() -> None:
    with pytest.raises(UsageError, match="unknown flag --keep: did you mean --keep-gb"):
        given("--keep", "3", "x.py")


def test_a_launch_from_within_a_rank_uses_its_machine_alone() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
    parsed = parse(["x.py"], Caller({**step, "RESILIO_AGENT_SOCKET": "/tmp/agent"}, Path("/"), 0.0, 1))
    assert (parsed.options.standalone, parsed.options.max_nodes, len(parsed.notes)) == (True, 1, 1)
    assert "this machine alone" in parsed.notes[0]
    with pytest.raises(UsageError, match="in a rank there is 1 node"):
        parse(["--nnodes", "2", "x.py"], Caller({**step, "RESILIO_AGENT_SOCKET": "/tmp/agent"}, Path("/"), 0.0, 1))


@pytest.mark.parametrize(
    ("address", "asks"),
    [
        ("127.0.0.1", False), ("127.8.8.8", False), ("::1", False), ("localhost", False), ("0.0.0.0", True),
        ("::", True), ("10.0.0.7", True), ("n1", True), ("localhost.example.org", True),
    ],
)  # fmt: skip
def test_an_endpoint_that_others_reach_asks_for_the_token(address: str, asks: bool) -> None:
    assert MetricsOptions(address=address).asks_for_token is asks
