"""What the spawner's tests share: a spawner in a directory of its own, and waiting for its events."""

from __future__ import annotations

import select
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from resilio_hpc.launch.workers.spawner import (
    AllStopped,
    Exited,
    RankCommand,
    Ready,
    Spawner,
    SpawnerEvent,
    Started,
    StoreReady,
)
from tests.support.environments import scrubbed
from tests.support.waiting import until

E = TypeVar("E")


def environment(**extra: str) -> dict[str, str]:
    return scrubbed(**{"OMP_NUM_THREADS": "1", **extra})


class Bench:
    """One spawner and everything that it said."""

    def __init__(self, directory: Path, use_zygote: bool = True, **options: Any) -> None:
        self.directory = directory
        self.log_path = directory / "spawner.log"
        self.spawner = Spawner(
            options.pop("environment", None) or environment(), use_zygote=use_zygote, directory=directory, **options
        )
        self.seen: list[SpawnerEvent] = []

    def start(self) -> Ready:
        self.spawner.start()
        return self.wait(Ready)

    def wait(self, kind: type[E], number: int = 1, where: Callable[[E], bool] = lambda _: True) -> E:
        """The ``number``-th event of a kind since the test began."""

        def found() -> list[E]:
            events = [event for event in self.seen if isinstance(event, kind) and where(event)]
            if len(events) < number and self.spawner.pid is not None:
                select.select([self.spawner], [], [], 1.0)
                self.seen += self.spawner.events()
            return events[number - 1 :]

        def runs() -> bool:
            return self.spawner.pid is not None

        return until(found, kind.__name__, lambda: f"{self.seen}; {self.log()}", alive=runs, poll_s=0.0)[0]

    def log(self) -> str:
        return self.log_path.read_text()

    def script(self, source: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.write_text(textwrap.dedent(source))
        return path

    def spawn(self, source: str, *arguments: str, rank: int = 0, env: dict[str, str] | None = None) -> None:
        path = self.script(source, f"script{rank}.py")
        self.command("script", str(path), *arguments, rank=rank, env=env)

    def command(self, kind: Any, *argv: str, rank: int = 0, env: dict[str, str] | None = None, **fields: Any) -> None:
        place = {"cwd": self.directory, "stdout_path": f"{self.directory}/{rank}.out"}
        place |= {"stderr_path": f"{self.directory}/{rank}.err"}
        given = {name: str(path) for name, path in place.items()} | fields
        self.spawner.spawn(RankCommand(rank, argv, kind, env or {}, **given))

    def wait_exit(self, number: int = 1) -> Exited:
        return self.wait(Exited, number)

    def run(self, source: str, *arguments: str, env: dict[str, str] | None = None) -> Exited:
        self.spawn(source, *arguments, env=env)
        return self.wait(Exited)

    def out(self, rank: int = 0) -> str:
        return (self.directory / f"{rank}.out").read_text()

    def err(self, rank: int = 0) -> str:
        return (self.directory / f"{rank}.err").read_text()

    def pid(self, rank: int = 0) -> int:
        return self.wait(Started, where=lambda event: event.local_rank == rank).pid

    def until(self, path: Path, text: str = "\n") -> str:
        """Wait until a file holds ``text``; its content."""
        until(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}", self.log, poll_s=0.002)
        return path.read_text()

    def store_port(self, round: int) -> int:
        self.spawner.open_store(round, "localhost")
        return self.wait(StoreReady, where=lambda event: event.round == round).port

    def stop(self, **how: Any) -> AllStopped:
        stopped = sum(isinstance(event, AllStopped) for event in self.seen)
        self.spawner.stop(**how)
        return self.wait(AllStopped, stopped + 1)

    def use(self, directory: Path) -> None:
        """Nothing runs, nothing was seen; the files of the next test are in ``directory``."""
        self.seen.clear()
        self.directory = directory

    @staticmethod
    def gone(pid: int) -> bool:
        """Nobody runs under ``pid`` any more (a zombie does not run)."""
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
        except OSError:
            return True

    def wait_gone(self, *pids: int) -> None:
        def left() -> list[int]:
            return [pid for pid in pids if not self.gone(pid)]

        until(lambda: not left(), "the end of processes", left, poll_s=0.002)


@pytest.fixture
def spawner_environment() -> Callable[..., dict[str, str]]:
    """The environment of a spawner, with additions."""
    return environment


@pytest.fixture(scope="session")
def _forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("zygote"))
    assert bench.start().why_not_fork == ""
    yield bench
    bench.spawner.kill()


@pytest.fixture(scope="session")
def _executing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("spawner"), use_zygote=False)
    bench.start()
    yield bench
    bench.spawner.kill()


@pytest.fixture
def bench(_forking: Bench, tmp_path: Path) -> Iterator[Bench]:
    """Ranks are forked from a zygote (one for all tests: it takes 2 s to start)."""
    _forking.use(tmp_path)
    yield _forking
    _forking.stop()


@pytest.fixture
def exec_bench(_executing: Bench, tmp_path: Path) -> Iterator[Bench]:
    """Ranks are executed."""
    _executing.use(tmp_path)
    yield _executing
    _executing.stop()


@pytest.fixture(params=["fork", "exec"])
def either(request: pytest.FixtureRequest) -> Bench:
    """Both ways, one after the other."""
    return request.getfixturevalue("bench" if request.param == "fork" else "exec_bench")


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Benches with other options, or to be killed."""
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(tmp_path, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.spawner.kill()
