"""Slurm's commands are started in one place, in an environment that no user's setting bends."""

from __future__ import annotations

import ast
import gzip
import re
from pathlib import Path

import pytest

from resilio_hpc.slurm.client.runner import READING, environment_of, run_here, start_here
from tests.support.environments import ROOT
from tests.support.sources import calls, parsed, walked

LISTED = Path(__file__).with_name("samples") / "environment_variables.txt"
ROWS = [line.split() for line in LISTED.read_text().splitlines() if not line.startswith("#")]
MANUALS = (Path("/usr/share/man/man1"), *Path("~/.cache/resilio/devcluster").expanduser().glob("*/usr/share/man/man1"))
PROGRAMS = frozenset(
    {command for _, command, *_ in ROWS} | {"sbatch", "salloc", "sattach", "sbcast", "sprio", "sshare"}
)
# They run commands inside of a dev cluster's machines, whose environment has nothing of ours; or start steps, which
# are no questions: what tasks inherit is their own subject.
ELSEWHERE = "resilio_hpc/devtools/"
ON_DEV_CLUSTERS = {f"resilio_hpc/drills/{name}.py" for name in ("campaign_run", "drill", "session")}
STEPS = {
    "resilio_hpc/launch/allocation/placements.py",
    "resilio_hpc/launch/workers/mpi/step.py",
    "resilio_hpc/diagnose/starters.py",
}
STARTS = re.compile(
    r"(?:.*\.)?(?:run|Popen|call|check_call|check_output|system|popen|execv\w*|spawnv\w*|posix_spawnp?)"
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:2]))
def test_no_variable_of_the_manual_reaches_a_question(row: list[str]) -> None:
    _, command, *variables = row
    home = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/home/me", "TZ": "Asia/Tokyo"}
    tastes = dict.fromkeys([*variables, "LANG", "LC_ALL", "LC_TIME", "LANGUAGE", "SLURM_JOB_ID"], "x")
    assert environment_of(command, tastes | home) == home | READING


def test_the_list_has_all_that_the_manuals_here_have() -> None:
    known = {(command, name) for _, command, *names in ROWS for name in names}
    pages = [
        page for folder in MANUALS for page in folder.glob("s*.1.gz") if page.name[:-5] in {one for one, _ in known}
    ]
    for page in pages:
        sections = gzip.decompress(page.read_bytes()).decode(errors="replace").split("\n.SH ")
        text = "".join(one for one in sections if re.match(r'"?(?:INPUT )?ENVIRONMENT VARIABLES', one))
        found = {
            (page.name[:-5], name) for name in re.findall(r"^\\f[BI](S[A-Z0-9]+_[A-Z0-9_]+)\b", text, re.MULTILINE)
        }
        assert found - known == set(), page


def test_a_submission_keeps_its_users_choices_and_returns_at_once() -> None:
    chosen = {"SBATCH_PARTITION": "gpu", "SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "b", "LANG": "de_DE.UTF-8"}
    assert environment_of("sbatch", chosen | {"SBATCH_WAIT": "1"}) == chosen


def test_the_runner_and_the_question_in_the_background_run_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SQUEUE_PARTITION", "other"), ("SLURM_TIME_FORMAT", "relative"), ("LC_ALL", "de_DE.UTF-8")):
        monkeypatch.setenv(name, value)
    background = start_here(["env"])
    for said in (run_here(["env"], 10.0, {"ALSO": "1"}).stdout, background.communicate()[0].decode()):
        words = said.splitlines()
        assert {"SLURM_TIME_FORMAT=%s", "LC_ALL=C"} <= set(words)
        assert not any(word.startswith("SQUEUE_") for word in words)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho $SBATCH_QOS; cat\n")
    (tmp_path / "sbatch").chmod(0o755)
    users = {"SBATCH_QOS": "high", "PATH": f"{tmp_path}:/bin"}
    assert run_here(["sbatch"], 10.0, environment=users, stdin="job\n").stdout == "high\njob\n"


def _heads(tree: ast.AST) -> set[str]:
    """What lists and tuples in a source begin with."""
    firsts = (node.elts[0] for node in walked(tree) if isinstance(node, ast.List | ast.Tuple) and node.elts)
    return {str(one.value) for one in firsts if isinstance(one, ast.Constant)}


def test_no_other_module_starts_a_command_of_slurm() -> None:
    folders = ("slurm", "prolog_epilog", "ckpt", "core", "autoparallel", "resilio_hpc")
    quoted = re.compile(rf"""["'](?:{"|".join(sorted(PROGRAMS))})["']""")
    wrong = []
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if name.startswith(ELSEWHERE) or name in STEPS | ON_DEV_CLUSTERS or not quoted.search(text):
            continue
        ways = {called for called, _ in calls(parsed(path)) if STARTS.fullmatch(called) and called != "self._run"}
        handed_in = ways <= {"run"} and "core.process import" not in text  # it is the runner's
        if _heads(parsed(path)) & PROGRAMS and not handed_in:
            wrong.append((name, sorted(ways)))
    assert wrong == []
