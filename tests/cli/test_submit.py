"""``resilio submit``: what is listed, rendered and told, and what sbatch gets (a fake)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.slurm.submit import template_files
from tests.support.environments import scrubbed

FAKE_SBATCH = """#!/bin/bash
# A fake of sbatch: notes its arguments, its environment and the script, and answers as it is told.
printf '%s\\n' "$@" > "$FAKE/argv"; env > "$FAKE/env"; cat > "$FAKE/script"
[ "$1" = --parsable ] || { echo "fake sbatch: $1 is not --parsable" >&2; exit 64; }
for word in "${@:2}"; do [[ $word == --* ]] || { echo "fake sbatch: no option: $word" >&2; exit 64; }; done
cat "$FAKE/stderr" >&2; cat "$FAKE/stdout"; exit "$(cat "$FAKE/code")"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake sbatch that answers ``job 4711``, a folder with a script in it."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "sbatch").write_text(FAKE_SBATCH)
    (fake / "sbatch").chmod(0o755)
    answer(fake, "4711;cluster\n")
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RESILIO_")):
            monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path / "work")
    return fake


def answer(fake: Path, stdout: str, stderr: str = "", code: int = 0) -> None:
    for name, text in {"stdout": stdout, "stderr": stderr, "code": str(code)}.items():
        (fake / name).write_text(text)


def submit(*words: str) -> int:
    return main.main(["submit", *words])


def test_a_job_is_submitted_and_told_how_to_watch_and_stop(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--template", "chained", "nodes=3", "job_name=my run", "--", "train.py", "--lr", "a b") == 0
    here, said = Path.cwd(), capsys.readouterr().out
    assert said.splitlines() == [
        "job 4711 is in the queue (template chained)",
        "  watch   squeue -j 4711",
        f"  watch   tail -F '{here}/my run-4711.out'",
        f"  watch   resilio status {here}/resilio-runs/4711",
        "  stop    scancel 4711",
    ]
    assert (slurm / "argv").read_text().splitlines() == ["--parsable", "--nodes=3", "--job-name=my run"]
    script = (slurm / "script").read_text()
    assert "#SBATCH --nodes=3\n" in script and "train.py --lr 'a b'\n" in script


PARTITIONS = "PartitionName=main Default=YES State=UP MaxTime=1-00:00:00 MaxNodes=UNLIMITED Nodes=n[1-3] TotalNodes=3\n"
FAKE_SCONTROL = """#!/bin/sh
# A fake of scontrol and sinfo, which knows what \"resilio submit\" asks.
case "$*" in
    -V) echo slurm 26.05.5 ;;
    "-a -o show partitions") cat "$FAKE/partitions" ;;
    "-a show nodes --json") cat "$FAKE/nodes" ;;
    "show config") echo "MaxArraySize = 1001" ;;
    *) echo "fake: $*" >&2; exit 64 ;;
esac
"""


def test_what_can_never_start_is_said_and_not_queued(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("scontrol", "sinfo"):
        (slurm / name).write_text(FAKE_SCONTROL)
        (slurm / name).chmod(0o755)
    (slurm / "partitions").write_text(PARTITIONS)
    nodes = [
        {"name": f"n{n}", "state": ["IDLE"], "partitions": ["main"], "cpus": 4, "gres": "gpu:2"} for n in (1, 2, 3)
    ]
    (slurm / "nodes").write_text(json.dumps({"nodes": nodes}))
    wrong = ("--template", "multi-node", "nodes=5", "--", "train.py")
    assert submit(*wrong) == 2
    said = capsys.readouterr().err
    assert "can never start: nodes=5: partition main has 3; gpus_per_node=8 (the template's): nodes of" in said
    assert said.count("\n") == 1 and not (slurm / "argv").exists()
    assert submit("--template", "sweep", "array=0-5000", "gpus_per_node=2", "--", "train.py") == 2
    assert "MaxArraySize=1001" in capsys.readouterr().err
    assert submit("--template", "multi-node", "nodes=3", "gpus_per_node=2", "--", "train.py") == 0
    assert submit(*wrong[:2], "--no-check", *wrong[2:]) == 0
    (slurm / "partitions").write_text("")  # Slurm does not tell: sbatch is asked
    assert submit(*wrong) == 0


def test_output_without_a_place_is_said(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--template", "multi-node", "output=logs/%j.out", "--", "train.py") == 2
    assert f"there is no directory {Path.cwd()}/logs: make it first" in capsys.readouterr().err
    assert submit("--template", "multi-node", "error=%j/err", "--", "train.py") == 2
    assert "sbatch makes no directory" in capsys.readouterr().err
    Path("logs").mkdir()
    assert submit("--template", "multi-node", "output=logs/%j.out", "--", "train.py") == 0


def test_a_dry_run_prints_the_script_and_submits_nothing(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--template", "multi-node", "time=90", "--dry-run", "--", "train.py") == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --time=90\n" in script
    assert submit("--template", "multi-node", "time=90", "--dry-run", "--json", "--", "train.py") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["script"].rstrip(), said["arguments"]) == (script.rstrip(), ["--time=90"])
    assert not (slurm / "argv").exists()


def test_as_json(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--template", "sweep", "--json", "array=0-3", "--", "train.py") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["job"], said["template"], said["stop"]) == ("4711", "sweep", "scancel 4711")
    assert said["output"].endswith("/sweep-4711_0.out") and said["run_dir"].endswith("resilio-runs/4711")


def test_a_job_inherits_nothing_of_the_run_in_which_it_is_submitted(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_run = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "x", "RESILIO_LINK": "3", "RESILIO_LOCAL_NODES": "6"}
    (slurm / "slurm.conf").touch()  # Slurm's commands wait for a file that is not there
    kept = {"SLURM_CONF": str(slurm / "slurm.conf"), "RESILIO_LOCAL_DIR": "/local", "SBATCH_ACCOUNT": "mine"}
    for name, value in {**of_a_run, **kept}.items():
        monkeypatch.setenv(name, value)
    assert submit("--template", "multi-node", "--", "train.py") == 0
    lines = (slurm / "env").read_text().splitlines()
    assert [name for name in of_a_run if any(line.startswith(f"{name}=") for line in lines)] == []
    assert [name for name, value in kept.items() if f"{name}={value}" not in lines] == []


@pytest.mark.parametrize(
    ("stderr", "code", "said"),
    [
        ("sbatch: error: invalid partition specified: x\n"
         "sbatch: error: Batch job submission failed: Invalid partition\n", 1,
         "sbatch refused the job: invalid partition specified: x (Invalid partition)"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
         1, "whether the job was submitted is not known: look with squeue --me"),
        ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates …\n",
         1, "sbatch: AssocMaxSubmitJobLimit"),
    ],
)  # fmt: skip
def test_a_refusal_is_told_in_one_line(
    slurm: Path, capsys: pytest.CaptureFixture[str], stderr: str, code: int, said: str
) -> None:
    answer(slurm, "", stderr, code)
    assert submit("--template", "multi-node", "--", "train.py") == 1
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1


def test_an_answer_without_a_number_and_a_missing_sbatch(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(slurm, "what?\n")
    assert submit("--template", "multi-node", "--", "train.py") == 1
    assert "which is no job number" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(slurm.parent))
    assert submit("--template", "multi-node", "--", "train.py") == 1
    assert "Slurm cannot be reached from here" in capsys.readouterr().err


def test_notes_of_the_site_are_passed_on(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(slurm, "4711\n", "sbatch: your quota is nearly used up\n")
    assert submit("--template", "multi-node", "--json", "--", "train.py") == 0
    said = capsys.readouterr()
    assert "quota" in said.err and json.loads(said.out)["job"] == "4711"


MISTAKES: Mapping[tuple[str, ...], str] = {
    (): "--template NAME: the templates are burst-buffer, ",
    ("--template", "chaned", "--", "train.py"): "did you mean chained?",
    ("--template", "chained"): "template chained needs a command",
    ("--template", "chained", "train.py"): "'train.py' is not of the form KEY=VALUE (a command goes behind --",
    ("--template", "chained", "--nodes=3", "--", "train.py"): "--nodes=3: write nodes=3, without dashes",
    ("--template", "chained", "--dryrun", "--", "train.py"): "unrecognized arguments: --dryrun",
    ("--template", "chained", "nods=3", "--", "train.py"): "no key 'nods': did you mean nodes?",
    ("--template", "multi-node", "spare=3", "--", "train.py"): "did you mean spares, which burst-buffer, chained",
    ("--template", "multi-node", "spares=3", "--", "train.py"): "did you mean spares, which burst-buffer, chained",
    ("--template", "chained", "nodes=3", "nodes=4", "--", "train.py"): "nodes is given twice",
    ("--template", "chained", "time=1h", "--", "train.py"): "time: '1h' is not a time limit",
    ("--template", "chained", "job_name=a\nb", "--", "train.py"): "line break",
    ("--template", "joiner"): "template joiner needs run_dir=…",
    ("--template", "joiner", "run_dir=r", "--", "train.py"): "takes no command, 'train.py' was given",
    ("--template", "chained", "nodes=2", "spares=2", "--", "train.py"): "leave no node to train on",
    ("--template", "elastic", "nodes=2", "min_nodes=3", "--", "train.py"): "MIN not above MAX",
    ("--template", "chained", "--", "tran.py"): "script 'tran.py' does not exist: did you mean train.py?",
    ("--template", "chained", "--", "--max-restart=x", "train.py"): "resilio-launch would say: --max-restarts: 'x'",
    ("--template", "chained", "--", "--help"): "asks for resilio-launch's --help",
    ("--template", "mpi", "program=true", "--", "./solver"): "command './solver' was not found",
    ("--template", "chained", "chdir=nowhere", "--", "train.py"): "there is no such directory here",
    ("--template", "chained", "array=0-3", "--", "train.py"): "array: the jobs of template chained are chained",
    ("--template", "sweep", "arguments_file=x", "--", "train.py"): "arguments_file=x: there is no such file",
    ("--template", "./mine.sbatch", "--", "train.py"): "No such file or directory: mine.sbatch",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_told_in_one_line_before_sbatch_is_called(
    slurm: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert submit(*words) == 2
    text = capsys.readouterr().err
    assert MISTAKES[words] in text and len(text.splitlines()) == 1
    assert not (slurm / "argv").exists()


def test_what_is_there_only_on_the_nodes_is_not_looked_for(slurm: Path) -> None:
    assert submit("--template", "chained", "chdir=/on/the/nodes", "--no-check", "--", "there.py") == 0
    assert submit("--template", "container-apptainer", "image=i.sif", "--", "python", "/in/the/image.py") == 0


def test_a_template_of_ones_own(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = template_files.load("multi-node").text.replace("set -eu", "COLOUR=${COLOUR:-red}  # a key of ours\nset -eu")
    Path("mine.sbatch").write_text(text)
    assert submit("--template", "./mine.sbatch", "colour=$(id)", "--dry-run", "--", "train.py") == 0
    assert "\nCOLOUR='$(id)'  # a key of ours\n" in capsys.readouterr().out


def test_the_templates_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--list") == 0
    listed = re.findall(r"^([\w-]+)  +\S.{20,}", capsys.readouterr().out, re.MULTILINE)
    assert listed == template_files.names()
    for name in listed:
        assert submit("--explain", name) == 0
        text = capsys.readouterr().out
        for setting in template_files.load(name).settings:
            assert re.search(rf"^  {setting.key} .*{re.escape(setting.help)}$", text, re.MULTILINE)
    assert submit("--explain", "chained", "--json") == 0
    assert json.loads(capsys.readouterr().out)["options"]["signal"] == "USR2@120"
    assert submit("--list", "--json") == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == listed


def test_help_has_examples_that_are_understood(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.main", "submit", "--help"], capture_output=True, text=True, check=True,
        env=scrubbed(),
    )  # fmt: skip
    examples = re.findall(r"^  resilio (submit .*?)(?: {2,}#.*)?$", done.stdout, re.MULTILINE)
    assert len(examples) >= 5
    Path("my-site.sbatch").write_text(template_files.load("multi-node").text)
    for example in examples:
        words = example.split()
        at = words.index("--") if "--" in words else len(words)
        assert main.main([*words[:at], *words[at:]]) == 0, example
