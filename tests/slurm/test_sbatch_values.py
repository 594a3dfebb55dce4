"""Values of sbatch's options: what is taken, what is told, and how a #SBATCH line holds it."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import sbatch_options, template_settings

TAKEN = {
    "time": ["90", "90:00", "24:00:00", "1-12", "1-12:30", "1-12:30:15", "unlimited", "0:30"],
    "mem": ["64G", "64GB", "500m", "0", "1024"],
    "nodes": ["1", "2-4", "4-4"],
    "gpus_per_node": ["8", "0", "h100:8", "a100:2,h100:4"],
    "array": ["0-7", "1,3,5", "0-99:10", "0-99%4", "5", "0-1,4"],
    "signal": ["USR2@120", "B:USR1@60", "SIGUSR2@5", "10@60", "R:USR1"],
    "exclusive": ["true", "False", "yes", "0"],
    "constraint": ["a100&ib", "[a100|h100]", "a b"],
    "job_name": ["it's", 'say "hi"', "#1", "a\\b", "späte Nächte", "$HOME `id`"],
    "dependency": ["afterok:12:13?singleton", "singleton"],
    "begin": ["now+1hour", "16:00", "2026-11-22T20:00:00"],
    "nice": ["100", "-5"],
    "spares": ["0", "3"],
    "ranks_per_node": ["gpu", "cpu", "8"],
    "mpi_type": ["pmix", "pmix_v4"],
}
TOLD = {
    "time": ["", "1h", "24:00:00:00", "1-", "0", "0:0:0", "12:345", "-5", "1 2"],
    "mem": ["", "64 G", "G", "64X", "-1"],
    "nodes": ["0", "two", "4-2", "", "-1", "1e3", "²"],
    "gpus_per_node": ["eight", "h100:", "-1", "h100:8;rm"],
    "array": ["", "7-0", "a", "0-7%0", "0-7%", "1;2"],
    "signal": ["", "USR2@", "@60", "B:@5", "USR2 60"],
    "exclusive": ["", "maybe"],
    "partition": ["", "a b", "a\nb"],
    "job_name": ["", "two\nlines", "a\x1b[31m", "a\r"],
    "output": ["", "a\n#SBATCH --uid=0"],
    "nice": ["high", ""],
    "begin": ["", "now; rm"],
    "spares": ["-1", "", "1.5"],
    "ranks_per_node": ["0", "all"],
    "mpi_type": ["", "none", "pmix; rm"],
    "run_dir": ["", " "],
}


def check(key: str, value: str) -> str:
    option = sbatch_options.BY_KEY.get(key)
    return option.check(value) if option else template_settings.check(key, value)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in TAKEN.items() for value in values])
def test_a_right_value_is_taken(key: str, value: str) -> None:
    assert check(key, value)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in TOLD.items() for value in values])
def test_a_wrong_value_is_told_in_one_line(key: str, value: str) -> None:
    with pytest.raises(UsageError) as told:
        check(key, value)
    assert len(str(told.value).splitlines()) == 1


def test_every_option_refuses_a_line_break() -> None:
    for option in sbatch_options.OPTIONS:
        with pytest.raises(UsageError):
            option.check("1\n#SBATCH --uid=0")


def test_a_flag_is_the_key_with_dashes() -> None:
    assert sbatch_options.BY_KEY["gpus_per_node"].flag == "--gpus-per-node"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("nodes", "4", "#SBATCH --nodes=4"),
        ("constraint", "[a|b]", "#SBATCH --constraint=[a|b]"),
        ("job_name", "a b", '#SBATCH --job-name="a b"'),
        ("job_name", 'a"b\\c', '#SBATCH --job-name="a\\"b\\\\c"'),
        ("job_name", "a#b", '#SBATCH --job-name="a#b"'),
        ("exclusive", "true", "#SBATCH --exclusive"),
        ("exclusive", "false", ""),
        ("requeue", "false", "#SBATCH --no-requeue"),
    ],
)
def test_a_line_for_sbatch(key: str, value: str, line: str) -> None:
    assert sbatch_options.sbatch_line(sbatch_options.BY_KEY[key], value) == line


def test_names_that_others_use_lead_to_keys_that_exist() -> None:
    known = {*sbatch_options.BY_KEY, *template_settings.BY_KEY, "setup"}
    assert set(template_settings.OTHER_NAMES.values()) - known == set()
    assert set(template_settings.OTHER_NAMES) & known == set()
