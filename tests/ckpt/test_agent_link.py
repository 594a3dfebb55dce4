"""The rank's side of the link, against a real socket and real rank processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt.coordination import agent_link
from resilio_hpc.ckpt.coordination.agent_coordinator import EXIT_RESTORE_FAILED, parse_restore_point
from resilio_hpc.ckpt.coordination.agent_link import AgentLink
from resilio_hpc.ckpt.coordination.coordinator import Place, RestorePoint
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Commit, Committed, Persist, Persisted
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import rank_link
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.tiers import Stage, Tier

PLACE = Place(0, 0, 1, 1, 4, "run")


class Agent:
    """The agent's end: listens, takes one rank's connection, decodes what it says."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "agent.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.listener.settimeout(30)
        self.link: socket.socket | None = None
        self.arenas = directory / "arenas"
        self.arenas.mkdir(mode=0o700)
        self.checkpoints = directory / "checkpoints"

    def accept(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = self.listener.accept()[0]
        self.link.settimeout(30)

    def hear(self) -> rank_link.RankMessage:
        assert self.link is not None
        return rank_link.to_agent.decode(self.link.recv(rank_link.MAX_BYTES))

    def tell(self, message: rank_link.AgentMessage) -> None:
        assert self.link is not None
        self.link.send(rank_link.to_rank.encode(message))

    def close(self) -> None:
        self.listener.close()
        if self.link is not None:
            self.link.close()

    def rank(self, code: str, restore: str = "", round_: int = 0) -> subprocess.Popen[str]:
        """A rank process under this agent."""
        environment = {
            **os.environ,
            "RESILIO_AGENT_SOCKET": str(self.path),
            "RESILIO_ARENA_DIR": str(self.arenas),
            "RESILIO_CHECKPOINT_DIR": str(self.checkpoints),
            "RESILIO_RESTORE": restore,
            "RESILIO_ROUND": str(round_),
            "RANK": "0",
            "WORLD_SIZE": "1",
        }
        argv = [sys.executable, "-c", textwrap.dedent(code)]
        return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def agent() -> Iterator[Agent]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        found = Agent(Path(name))
        yield found
        found.close()


def connected(agent: Agent) -> AgentLink:
    client = rank_link.connect({"RESILIO_AGENT_SOCKET": str(agent.path)})
    assert client is not None
    link = AgentLink(client, PLACE)
    agent.accept()
    assert agent.hear() == rank_link.Attach(0, 0, 4, os.getpid())
    return link


SAVE_AND_WAIT = """
    import numpy as np
    from resilio_hpc import ckpt
    saver = ckpt.Checkpointer()
    assert saver.restore() is None
    handle = saver.save(5, {"x": np.arange(1000), "step": 5})
    handle.wait("memory")
    handle.wait("committed", timeout_s=30)
    print(handle.stage)
"""

RESTORE = """
    import numpy as np
    from resilio_hpc import ckpt
    step, state = ckpt.Checkpointer().restore({"x": np.zeros(1000, dtype=np.int64), "step": 0})
    assert (state["x"] == np.arange(1000)).all() and state["step"] == step
    print(step)
"""


def persist_and_commit(agent: Agent, step: int) -> None:
    """What agent and saver do between SnapshotTaken and Stage."""
    pin = arena.pin(agent.arenas, step)
    assert pin is not None
    persisted = saver.serve(Persist(step, 1, 0, 1, 0, [str(path) for path in pin.paths], str(agent.checkpoints)))
    pin.release()
    assert isinstance(persisted, Persisted)
    assert isinstance(saver.serve(Commit(step, 1, 0, 1, str(agent.checkpoints), [persisted.record])), Committed)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    return out.strip()


def save_step_5(agent: Agent) -> None:
    process = agent.rank(SAVE_AND_WAIT)
    agent.accept()
    assert agent.hear() == rank_link.Attach(0, 0, 0, process.pid)
    fresh = agent.hear()
    assert isinstance(fresh, rank_link.Restored)
    assert fresh.step == -1
    taken = agent.hear()
    assert isinstance(taken, rank_link.SnapshotTaken)
    assert (taken.step, taken.arena) == (5, str(agent.arenas / "rank0.slot0"))
    persist_and_commit(agent, 5)
    agent.tell(rank_link.SaveProgress(5, Stage.COMMITTED))
    assert finish(process) == "committed"


@pytest.mark.parametrize("source", ["memory", "committed"])
def test_a_rank_saves_and_the_next_life_restores_from_the_copy_that_it_is_told(source: str, agent: Agent) -> None:
    save_step_5(agent)
    process = agent.rank(RESTORE, f"{source}:5", round_=1)
    agent.accept()
    agent.hear()
    restored = agent.hear()
    assert isinstance(restored, rank_link.Restored)
    assert (restored.step, restored.source) == (5, source)
    assert finish(process) == "5"


BUILD_AND_RESTORE = """
    import time
    import numpy as np
    from resilio_hpc import ckpt
    checkpoint = ckpt.Checkpointer()
    while not any(slot.present_bytes for slot in checkpoint._arenas.open()._slots):
        time.sleep(0.01)  # the model is built
    step, state = checkpoint.restore({"x": np.zeros(1000, dtype=np.int64), "step": 0})
    assert (state["x"] == np.arange(1000)).all() and state["step"] == step
    print(step)
"""


def test_what_will_be_restored_from_memory_is_mapped_meanwhile(agent: Agent) -> None:
    save_step_5(agent)
    assert finish(agent.rank(BUILD_AND_RESTORE, "memory:5", round_=1)) == "5"


def test_a_bad_copy_in_memory_is_reported_and_dropped_and_the_rank_leaves_with_its_code(agent: Agent) -> None:
    save_step_5(agent)
    with (agent.arenas / "rank0.slot0").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    process = agent.rank(RESTORE, "memory:5", round_=1)
    agent.accept()
    agent.hear()
    failed = agent.hear()
    assert isinstance(failed, rank_link.RestoreFailed)
    assert (failed.step, failed.source) == (5, "memory")
    assert "tensor x does not match its checksum" in failed.error
    finish(process, EXIT_RESTORE_FAILED)
    assert arena.scan(agent.arenas) == []


def test_a_copy_that_is_not_there_is_reported(agent: Agent) -> None:
    process = agent.rank(RESTORE, "committed:7")
    agent.accept()
    agent.hear()
    failed = agent.hear()
    assert isinstance(failed, rank_link.RestoreFailed)
    assert "step 7 is not in" in failed.error
    finish(process, EXIT_RESTORE_FAILED)


def test_where_all_steps_are_damaged_a_run_does_not_begin_anew(agent: Agent) -> None:
    save_step_5(agent)
    shard = agent.checkpoints / "step-0000000005" / "node-0.h5"
    os.truncate(shard, 1000)
    process = agent.rank("from resilio_hpc import ckpt; ckpt.Checkpointer().restore()", "", round_=1)
    agent.accept()
    agent.hear()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "damaged; step 5: node-0.h5: missing, or not as large as it was written (to begin anew, remove them)" in err


def test_when_the_agent_is_gone_waiting_ends_with_an_error(agent: Agent) -> None:
    process = agent.rank(SAVE_AND_WAIT)
    agent.accept()
    for _ in range(3):
        agent.hear()
    agent.close()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the agent of this node is gone" in err


def test_a_newer_commit_supersedes_older_saves_and_failures_are_told(agent: Agent) -> None:
    process = agent.rank(
        """
        import numpy as np
        from resilio_hpc import ckpt
        from resilio_hpc.core.errors import CheckpointError
        saver = ckpt.Checkpointer()
        first, second, third = (saver.save(step, {"x": np.ones(3)}) for step in (1, 2, 3))
        second.wait(timeout_s=30)
        for handle in (first, third):
            try:
                handle.wait(timeout_s=30)
            except CheckpointError as error:
                print(error)
        """
    )
    agent.accept()
    for _ in range(4):
        agent.hear()
    agent.tell(rank_link.SaveProgress(2, Stage.COMMITTED))
    agent.tell(rank_link.SaveProgress(3, Stage.FAILED, "disk on fire"))
    out = finish(process)
    assert "superseded by step 2" in out
    assert "disk on fire" in out


def test_steps_are_reported_at_most_twenty_times_a_second_until_a_stop_is_pending(agent: Agent) -> None:
    link = connected(agent)
    for step in range(1, 200):
        link.step_done(step)
    link.send(rank_link.Finished(199))
    reported = []
    while not isinstance(message := agent.hear(), rank_link.Finished):
        assert isinstance(message, rank_link.StepDone)
        reported.append(message.step)
    assert reported[0] == 1
    assert len(reported) < 20

    heard = threading.Event()
    link.subscribe(rank_link.StopAt, lambda message: heard.set())
    agent.tell(rank_link.StopAt(300))
    assert heard.wait(10)
    for step in range(200, 210):
        link.step_done(step)
        message = agent.hear()
        assert isinstance(message, rank_link.StepDone)
        assert message.step == step


def test_a_forked_worker_says_nothing_on_its_parents_link(agent: Agent) -> None:
    link = connected(agent)
    pid = os.fork()
    if pid == 0:
        link.send(rank_link.Finished(1))
        os._exit(0 if not link.usable else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    link.send(rank_link.Finished(2))
    assert agent.hear() == rank_link.Finished(2)


def test_the_agents_end_is_survived_quietly_and_told_once(agent: Agent) -> None:
    link = connected(agent)
    ended = []
    closed = threading.Event()
    link.on_close(lambda: (ended.append(1), closed.set())[0])
    agent.close()
    assert closed.wait(10)
    link.send(rank_link.Finished(1))
    assert ended == [1]
    assert not link.usable


def test_nonsense_from_the_agent_is_ignored(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    link = connected(agent)
    heard = threading.Event()
    link.subscribe(rank_link.SaveProgress, lambda message: heard.set())
    assert agent.link is not None
    agent.link.send(b"nonsense")
    agent.tell(rank_link.SaveProgress(1, Stage.COMMITTED))
    assert heard.wait(10)
    assert "ignored a message" in capfd.readouterr().err


def test_without_a_launcher_there_is_no_link() -> None:
    assert rank_link.connect({}) is None
    assert agent_link.current({"RESILIO_AGENT_SOCKET": "/nowhere/agent.sock"}) is None


def test_restore_points_are_read_strictly() -> None:
    assert parse_restore_point("") is None
    assert parse_restore_point("memory:12") == RestorePoint(Tier.MEMORY, 12)
    assert parse_restore_point("arriving:12") == RestorePoint(Tier.MEMORY, 12)
    assert parse_restore_point("committed:0") == RestorePoint(Tier.COMMITTED, 0)
    for text in ("memory", "memory:", "memory:-1", "disk:3", "memory:1:2"):
        with pytest.raises(UsageError, match="RESILIO_RESTORE"):
            parse_restore_point(text)


def test_a_rank_killed_while_its_snapshot_is_written_out_does_no_harm(agent: Agent) -> None:
    process = agent.rank(SAVE_AND_WAIT)
    agent.accept()
    for _ in range(3):
        agent.hear()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    persist_and_commit(agent, 5)
    again = agent.rank(RESTORE, "committed:5", round_=1)
    agent.accept()
    assert finish(again) == "5"


def bring(agent: Agent, step: int, size: int) -> None:
    """What a replicator does for a rank that has come to this node."""
    pair = ArenaPair(agent.arenas, Owner(0, 0, 1, 1, 0, "own", "run"), agent.directory / "spill")
    Snapshot(pair, step, flatten({"x": np.arange(size), "step": step}), ThreadPoolExecutor(1)).finish()


def test_a_rank_initialises_while_its_snapshot_comes_and_restores_it_when_it_is_whole(agent: Agent) -> None:
    process = agent.rank(RESTORE, "arriving:5")
    agent.accept()
    assert isinstance(agent.hear(), rank_link.Attach)
    assert agent.link is not None
    bring(agent, 4, 10)  # of a former life of this node
    assert not select.select([agent.link], [], [], 1.0)[0]
    assert process.poll() is None
    bring(agent, 5, 1000)
    restored = agent.hear()
    assert isinstance(restored, rank_link.Restored)
    assert (restored.step, restored.source) == (5, "memory")
    assert finish(process) == "5"


def test_a_rank_that_waits_for_a_snapshot_ends_with_its_agent(agent: Agent) -> None:
    process = agent.rank(RESTORE, "arriving:5")
    agent.accept()
    assert isinstance(agent.hear(), rank_link.Attach)
    assert agent.link is not None
    agent.link.close()
    finish(process, EXIT_RESTORE_FAILED)


SAVE_AND_RESTORE = """
    import numpy as np
    from resilio_hpc import ckpt
    checkpoint = ckpt.Checkpointer()
    assert checkpoint.restore() is None
    checkpoint.save(5, {"x": np.arange(1000)})
    step, state = checkpoint.restore()
    print(step, int(state["x"].sum()))
"""


def test_a_restore_after_saves_waits_for_them_and_takes_the_newest(agent: Agent) -> None:
    process = agent.rank(SAVE_AND_RESTORE)
    agent.accept()
    said = [agent.hear() for _ in range(3)]
    assert isinstance(said[-1], rank_link.SnapshotTaken)
    persist_and_commit(agent, 5)
    agent.tell(rank_link.SaveProgress(5, Stage.COMMITTED))
    assert finish(process) == "5 499500"
