"""Rendering a template: the right lines change, nothing else does, and no value becomes a line or a command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import sbatch_options, template_files, template_settings
from resilio_hpc.slurm.submit.template import Template, parse, render

SCRIPT = """#!/bin/bash
# Trains. Something more about it,
# on two lines.
#
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH -t 60 --no-kill

set -euo pipefail
# source /path/to/environment.sh

SPARES=${SPARES:-1}  # nodes that wait
RUN_DIR=${RUN_DIR:-runs/$SLURM_JOB_ID}  # where
IMAGE=${IMAGE:?the image}  # the image

# "$@" is where the command goes
printf '%s\\0' "$SPARES" "$RUN_DIR" "$IMAGE" "$@"
"""
NAMES = template_files.names()


def template() -> Template:
    return parse("mine", SCRIPT)


def printed(script: str, directory: Path) -> list[str]:
    """What a rendered SCRIPT prints, when a shell runs it."""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, cwd=directory, env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().split("\0")[:-1]


def test_what_a_template_says_of_itself() -> None:
    read = template()
    assert (read.summary, read.about.splitlines()[1]) == ("Trains.", "on two lines.")
    assert read.options == {"job_name": "train", "nodes": "4", "exclusive": "true", "time": "60"}
    assert [(s.key, s.default, s.help) for s in read.settings] == [
        ("spares", "1", "nodes that wait"), ("run_dir", "runs/$SLURM_JOB_ID", "where"), ("image", None, "the image"),
    ]  # fmt: skip
    assert read.takes_command and read.takes_setup


def test_values_take_the_place_of_their_lines_and_others_follow_the_last() -> None:
    job = render(template(), {"image": "i.sif", "nodes": "2", "exclusive": "false", "partition": "gpu"}, ["train.py"])
    head = [line for line in job.script.splitlines() if line.startswith("#SBATCH")]
    assert head == [
        "#SBATCH --job-name=train", "#SBATCH --nodes=2", "#SBATCH -t 60 --no-kill", "#SBATCH --partition=gpu",
    ]  # fmt: skip
    assert job.arguments == ("--nodes=2", "--partition=gpu")
    assert job.options["nodes"] == "2" and "exclusive" not in job.options


def test_an_option_among_others_of_a_line_is_overruled_below() -> None:
    script = render(template(), {"image": "i", "time": "90"}, ["train.py"]).script
    assert script.index("#SBATCH -t 60 --no-kill") < script.index("#SBATCH --time=90")


def test_what_was_not_given_stays_but_is_written_down(tmp_path: Path) -> None:
    job = render(template(), {"image": "i.sif"}, ["train.py"])
    assert printed(job.script, tmp_path) == ["1", "runs/7", "i.sif", "train.py"]
    assert "${" not in job.script


def test_keys_may_be_written_as_flags_or_variables() -> None:
    job = render(template(), {"IMAGE": "i", "--job-name": "x"}, ["a"])
    assert (job.settings["image"], job.options["job_name"]) == ("i", "x")


def test_the_set_up_is_read_first_from_a_file_of_any_name(tmp_path: Path) -> None:
    name = 'an env\'s "file"\n.sh'
    (tmp_path / name).write_text("export SPARES=wrong; set_up=done\n")
    job = render(template(), {"image": "i", "setup": f"./{name}"}, ["a"], path_entry="/some where/bin")
    assert printed(job.script + 'printf "%s\\0" "$set_up" "${PATH%%:*}"\n', tmp_path)[-2:] == [
        "done",
        "/some where/bin",
    ]
    assert printed(job.script, tmp_path)[0] == "1"


HOSTILE = [
    "$(touch hit)", "`touch hit`", "; touch hit", "'; touch hit; '", '"; touch hit; "', "\n touch hit\n",
    "\\", "a\\\nb", "&& touch hit", "$IFS", "${HOME}", "*", "~", "#", "-n", "%j", "é", "a\tb",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_no_value_is_run_or_expanded(tmp_path: Path, value: str) -> None:
    job = render(template(), {"image": value, "run_dir": f"r{value}"}, ["train.py", value])
    assert printed(job.script, tmp_path) == ["1", f"r{value}", value, "train.py", value]
    assert list(tmp_path.iterdir()) == []


@given(value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_any_text_arrives_as_it_is(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    if not value.strip():
        return
    job = render(template(), {"image": value}, [value])
    assert printed(job.script, tmp_path_factory.getbasetemp())[2:] == [value, value]


@given(value=st.text(min_size=1))
def test_an_option_of_sbatch_never_becomes_a_line(value: str) -> None:
    try:
        job = render(template(), {"image": "i", "job_name": value, "comment": value}, ["a"])
    except UsageError:
        return
    assert len(job.script.splitlines()) == len(SCRIPT.splitlines()) + 1


@pytest.mark.parametrize(
    ("values", "command", "said"),
    [
        ({"nods": "2"}, ["a"], "template mine has no key 'nods': did you mean nodes?"),
        ({"walltime": "2"}, ["a"], "did you mean time?"),
        ({"gpus": "2"}, ["a"], "did you mean gpus_per_node?"),
        ({"qqq": "2"}, ["a"], "resilio submit --explain mine lists them"),
        ({"time": "1h"}, ["a"], "time: '1h' is not a time limit"),
        ({"nodes": "2", "--nodes": "3"}, ["a"], "nodes is given twice"),
        ({}, ["a"], "template mine needs image=…: the image"),
        ({"image": "a\0b"}, ["a"], "not valid UTF-8"),
        ({"image": "a\udce9b"}, ["a"], "not valid UTF-8"),
        ({"image": "i"}, [], "needs a command"),
        ({"image": "i"}, ["a\udce9"], "argument 'a\\udce9' is not valid UTF-8"),
    ],
)
def test_a_mistake_is_told_in_one_line(values: dict[str, str], command: list[str], said: str) -> None:
    with pytest.raises(UsageError) as told:
        render(template(), values, command)
    assert said in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def test_a_switch_that_shares_its_line_cannot_be_taken_out() -> None:
    text = SCRIPT.replace("#SBATCH --exclusive\n", "").replace("-t 60", "--exclusive --nodes=3")
    with pytest.raises(UsageError, match="split it"):
        render(parse("mine", text), {"image": "i", "exclusive": "false"}, ["a"])


def test_what_is_no_batch_script_is_told(tmp_path: Path) -> None:
    for name, content, said in (
        ("a", b"echo", "no #! line"), ("b", b"#!/bin/sh\n\xff", "not UTF-8"), ("c", b"#" * 300_000, "larger than"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=said):
            template_files.load(str(tmp_path / name))
    with pytest.raises(UsageError, match="No such file"):
        template_files.load("./nowhere.sbatch")
    with pytest.raises(UsageError, match="did you mean chained"):
        template_files.load("chaned")


# -- the templates of the package ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_ready_template_is_whole(name: str) -> None:
    read = template_files.load(name)
    assert [setting.key for setting in read.settings if setting.key not in template_settings.BY_KEY] == []
    assert [setting.key for setting in read.settings if not setting.help] == []
    assert read.takes_setup and "job_name" in read.options and read.summary.endswith(".")
    for key, value in read.options.items():
        sbatch_options.BY_KEY[key].check(value)
    for setting in read.settings:
        if setting.default and "$" not in setting.default:
            template_settings.check(setting.key, setting.default)


@pytest.mark.parametrize("name", NAMES)
def test_a_rendered_template_is_sound_for_a_shell(name: str) -> None:
    read = template_files.load(name)
    values = {setting.key: "a 'b' \"c\" $(d)" for setting in read.settings if setting.default is None}
    script = render(read, values, ["train.py", "it's"] if read.takes_command else [], "/a b/bin").script
    for text in (read.text, script):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_every_setting_is_used_by_a_template() -> None:
    used = {setting.key for name in NAMES for setting in template_files.load(name).settings}
    assert {setting.key for setting in template_settings.SETTINGS} - used == set()
