"""The training loop against a real, strict agent at the other end of the socket."""

from __future__ import annotations

import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from resilio_hpc.ckpt.coordination.agent_link import AgentLink
from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.core import rank_link
from resilio_hpc.core.rank_link import Finished, Section, StepDone, StopAck, StopAt, StopConfirmed, Stopped
from resilio_hpc.launch.controller.members.stopping import StopAgreement
from resilio_hpc.train import Run
from resilio_hpc.train import run as run_module
from resilio_hpc.train.agreed_stop import AgreedStop
from tests.support.train.strict_agent import Peer, StrictAgent
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def agent() -> Iterator[StrictAgent]:
    with tempfile.TemporaryDirectory() as directory:  # short: the path of a socket has at most 107 bytes
        server = StrictAgent(Path(directory) / "agent")
        yield server
        server.close()


Attach = Callable[[int], tuple[Run, Peer]]


@pytest.fixture
def attach(agent: StrictAgent) -> Iterator[Attach]:
    """Makes ranks of a run of two in this process, each with a link of its own."""
    links = []

    def connect(environment: Mapping[str, str]) -> AgentLink | None:
        link = rank_link.connect(environment)
        return link and AgentLink(link, Place.read(environment))

    def attach_rank(rank: int) -> tuple[Run, Peer]:
        run = run_module._attach(agent.environment(rank, 2), connect)
        links.append(run._link)
        return run, agent.accept()

    yield attach_rank
    agent.close()
    for link in links:
        assert link is not None
        link._link.close()


class Handle:
    """A save that notes when it is waited for."""

    def __init__(self, notes: list[str], step: int) -> None:
        self.notes, self.step = notes, step

    def wait(self, stage: str) -> None:
        self.notes.append(f"wait {self.step} {stage}")


class Rank:
    """A rank in a thread that begins a step only when it is told to, so that every race is played on purpose."""

    def __init__(self, attach: Attach, total: int = 10, rank: int = 0, loop: bool = True) -> None:
        self.run, self.peer = attach(rank)
        self.notes: list[str] = []
        self.bodies: queue.Queue[int] = queue.Queue()
        self.ended: str = ""
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._loop, args=(total,), daemon=True)
        if loop:
            self.start()

    def start(self) -> None:
        self._thread.start()

    def begins(self, step: int) -> None:
        """Wait until the body of ``step`` (an index) runs; it does not end before ``finish``."""
        assert self.bodies.get(timeout=PATIENCE_S) == step

    def finish(self, bodies: int = 1) -> None:
        self._go.release(bodies)

    def join(self) -> str:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.ended

    def _save(self, step: int) -> Handle:
        self.notes.append(f"save {step}")
        return Handle(self.notes, step)

    def _loop(self, total: int) -> None:
        try:
            for step in self.run.steps(0, total, save=self._save, every=4):
                self.bodies.put(step)
                assert self._go.acquire(timeout=PATIENCE_S)
            self.ended = "complete"
        except SystemExit as end:
            self.ended = f"exit {end.code}"


def test_without_a_launcher_it_is_a_loop_that_saves() -> None:
    notes: list[str] = []

    def save(step: int) -> Handle:
        notes.append(f"save {step}")
        return Handle(notes, step)

    run = run_module._attach({})
    assert (run.rank, run.world_size, run.launched, run.run_dir) == (0, 1, False, None)
    assert list(run.steps(3, 9, save=save, every=4)) == [3, 4, 5, 6, 7, 8]
    assert notes == ["save 4", "save 8", "save 9", "wait 9 committed"]


def test_a_last_step_that_is_a_multiple_is_saved_once() -> None:
    notes: list[int] = []
    list(run_module._attach({}).steps(0, 4, save=notes.append, every=2))
    assert notes == [2, 4]


def test_a_run_restored_at_its_end_makes_sure_that_the_end_is_committed() -> None:
    """It may have been restored from memory, and then nothing durable holds the last step."""
    notes: list[int] = []
    assert list(run_module._attach({}).steps(4, 4, save=notes.append, every=2)) == []
    assert notes == [4]


def test_attach_reads_the_place_of_this_rank(agent: StrictAgent, attach: Attach) -> None:
    run, peer = attach(1)
    said = peer.attach
    assert (run.rank, run.local_rank, run.world_size, run.round, run.restart_count) == (1, 1, 2, 3, 2)
    assert run.launched and run.run_dir == agent.path.parent and run.checkpoint_dir == agent.path.parent / "checkpoints"
    assert (said.rank, said.local_rank, said.round, said.pid) == (1, 1, 3, os.getpid())


def test_the_end_is_told_after_the_last_save_is_committed(attach: Attach) -> None:
    rank = Rank(attach, total=6)
    rank.finish(6)
    assert rank.peer.hear(StepDone).step == 1
    assert rank.peer.hear(Finished).step == 6
    assert rank.join() == "complete"
    assert rank.notes == ["save 4", "save 6", "wait 6 committed"]


def test_the_agreed_step_is_reached_saved_and_left_with_0(attach: Attach) -> None:
    rank = Rank(attach)
    rank.begins(0)
    rank.peer.tell(StopAt(2))
    assert rank.peer.hear(StopAck) == StopAck(target=2, accepted=True, step=1)
    rank.finish(10)  # more than it may use
    while rank.peer.hear(StepDone).step < 2:
        pass
    rank.peer.tell(StopConfirmed(2))
    assert rank.peer.hear(Stopped) == Stopped(2)
    assert rank.join() == "exit 0"
    assert rank.notes == ["save 2", "wait 2 committed"]


def test_a_step_already_begun_beyond_the_target_is_declined(attach: Attach) -> None:
    rank = Rank(attach)
    rank.finish(2)
    for step in (0, 1, 2):
        rank.begins(step)
    rank.peer.tell(StopAt(2))
    assert rank.peer.hear(StopAck) == StopAck(target=2, accepted=False, step=3)
    rank.peer.tell(StopAt(5))
    assert rank.peer.hear(StopAck) == StopAck(target=5, accepted=True, step=3)
    rank.peer.tell(StopConfirmed(5))  # long before it gets there
    rank.finish(10)
    assert rank.peer.hear(Stopped) == Stopped(5)
    assert rank.join() == "exit 0"


def test_a_rank_that_waits_at_the_target_follows_a_later_one(attach: Attach) -> None:
    rank = Rank(attach)
    rank.begins(0)
    rank.peer.tell(StopAt(1))
    assert rank.peer.hear(StopAck).accepted
    rank.finish(10)
    assert rank.peer.hear(StepDone).step == 1
    rank.peer.tell(StopAt(3))
    assert rank.peer.hear(StopAck) == StopAck(target=3, accepted=True, step=1)
    rank.peer.tell(StopConfirmed(3))
    assert rank.peer.hear(Stopped) == Stopped(3)
    assert rank.join() == "exit 0"


def test_the_confirmation_of_a_former_target_stops_nobody(attach: Attach) -> None:
    rank = Rank(attach, total=5)
    rank.begins(0)
    rank.peer.tell(StopAt(2))
    rank.peer.hear(StopAck)
    rank.peer.tell(StopAt(4))
    rank.peer.hear(StopAck)
    rank.peer.tell(StopConfirmed(2))
    rank.peer.tell(StopConfirmed(4))
    rank.finish(10)
    assert rank.peer.hear(Stopped) == Stopped(4)


def test_a_target_proposed_again_has_to_be_confirmed_again(attach: Attach) -> None:
    """As after a change of controller: the new one cannot know whom the old one's confirmation reached."""
    rank = Rank(attach)
    rank.begins(0)
    for message in (StopAt(2), StopConfirmed(2), StopAt(2)):
        rank.peer.tell(message)
    assert rank.peer.hear(StopAck).target == rank.peer.hear(StopAck).target == 2
    rank.finish(10)
    while rank.peer.hear(StepDone).step < 2:
        pass
    rank.peer.tell(StopAt(3))
    assert rank.peer.hear(StopAck) == StopAck(target=3, accepted=True, step=2)
    rank.peer.tell(StopConfirmed(3))
    assert rank.peer.hear(Stopped) == Stopped(3)


def test_a_proposal_before_the_loop_is_answered_when_it_begins(attach: Attach) -> None:
    rank = Rank(attach, loop=False)
    heard = threading.Event()
    assert rank.run._link is not None
    rank.run._link.subscribe(StopAt, lambda message: heard.set())
    rank.peer.tell(StopAt(2))
    assert heard.wait(PATIENCE_S)
    rank.start()
    assert rank.peer.hear(StopAck) == StopAck(target=2, accepted=True, step=0)
    rank.peer.tell(StopConfirmed(2))
    rank.finish(2)
    assert rank.peer.hear(Stopped) == Stopped(2)


def test_training_that_ends_before_the_target_is_finished(attach: Attach) -> None:
    rank = Rank(attach, total=3)
    rank.begins(0)
    rank.peer.tell(StopAt(3))
    assert rank.peer.hear(StopAck).accepted
    rank.finish(3)
    assert rank.peer.hear(Finished) == Finished(3)
    assert rank.join() == "complete"


def test_when_the_agent_vanishes_a_waiting_rank_goes_on(attach: Attach) -> None:
    rank = Rank(attach, total=4)
    rank.begins(0)
    rank.peer.tell(StopAt(1))
    rank.peer.hear(StopAck)
    rank.finish(4)
    assert rank.peer.hear(StepDone).step == 1
    rank.peer.vanish()
    assert rank.join() == "complete"


def test_a_stop_that_is_never_confirmed_holds_training_up_only_so_long() -> None:
    acks: list[StopAck] = []
    stop = AgreedStop(acks.append, patience_s=0.01)
    assert stop.at_boundary(0) is False
    stop.on_stop_at(StopAt(1))
    assert stop.at_boundary(1) is False
    stop.on_stop_confirmed(StopConfirmed(1))  # late: the others may stop, but step 2 has begun here
    assert stop.at_boundary(2) is False
    assert acks == [StopAck(target=1, accepted=True, step=1)]


def test_a_loop_of_your_own(attach: Attach) -> None:
    rank = Rank(attach, loop=False)
    assert rank.run.step_done(1) is False
    rank.peer.tell(StopAt(2))
    assert rank.peer.hear(StopAck) == StopAck(target=2, accepted=True, step=2)
    rank.peer.tell(StopConfirmed(2))
    assert rank.run.step_done(2) is True
    rank.run.finish(2)
    assert rank.peer.hear(Stopped) == Stopped(2)


class Pair:
    """Two ranks in lockstep, as a collective holds them, and the controller's own agreement."""

    def __init__(self, attach: Attach) -> None:
        self.barrier = threading.Barrier(2)
        self.stopped: dict[int, int] = {}
        self.runs, self.peers = zip(attach(0), attach(1), strict=True)

    def train(self, rank: int) -> None:
        done = 0
        try:
            for step in self.runs[rank].steps(0, 1_000_000):
                self.barrier.wait(PATIENCE_S)
                done = step + 1
        except SystemExit:
            self.stopped[rank] = done

    def negotiate(self, known_step: int) -> int:
        agreement = StopAgreement()
        agreement.propose(["0", "1"], known_step)
        outcome = "repropose"
        while outcome != "confirm":
            target = agreement.target
            for peer in self.peers:
                peer.tell(StopAt(target))
            for rank, peer in enumerate(self.peers):
                ack = peer.hear(StopAck)
                while ack.target != target:
                    ack = peer.hear(StopAck)
                outcome = agreement.answer(str(rank), ack.target, ack.accepted, ack.step, 1)
                if outcome == "repropose":
                    break
        for peer in self.peers:
            peer.tell(StopConfirmed(agreement.target))
        return agreement.target


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_run_freely_stop_at_the_same_step(attach: Attach, seed: int) -> None:
    """The controller knows an old step, so its first proposals are mostly declined, by one rank or by both."""
    pair = Pair(attach)
    threads = [threading.Thread(target=pair.train, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    known = random.Random(seed).randint(0, 40)
    while pair.peers[seed % 2].hear(StepDone).step < known:
        pass
    target = pair.negotiate(known)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert pair.stopped == {0: target, 1: target}
    assert [peer.hear(Stopped).step for peer in pair.peers] == [target, target]


SCRIPT = """
import atexit, sys
from resilio_hpc import train

atexit.register(lambda: print("exit handler"))
assert "torch" not in sys.modules, "attaching must not cost the import of torch"
run = train.attach()
assert train.attach() is run
try:
    for step in run.steps(0, 1000, save=lambda step: print("save", step)):
        if step == 1:
            print("begun", flush=True)
            sys.stdin.readline()
finally:
    print("finally")
print("not reached")
"""


def test_a_process_that_stops_runs_its_clean_up_and_exits_with_0(agent: StrictAgent) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **agent.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    peer = agent.accept()
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    peer.tell(StopAt(3))
    assert peer.hear(StopAck).accepted
    peer.tell(StopConfirmed(3))
    out, _ = process.communicate("go\n", timeout=PATIENCE_S)
    assert peer.hear(Stopped) == Stopped(3)
    peer.hear_end()
    assert process.returncode == 0
    assert out.split("\n") == ["save 3", "finally", "exit handler", ""]


def test_sections_are_told_and_the_outer_one_is_again_when_an_inner_one_ends(attach: Attach) -> None:
    run, peer = attach(0)
    with run.section("evaluation"), run.section("upload"):
        pass
    with pytest.raises(ValueError, match="of the script"), run.section("setup"):
        raise ValueError("of the script")
    assert [peer.hear(Section).name for _ in range(6)] == ["evaluation", "upload", "evaluation", "", "setup", ""]


def test_saves_are_sections_and_the_last_one_is_another(attach: Attach) -> None:
    run, peer = attach(0)
    for _ in run.steps(0, 3, save=lambda step: None, every=2):
        pass
    assert [peer.hear(Section).name for _ in range(4)] == ["checkpoint", "", "last checkpoint", ""]
    assert peer.hear(Finished) == Finished(3)


def test_without_a_launcher_a_section_is_nothing() -> None:
    with run_module._attach({}).section("evaluation"):
        pass
