"""What Slurm's commands print, as recorded from three of its series."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm import chain
from resilio_hpc.slurm.allocation import detect
from resilio_hpc.slurm.commands import parse_fields

SAMPLES = Path(__file__).with_name("samples")
SERIES = ("22.05", "24.11", "26.05")


def jobs(series: str) -> list[dict[str, str]]:
    text = (SAMPLES / f"scontrol_show_jobs_{series}.txt").read_text()
    return [parse_fields(line) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("series", SERIES)
def test_the_fields_that_we_use_are_read(series: str) -> None:
    for fields in jobs(series):
        assert fields["JobId"].isdigit()
        assert fields["JobState"].split()[0].isupper()
        assert fields["TimeLimit"] == "UNLIMITED" or ":" in fields["TimeLimit"]
        assert fields["WorkDir"].startswith("/")
        assert fields["Partition"]
        assert " " not in fields["NumNodes"]


def test_values_may_hold_equal_signs_and_spaces() -> None:
    fields = parse_fields("JobId=7 JobName=my run TRES=cpu=3,node=3 Comment=a b  c JOB_GRES=(null)   Nodes=n[2-4] X=\n")
    assert fields == {
        "JobId": "7", "JobName": "my run", "TRES": "cpu=3,node=3", "Comment": "a b  c", "JOB_GRES": "(null)",
        "Nodes": "n[2-4]", "X": "",
    }  # fmt: skip


def test_nothing_is_read_from_nothing() -> None:
    assert parse_fields("") == parse_fields("\n") == {}
    assert parse_fields("slurm_load_jobs error: Invalid job id specified") == {}


@pytest.mark.parametrize("series", SERIES)
def test_a_successor_repeats_what_the_job_was_given(series: str) -> None:
    fields = jobs(series)[0]
    job = fields["JobId"]
    arguments = chain.successor_arguments(fields, job, 5, Path("/run/batch.sh"))
    assert arguments[0] == f"--dependency=afterany:{job}"
    assert {"--nodes=5", "--no-kill", "--export=ALL", f"--partition={fields['Partition']}"} <= set(arguments)
    assert f"--time={fields['TimeLimit']}" in arguments
    assert arguments[-2:] == ["--open-mode=append", "/run/batch.sh"]
    assert not any("(null)" in argument or "N/A" in argument for argument in arguments)


def test_a_successors_output_is_named_for_itself_and_nothing_else_changes() -> None:
    fields = {"StdOut": "/scratch42/j.42.out", "StdErr": "/scratch42/j.42.err", "TresPerNode": "gres:gpu:4"}
    arguments = chain.successor_arguments(fields, "42", 1, Path("b.sh"))
    assert "--gres=gpu:4" in arguments
    assert "--output=/scratch%j/j.%j.out" in arguments  # a number on its own; 420 and 142 are left alone
    other = chain.successor_arguments({"StdOut": "/d420/142.out", "StdErr": "/d420/142.out"}, "42", 1, Path("b.sh"))
    assert "--output=/d420/142.out" in other
    assert not any(argument.startswith("--error") for argument in other)


def test_a_successors_environment_is_the_users_own() -> None:
    before = {
        "PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/s.conf", "SBATCH_TIMELIMIT": "1", "SRUN_DEBUG": "3",
        "RESILIO_LINK": "2",
    }  # fmt: skip
    after = chain.successor_environment(before, Path("/run"), 2, "7")
    assert after == {
        "PATH": "/bin", "SLURM_CONF": "/etc/s.conf", "RESILIO_RUN_DIR": "/run", "RESILIO_LINK": "3",
        "RESILIO_PREDECESSOR": "7",
    }  # fmt: skip


def test_the_chain_file_is_read_back_and_damage_is_no_chain(tmp_path: Path) -> None:
    links = [chain.Link(1, "29"), chain.Link(2, "31_4")]
    chain.write_links(tmp_path, links)
    assert chain.read_links(tmp_path) == links
    for damage in ("", "[]", '{"links": [{"number": 1}]}', '{"links": 3}', "\x00"):
        (tmp_path / "chain.json").write_text(damage)
        assert chain.read_links(tmp_path) == []
    assert [chain.link_number({"RESILIO_LINK": text}) for text in ("3", "", "x", "0", "-2")] == [3, 1, 1, 1, 1]


def test_where_we_run() -> None:
    batch = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    }  # fmt: skip
    allocation = detect(batch)
    assert allocation is not None
    assert (allocation.nodes, allocation.in_step, allocation.cpus_per_node) == (("n1", "n2"), False, (8, 8))
    step = detect(
        batch | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n2", "SLURM_LOCALID": "0"}
    )
    assert step is not None
    assert (step.nodes, step.in_step, step.task) == (("n2",), True, 1)
    assert detect({}) is None
    with pytest.raises(UsageError, match="SLURM_JOB_ID=7"):
        detect({"SLURM_JOB_ID": "7"})


def test_a_successor_gets_the_scripts_own_arguments() -> None:
    line = (
        "JobId=7 Command=/jobs/train.sbatch train.py lr=0.1 --name my run TimeLimit=1 WorkDir=/w TimeLimit=02:00:00\n"
    )
    fields = parse_fields(line)
    assert (fields["WorkDir"], fields["TimeLimit"]) == ("/w", "02:00:00")
    arguments = chain.successor_arguments(fields, "7", 1, Path("b.sh"), words=["train.py", "lr=0.1", "my run"])
    assert arguments[-6:] == ["b.sh", "train.py", "lr=0.1", "--name", "my run", "TimeLimit=1"]
    newest = parse_fields("JobId=7 Command=/jobs/a.sh one SubmitLine=sbatch -n 3 /jobs/a.sh one WorkDir=/w\n")
    assert chain.script_arguments(newest["Command"], ()) == ["one"]
    assert chain.script_arguments("(null)", ()) == chain.script_arguments("", ()) == []


@pytest.mark.parametrize(
    ("value", "script", "options"),
    [
        ("gres:gpu:2", "#SBATCH --gpus-per-node=8", ["--gpus-per-node=2"]),
        ("gres/gpu:h100:8,gres/nvme:1", "#SBATCH -N 2 --gpus-per-node 8", ["--gpus-per-node=h100:8", "--gres=nvme:1"]),
        ("gres:gpu:h100:8,gres:nvme:1", "#SBATCH --gres=gpu:8", ["--gres=gpu:h100:8,nvme:1"]),
        ("gres:gpu", "#SBATCH --gpus-per-node=1", ["--gpus-per-node=1"]),
        ("gres:gpu:2", "echo --gpus-per-node=8", ["--gres=gpu:2"]),
        ("(null)", "#SBATCH --gpus-per-node=0", []),
    ],
)
def test_a_successor_asks_for_gpus_as_its_script_does(value: str, script: str, options: list[str]) -> None:
    assert chain.generic_resources(value, f"#!/bin/bash\n{script}\n") == options
