"""What a new user of each launcher meets: what is typed, how long it takes, and how a killed rank ends.

    .venv/bin/python benchmarks/first_minutes.py

Each one gets an environment of its own below .venv-first, with the torch of constraints.txt, and is installed by the
command of its documentation. Then two ranks of a script with its own checkpoint start, and one of them is killed once.
A start that fails because a package is missing is tried again with that package, which counts as another command.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".venv-first"
LIMIT_S = 240.0
SCRIPT = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
saved, killed = Path("first.pt"), Path("killed")
start = torch.load(saved)["step"] if saved.exists() else 0
x = torch.ones(1000)
if rank == 0:
    print(f"steps from {start} at {time.time():.2f}", flush=True)
for step in range(start, 300):
    dist.all_reduce(x)
    x /= dist.get_world_size()
    time.sleep(0.02)
    if rank == 0 and (step + 1) % 20 == 0:
        torch.save({"step": step + 1}, "first.tmp")
        Path("first.tmp").rename(saved)
    if rank == 1 and step == 150 and not killed.exists():
        killed.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""
SUBMITIT = """
import os, submitit
def work():
    env = submitit.JobEnvironment()
    os.environ.update(RANK=str(env.global_rank), WORLD_SIZE=str(env.num_tasks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29711")
    exec(open("first.py").read(), {"__name__": "__main__"})
executor = submitit.AutoExecutor(folder="log", cluster="local")
executor.update_parameters(tasks_per_node=2, timeout_min=3)
executor.submit(work).results()
"""
TORCHFT = """
import os, signal, time
from datetime import timedelta
from pathlib import Path
import torch
from torchft import Manager, ProcessGroupGloo
group = int(os.environ["REPLICA"])
state = {"step": 0}
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=30)), min_replica_size=1, load_state_dict=state.update,
    state_dict=lambda: dict(state), replica_id=f"g{group}",
)
killed = Path("killed")
x = torch.ones(1000)
print(f"steps from 0 at {time.time():.2f}", flush=True)
while state["step"] < 300:
    manager.start_quorum()
    manager.allreduce(x).wait()
    state["step"] += manager.should_commit()
    if killed.exists() and group == 0 and state["step"] > 150:
        print(f"steps from {state['step']} at {time.time():.2f}", flush=True)
        group = 2
    time.sleep(0.02)
    if group == 1 and state["step"] == 150 and not killed.exists():
        killed.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
manager.shutdown()
"""


@dataclass(frozen=True)
class Contender:
    """``install``: what pip gets. ``commands``: typed in turn; all but the last are left to run beside it."""

    name: str
    install: tuple[str, ...]
    commands: tuple[str, ...]
    files: dict[str, str] = field(default_factory=lambda: {"first.py": SCRIPT})
    changed: str = "no"
    """What the user's script needs."""


CONTENDERS = (
    Contender("resilio-launch", (f"{ROOT}[torch]",), ("resilio-launch --nproc-per-node 2 first.py",)),
    Contender("torchrun, defaults", (), ("torchrun --nproc-per-node 2 first.py",)),
    Contender("torchrun --max-restarts 3", (), ("torchrun --nproc-per-node 2 --max-restarts 3 first.py",)),
    Contender(
        "NVRx ft_launcher", ("nvidia-resiliency-ext",), ("ft_launcher --nproc-per-node 2 --max-restarts 3 first.py",)
    ),
    Contender(
        "dlrover-run", ("dlrover[torch]",),
        ("dlrover-run --standalone --nproc-per-node 2 --max-restarts 3 first.py",),
    ),
    Contender(
        "torchft", ("torchft",),
        (
            "torchft_lighthouse --min_replicas 1 --bind [::]:29510",
            "env REPLICA=1 torchrun --master-port 29601 --nproc-per-node 1 --max-restarts 3 first.py",
            "env REPLICA=0 torchrun --master-port 29600 --nproc-per-node 1 --max-restarts 3 first.py",
        ),
        {"first.py": TORCHFT}, "its Manager in the loop",
    ),
    Contender(
        "submitit, local", ("submitit",), ("python go.py",), {"first.py": SCRIPT, "go.py": SUBMITIT}, "its executor"
    ),
)  # fmt: skip


@dataclass
class Outcome:
    """Seconds; None for what did not happen."""

    typed: int = 0
    install_s: float = 0.0
    first_step_s: float | None = None
    recovered_s: float | None = None
    lines: int = 0
    errors: list[str] = field(default_factory=list)


def try_one(contender: Contender) -> Outcome:
    """Install it and run it until a start reaches its first step, or nothing that is missing can be added."""
    outcome = Outcome()
    bin_directory = PLACE / re.sub(r"\W+", "-", contender.name) / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(bin_directory.parent)], check=True)
    pinned = re.findall(r"^(?:torch|numpy)==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    _pip(bin_directory, *pinned)
    if contender.install:
        outcome.typed += 1
        outcome.install_s += _pip(bin_directory, *contender.install)
    for _ in range(5):
        outcome.typed += len(contender.commands)
        output = _run(contender, bin_directory, outcome)
        missing = re.search(r"ModuleNotFoundError: No module named '(\w+)'", output)
        if outcome.first_step_s is not None or not missing:
            return outcome
        outcome.errors.append(missing[0])
        outcome.typed += 1
        outcome.install_s += _pip(bin_directory, {"grpc": "grpcio", "google": "protobuf"}.get(missing[1], missing[1]))
    return outcome


def _pip(bin_directory: Path, *packages: str) -> float:
    began = time.monotonic()
    argv = [str(bin_directory / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(argv, check=True, stderr=subprocess.DEVNULL, timeout=1200.0)
    return time.monotonic() - began


def _run(contender: Contender, bin_directory: Path, outcome: Outcome) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for name, text in contender.files.items():
            (place / name).write_text(text)
        path = f"{bin_directory}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "TORCHFT_LIGHTHOUSE": "http://localhost:29510"}
        began = time.time()
        started = []
        for number, command in enumerate(contender.commands):
            with (place / f"out{number}").open("wb") as out:
                started.append(
                    subprocess.Popen(
                        shlex.split(command), cwd=place, env=environment, stdout=out, stderr=out, start_new_session=True
                    )
                )
            time.sleep(0.5 if number + 1 < len(contender.commands) else 0.0)
        try:
            started[-1].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            outcome.errors.append(f"not ended after {LIMIT_S:g} s")
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        logs = place.glob("log/*.out")  # submitit's
        last = (place / f"out{len(started) - 1}").read_text(errors="replace")
        output = last + "".join(path.read_text(errors="replace") for path in logs)
        starts = [float(at) for at in re.findall(r"steps from \d+ at ([\d.]+)", output)]
        if starts:
            outcome.first_step_s = starts[0] - began
        if len(starts) > 1:
            outcome.recovered_s = starts[1] - float((place / "killed").read_text())
        outcome.lines = sum(not line.startswith("steps from") for line in last.splitlines())
        if started[-1].returncode != 0:
            named = re.findall(r"^\S*(?:Error|Exception)\b.*", last, re.MULTILINE)
            outcome.errors += [line[:100] for line in named[-1:] if "ModuleNotFoundError" not in line]
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the contenders whose names contain this")
    options = parser.parse_args()
    print("| | typed | install | first step | one rank killed: steps again | lines printed | script changed | errors |")
    print("|---|---|---|---|---|---|---|---|")
    for contender in CONTENDERS:
        if options.only not in contender.name:
            continue
        found = try_one(contender)
        first, recovered = (
            f"{value:.1f} s" if value is not None else "never" for value in (found.first_step_s, found.recovered_s)
        )
        cells = (found.typed, f"{found.install_s:.0f} s", first, recovered, found.lines, contender.changed)
        print(
            "|",
            contender.name,
            "|",
            " | ".join(map(str, cells)),
            "|",
            "; ".join(found.errors) or "none",
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
