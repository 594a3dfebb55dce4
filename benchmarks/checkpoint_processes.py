"""The processes of one measurement: started together, waited for, and removed with all that they leave.

A process that measures knows its ``place``, may ``join`` the others, and ends with ``tell``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from checkpoint_methods import Place
from checkpoint_peers import PEERS
from launched import MARKER, SHARED_MEMORY, kill_marked, marked, remove, shared_memory
from launchers import PEERS as PEERS_PROGRAMS

TELL = "RESILIO_BENCHMARK_TELL"
RUN_ID = "TORCHELASTIC_RUN_ID"
"""What DLRover names its shared memory and sockets after."""
DLROVER_SOCKETS = Path("/tmp/ckpt_sock")
POLL_S = 0.02


def place() -> Place:
    return Place.read(os.environ)


def join(here: Place, needs_group: bool) -> Callable[[], None]:
    """Return what returns when all processes have called it.

    They are in a process group (gloo), where that is needed.
    """
    if here.world_size == 1 and not needs_group:
        return lambda: None
    import torch.distributed as dist

    store = f"file://{tempfile.gettempdir()}/store"
    dist.init_process_group("gloo", init_method=store, rank=here.rank, world_size=here.world_size)
    return dist.barrier


def tell(result: object) -> NoReturn:
    """End without waiting for the helpers of some methods, which do not end by themselves."""
    Path(os.environ[TELL]).write_text(json.dumps(result))
    os._exit(0)


def tell_failures() -> None:
    sys.excepthook = tell_why


def tell_why(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """After the traceback helpers may still write, so the reason goes where the result would."""
    traceback.print_exception(kind, error, trace)
    lines = str(error).strip().splitlines()
    Path(os.environ[TELL]).write_text(json.dumps(f"{kind.__name__}: {lines[-1] if lines else ''}"))
    os._exit(1)


def python_of(method: str, peers: Path = PEERS_PROGRAMS) -> Path:
    """Return the interpreter that a method needs: the peers have an environment of their own."""
    return peers / "python" if method in PEERS else Path(sys.executable)


def run(
    method: str,
    argv: Sequence[str],
    processes: int,
    disk: Path,
    timeout_s: float,
    *,
    peers: Path = PEERS_PROGRAMS,
    tmp: Path | None = None,
    **environment: str,
) -> list[Any] | str:
    """Return what each process told, or why there is nothing to tell.

    ``{directory}`` in argv: an empty one on ``disk``.

    ``peers``: where their programs are; ``tmp``: where temporary files are made (default: as Python chooses).
    """
    python = python_of(method, peers)
    if not python.exists():
        return "not installed here (benchmarks/peers_setup.sh installs the peers)"
    children: list[subprocess.Popen[bytes]] = []
    try:
        with directories(disk, tmp) as (scratch, directory):
            words = [str(python), *(word.replace("{directory}", str(directory)) for word in argv)]
            for rank in range(processes):
                children.append(start(words, rank, processes, scratch, environment))
            codes = wait(children, timeout_s)
            if failed := [rank for rank, code in enumerate(codes) if code]:
                return str(heard(scratch, failed[0]))[:120]
            if None in codes:
                return f"not done within {timeout_s:g} s"
            return [heard(scratch, rank) for rank in range(processes)]
    finally:
        for child in children:  # killed with all that they started
            child.wait()


def start(
    argv: Sequence[str], rank: int, processes: int, scratch: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    where = {"RANK": str(rank), "WORLD_SIZE": str(processes)}
    where |= {"LOCAL_" + name: value for name, value in where.items()}
    own = {MARKER: str(scratch), RUN_ID: scratch.name, TELL: str(scratch / f"told-{rank}"), "TMPDIR": str(scratch)}
    with (scratch / f"output-{rank}").open("wb") as output:  # no pipe: a helper that lives on would keep it open
        return subprocess.Popen(
            argv,
            env={**os.environ, **environment, **where, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait(children: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes, once all have ended, one has failed, for which the others would wait in vain, or the time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(POLL_S)


def heard(scratch: Path, rank: int) -> Any:
    """Return what a process told: its result, or a text why there is none; if it could not, its last line."""
    try:
        return json.loads((scratch / f"told-{rank}").read_text())
    except (OSError, ValueError):
        lines = (scratch / f"output-{rank}").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a word"


def end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


@contextmanager
def directories(disk: Path, tmp: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """Give a short path for sockets and results, and an empty directory on the disk that is measured.

    What processes that were started in between leave is removed: themselves, shared memory, DLRover's sockets, files;
    also at a SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, end)
    scratch = Path(tempfile.mkdtemp(prefix="resilio-", dir=tmp))
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=disk))
    try:
        yield scratch, directory
    finally:
        left = {scratch, directory, DLROVER_SOCKETS / scratch.name}
        left |= shared_memory(marked(str(scratch))) | set(SHARED_MEMORY.glob(f"{scratch.name}*"))
        kill_marked(str(scratch))
        for entry in left:
            remove(entry)
        with suppress(OSError):  # others use it, or none did
            DLROVER_SOCKETS.rmdir()
        signal.signal(signal.SIGTERM, before)


def slowest(results: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Of processes that saved together: each timing is that of the slowest, and what is wrong is wrong in all."""
    found = {}
    for name in results[0]:
        columns = zip(*(one[name] for one in results), strict=True)
        found[name] = [sum(values) if name == "wrong" else max(values) for values in columns]
    return found
