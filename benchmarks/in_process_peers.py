"""The peers of benchmarks/in_process.py: NVRx's in-process Wrapper and torchft, each with what it is given.

Both: the same model and step as ours, gloo, a plain supervisor (benchmarks/peer_supervisor.py) on the same machine.

- NVRx 0.4.1: one reserve rank that has its process, its imports and its memory already, so one fault in a run; the
  model made outside of the function; the large state sent to the newcomer alone. Defaults, with a limit of 10 s for a
  step's collectives. "short": that limit is 2 s; its looks at the ranks, and its wait for further failures, 0.1 s in
  place of 1 s. No part that needs CUDA.
- torchft 0.2.0: one replica group a rank, whose process is started again at once and heals from a peer by HTTP.
  The lighthouse counts a replica as dead after 5 s without heartbeat, its default, or "short": 1 s. Heartbeats: 0.1 s.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launched import Launched
from launchers import PEERS, Launcher

HERE = Path(__file__).resolve().parent
MARK, SUMS_LIMIT_S = 1.0, 10.0
NVRX, TORCHFT = "NVRx in-process", "torchft"


@dataclass(frozen=True)
class PeerLauncher(Launcher):
    """The supervisor of a peer. ``options``: kind, reserve ranks and heartbeat's limit in milliseconds."""

    def argv(self, ranks: int, script: Path, arguments: Sequence[str]) -> list[str]:
        kind, reserve, heartbeat_ms = self.options
        start = [str(self.program), str(HERE / "peer_supervisor.py"), kind, str(ranks + int(reserve)), heartbeat_ms]
        state_mb, setting, *_ = arguments
        return [*start, str(script), state_mb, str(ranks), setting]


@dataclass(frozen=True)
class Mode:
    """What is measured: launcher, script, its setting, and the faults in one run at most (0: as many as asked for)."""

    name: str
    launcher: Launcher
    script: Path
    setting: str
    most_faults: int = 0


def nvrx(setting: str) -> Mode:
    launcher = PeerLauncher(NVRX, setting, PEERS / "python", ("nvrx", "1", "0"))
    return Mode(f"{NVRX}, {setting}", launcher, HERE / "peer_nvrx_training.py", setting, 1)


def torchft(setting: str, heartbeat_ms: int) -> Mode:
    launcher = PeerLauncher(TORCHFT, setting, PEERS / "python", ("torchft", "0", str(heartbeat_ms)))
    return Mode(f"{TORCHFT}, {setting}", launcher, HERE / "peer_torchft_training.py", setting)


PEER_MODES = (nvrx("short"), nvrx("defaults"), torchft("short", 1000), torchft("defaults", 5000))


def is_installed(mode: Mode) -> bool:
    package = "nvidia_resiliency_ext" if mode.name.startswith(NVRX) else "torchft"
    return any((PEERS.parent / "lib").glob(f"python*/site-packages/{package}"))


def states(run: Launched, faults: int) -> str:
    """Whether each newcomer's large state is what the others have: it starts with another one."""
    file, deadline = run.directory / "checksums", time.monotonic() + SUMS_LIMIT_S
    while time.monotonic() < deadline:
        means = [float(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []
        if len(means) >= faults:
            return "newcomers' state right" if all(mean == MARK for mean in means) else f"WRONG STATE: {means}"
        time.sleep(0.1)
    return "newcomers' state not seen"


def pauses(run: Launched, killed_at_s: float) -> float | None:
    """Return the seconds without a step of a rank that lived on, even if not all take part in it; None: not noted."""
    found = []
    for file in run.directory.glob("all-rank*"):
        times = [float(line.split()[1]) for line in file.read_text().splitlines()]
        before = [when for when in times if when <= killed_at_s + 0.2]
        later = [when for when in times if when > killed_at_s + 0.2]
        if before and later:
            found.append(later[0] - before[-1])
    return min(found) if found else None  # the smallest: the killed replica's own is the longest
