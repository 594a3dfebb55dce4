"""What ``sbatch --test-only`` says, as recorded from 22.05 and 26.05."""

from __future__ import annotations

import time

import pytest

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.slurm.submit.expected_start import Expected, parse_start, refusal


@pytest.mark.parametrize(
    "text",
    [
        "sbatch: Job 11 to start at 1795383464 using 16 processors on nodes n[1-2] in partition main\n",
        "sbatch: Job 11 to start at 1795383464 a using 16 processors on nodes n[1-2] in partition main\n",
        "sbatch: your quota is nearly used up\n"
        "sbatch: Job 11 to start at 1795383464 a using 16 processors on nodes n[1-2] in partition main\n",
    ],
)
def test_a_start(text: str) -> None:
    assert parse_start(text) == Expected(1795383464.0, ("n1", "n2"), "main")


def test_a_site_that_writes_times_its_own_way() -> None:
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1795383464))
    said = f"sbatch: Job 8 to start at {local} using 1 processors on nodes n3 in partition main\n"
    assert parse_start(said) == Expected(1795383464.0, ("n3",), "main")


@pytest.mark.parametrize(
    "text", ["", "sbatch: lua: hello\n", "sbatch: Job 8 to start at soon using 1 processors on nodes n3"]
)
def test_an_answer_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError, match="--test-only"):
        parse_start(text)


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        ("allocation failure: Requested node configuration is not available\n",
         "Requested node configuration is not available"),
        ("sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified\n",
         "invalid partition specified: x; Invalid partition name specified"),
    ],
)  # fmt: skip
def test_a_refusal_in_one_line(stderr: str, why: str) -> None:
    assert refusal(CommandError(["sbatch"], 1, "", stderr)) == why
