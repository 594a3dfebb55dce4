"""Hydra, the real one: an unmodified script finds its checkpoints again where its directory stays the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.environments import scrubbed
from tests.support.frameworks.runs import PYTHON, Framework
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

STAYS = "hydra.run.dir=${oc.env:RESILIO_RUN_DIR}/hydra"
# It counts to 12 and keeps every third number in Hydra's directory; one of its ranks is killed once, at 7
SCRIPT = """
import os, signal, time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    directory, here = Path(HydraConfig.get().runtime.output_dir), Path(hydra.utils.get_original_cwd())
    saved, is_first_life = directory / "saved", not (here / "struck").exists()
    rank, start = int(os.environ["RANK"]), int(saved.read_text()) if saved.exists() else 0
    print("BEGAN", rank, start, directory, Path.cwd(), config.lr, config.model.width, flush=True)

    def meet(what):
        here.joinpath(f"{what} {os.environ['TORCHELASTIC_RESTART_COUNT']} {config.lr} {rank}").touch()
        while len(list(here.glob(f"{what} {os.environ['TORCHELASTIC_RESTART_COUNT']} {config.lr} *"))) < 2:
            time.sleep(0.01)

    if "WORLD_SIZE" in os.environ:
        meet("began")
    for step in range(start, 12):
        if step == 7 and is_first_life:
            meet("saved")
            (here / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(1000)
        if rank == 0 and step % 3 == 2:
            (directory / "new").write_text(str(step + 1))
            os.rename(directory / "new", saved)
    print("ENDED", rank, directory, flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path) -> Path:
    Framework("", ("hydra",)).need()
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [_self_, {model: small}]\nlr: 0.01\n")
    for name, width in (("small", 8), ("large", 16)):
        (tmp_path / "conf" / "model" / f"{name}.yaml").write_text(f"width: {width}\n")
    return tmp_path


def launch(folder: Path, *words: str) -> tuple[list[list[str]], str]:
    """Return the words of the lines that ranks have printed when they began, and all that was printed."""
    command = [PYTHON, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--run-dir", "run", *words], cwd=folder, env=scrubbed(), text=True, timeout=PATIENCE_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("ENDED") >= 2, done.stdout
    lines = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["BEGAN"]], done.stdout


@pytest.mark.parametrize("chdir", ["false", "true"])
def test_it_goes_on_from_its_own_checkpoint_in_a_directory_that_stays(project: Path, chdir: str) -> None:
    began, said = launch(project, "train.py", "model=large", "lr=0.5", f"hydra.job.chdir={chdir}", STAYS)
    where = str(project / "run" / "hydra")
    cwd = where if chdir == "true" else str(project)
    assert sorted(began) == sorted(
        [rank, start, where, cwd, "0.5", "16"] for rank in ("0", "1") for start in ("0", "6")
    )
    assert "uses Hydra" not in said


def test_the_directory_may_stand_in_the_configuration_and_serves_without_the_launcher_too(project: Path) -> None:
    other = "outputs/${now:%H-%M-%S}"
    with (project / "conf" / "config.yaml").open("a") as file:
        file.write(f"hydra: {{run: {{dir: '${{oc.env:RESILIO_RUN_DIR,{other}}}/hydra'}}}}\n")
    began, said = launch(project, "-m", "train", "lr=0.5")
    assert sorted(line[1] for line in began) == ["0", "0", "6", "6"]
    assert "uses Hydra" not in said
    alone = subprocess.run(
        [PYTHON, "train.py"], cwd=project, env=scrubbed(RANK="0"), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert alone.returncode == 0 and "/outputs/" in alone.stdout, alone.stderr


def test_a_sweep_goes_on_with_the_job_in_which_it_was(project: Path) -> None:
    sweep = "hydra.sweep.dir=${oc.env:RESILIO_RUN_DIR}/sweep"
    began, _ = launch(project, "train.py", "--multirun", "lr=0.1,0.2", sweep)
    of_rank_0 = [(line[1], line[2], line[4]) for line in began if line[0] == "0"]
    folder = project / "run" / "sweep"
    assert of_rank_0 == [("0", f"{folder}/0", "0.1"), ("6", f"{folder}/0", "0.1"), ("0", f"{folder}/1", "0.2")]


def test_without_such_a_directory_it_ends_and_is_told_of_one(project: Path) -> None:
    _, said = launch(project, "train.py")
    assert "train.py uses Hydra" in said and "hydra.run.dir=" in said
