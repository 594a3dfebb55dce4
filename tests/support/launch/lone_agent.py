"""An agent's succession alone, with ports that note what it does; for tests of who leads."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilio_hpc.launch.consensus.follower import Succession
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import Membership, first_membership
from resilio_hpc.launch.protocol.node_list import NodeEntry, NodeList
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord

LIMIT_S = 5.0
ABC = ("a", "b", "c")


def with_voters(*names: str) -> Membership:
    return Membership(1, 1, NodeList.of([NodeEntry(name, name, 1) for name in names]))


@dataclass
class Ports:
    """What the succession wants done, in words; anything else is an AttributeError."""

    now: float = 0.0
    done: list[object] = field(default_factory=list)
    kept: list[VoteRecord] = field(default_factory=list)

    def take(self) -> list[object]:
        done, self.done = self.done, []
        return done

    @property
    def files(self) -> Ports:
        """Implements ``ElectionFiles``, too."""
        return self

    def monotonic(self) -> float:
        return self.now

    def to_controller(self, message: m.ToController) -> None:
        self.done.append(message)

    def to_caller(self, node: str, message: m.ToAgent) -> None:
        self.done.append((node, message))

    def contact(self, node: str, endpoint: str) -> None:
        self.done.append(f"contact {node} at {endpoint}")

    def scan_epochs(self) -> None:
        self.done.append("scan")

    def claim_epoch(self, epoch: int) -> None:
        self.done.append(f"claim {epoch}")

    def claim_witness(self, witness: str) -> None:
        self.done.append(f"witness {witness}")

    def abandon(self, epoch: int, reason: str) -> None:
        raise AssertionError("the succession never gives a job up")

    def keep_vote_record(self, vote_record: VoteRecord) -> None:
        self.kept.append(vote_record)

    def follow(self, record: EpochRecord, connected: bool) -> None:
        self.done.append(f"follow {record.node} {record.epoch}{' connected' if connected else ''}")

    def lead(self, term: Term) -> None:
        self.done.append(term)

    def step_down(self, reason: str) -> None:
        self.done.append(f"step down: {reason}")


def agent(
    node: str, membership: Membership | None = None, promised: int = 0, begins: int = 0
) -> tuple[Succession, Ports]:
    ports = Ports()
    vote_record = VoteRecord(membership or first_membership(ABC), promised, "z" if promised else "")
    return Succession(node, "job", f"{node}:1", vote_record, LIMIT_S, ports, ports, begins), ports


def follower(node: str, of: str, names: tuple[str, ...] = ABC) -> tuple[Succession, Ports]:
    """It follows the controller of epoch 1, which has set the voters."""
    one, ports = agent(node)
    one.tick(0.0)
    one.scanned(EpochRecord(1, of, f"{of}:1", "job"), 1, 0.0)
    one.heard(1, 0.1)
    one.state.update_voters(with_voters(*names))
    ports.now = 1.0
    one.heard(1, 1.0)
    ports.take()
    return one, ports


def leaderless(node: str, newest: int = 1, names: tuple[str, ...] = ABC) -> m.NoLeader:
    return m.NoLeader(node, newest, with_voters(*names), 1.0)


def words(ports: Ports) -> list[object]:
    """What was done, without looks at the run directory."""
    return [done for done in ports.take() if done != "scan"]
