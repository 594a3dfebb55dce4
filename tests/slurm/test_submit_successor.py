"""The next job of a chain is submitted once, with its own script, or the reason is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from resilio_hpc.core.errors import Untrusted
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import Unanswered


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a program of Slurm's in place; all others are missing."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def put(name: str, body: str) -> None:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    return put


def test_a_batch_script_that_could_not_be_had_is_an_error_whatever_the_exit_code(
    programs: Callable[[str, str], None], tmp_path: Path
) -> None:
    programs(
        "scontrol",
        "echo 'job script retrieval failed: Unable to contact slurm controller (connect failure)' >&2",  # seen: exit 0
    )
    with pytest.raises(Unanswered, match="retrieval failed"):
        commands.batch_script("7", tmp_path / "batch.sh")


def test_a_successor_is_not_submitted_without_the_jobs_description(
    programs: Callable[[str, str], None], tmp_path: Path
) -> None:
    programs("scontrol", '[ "$1" = write ] && echo "#!/bin/sh" > "$4" && exit 0; exit 1')
    programs("sbatch", "echo 8")
    with pytest.raises(Unanswered, match="show job 7"):
        chain.submit_successor(tmp_path, "7", 2)


def test_a_successor_whose_submission_lost_its_answer_is_found_again(
    programs: Callable[[str, str], None], tmp_path: Path
) -> None:
    script = tmp_path / "batch-7.sh"
    script.write_text("#!/bin/sh\n")
    programs("squeue", f'echo "5|/home/u/other.sh"; echo "9|{script}x"; echo "8|{script} two words"')
    assert chain.submit_successor(tmp_path, "7", 2) == chain.Link(2, "8")
    assert [link.job for link in chain.read_links(tmp_path)] == ["7", "8"]


def test_a_successor_with_an_exchanged_script_is_cancelled(
    programs: Callable[[str, str], None], tmp_path: Path
) -> None:
    """sbatch reads the script by its path: above a run directory others may rename directories."""
    script = tmp_path / "batch-7.sh"
    script.write_text("#!/bin/sh\nsrun train\n")
    programs("sbatch", "echo 8")
    programs("scancel", f'echo "$@" > {tmp_path}/cancelled')
    programs("scontrol", f'cp {script} "$4"; echo >> "$4"')  # an empty line more is no other script
    assert chain._submit(script, [str(script)], {"PATH": os.environ["PATH"]}) == "8"
    programs("scontrol", 'echo "touch /tmp/owned" > "$4"')
    with pytest.raises(Untrusted, match="is cancelled"):
        chain._submit(script, [str(script)], {"PATH": os.environ["PATH"]})
    assert (tmp_path / "cancelled").read_text().split()[-1] == "8"
    programs("scontrol", "exit 1")  # no answer: it stays
    assert chain._submit(script, [str(script)], {"PATH": os.environ["PATH"]}) == "8"
