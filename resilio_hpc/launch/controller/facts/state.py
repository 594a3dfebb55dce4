"""What the controller is given at its start, what it knows of each node, and its actions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct, field

from resilio_hpc.core.compat import StrEnum
from resilio_hpc.diagnose.cascade.clocks import ClockBounds
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.config.correctness_options import OnCorruption
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.config.planned_layouts import LayoutPlan
from resilio_hpc.launch.config.rank_layout import role_of
from resilio_hpc.launch.config.reentry_options import RestartPolicy
from resilio_hpc.launch.config.slow_options import SlowRanks
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER
from resilio_hpc.launch.rundir import limit_files
from resilio_hpc.launch.rundir.limit_files import KeptLimits, LimitOrder

# without a failure for so long, earlier restarts count no more, where no step is ever durable
FORGIVEN_AFTER_S = 3600.0
MAX_LOSSES = 3  # a node that was lost more often than this is not used again


class Phase(StrEnum):
    """The controller's phase. Its values are in status.json and in the ledger."""

    GATHERING = "gathering"  # a round is not possible yet, or not wanted
    PREPARING = "preparing"  # old ranks stop, the store opens
    STARTING = "starting"  # ranks start, restore, and do their first step
    RUNNING = "running"  # all ranks train, or run where steps are not reported
    ENDED = "ended"  # there is a verdict


WITH_RANKS = (Phase.STARTING, Phase.RUNNING)
_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.PREPARING}),
    Phase.PREPARING: frozenset({Phase.GATHERING, Phase.STARTING}),
    Phase.STARTING: frozenset({Phase.GATHERING, Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.GATHERING, Phase.RUNNING}),
    Phase.ENDED: frozenset(),
}


def check_transition(before: Phase, after: Phase) -> None:
    """Raise AssertionError for a change of phase that the controller has no rule for.

    Every phase may end, also twice: a verdict may come from the run directory, too.
    """
    assert after is Phase.ENDED or after in _NEXT[before], f"the controller went from {before} to {after}"


def one_role(gpu: str, rank: int, world_size: int) -> int:
    """Return the role of a rank where all do equal work."""
    return 0


class ControllerConfig(Struct, frozen=True):
    """The user's options, as far as decisions need them. Times in seconds."""

    shape: NodeCounts
    expected: tuple[str, ...]  # nodes of the allocation in their order
    heartbeat_timeout_s: float = 5.0
    join_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    max_without_progress: int = 3
    chained: bool = False
    stop_grace_s: float = 30.0
    end_time: float | None = None  # Unix seconds at which Slurm ends the job, where known
    save_margin_s: float = 10.0
    forgiven_after_s: float = FORGIVEN_AFTER_S
    logs: str = ""  # where the ranks' logs are
    hang_timeout_s: float | None = None  # None: learned; 0: a hang is reported, and no rank is restarted
    program: str = ""  # what is run, in short: limits are learned for one program
    test_replacements: bool = False  # a node that takes another one's place is tested before ranks start there
    test_s: float = 60.0  # that a test of the nodes may take while ranks pause
    slow_ranks: SlowRanks = "observe"  # what follows from slow ranks
    on_corruption: OnCorruption = "report"  # what follows from replicas that differ
    roles: Callable[[str, int, int], int] = one_role  # type of GPU, rank, world size → ranks of equal work
    plan: LayoutPlan = LayoutPlan()  # of --layout auto
    local_disks: bool = False  # nodes keep committed steps on disks of their own
    replica_copies: bool = False  # agents copy what other nodes do not have, where there are replicas
    restart_policy: RestartPolicy = "in-process"
    mode: Mode = Mode.RECOVER  # "observe" and "checkpoint" decide the same, but restart nothing


def controller_config(settings: AgentSettings, clock_ahead_s: float = 0.0) -> ControllerConfig:
    """Return what decisions need of an agent's settings, with times by this node's clock."""
    options = settings.options
    return ControllerConfig(
        shape=NodeCounts(options.min_nodes, options.max_nodes, options.node_unit),
        expected=() if settings.join else settings.expected,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        join_timeout_s=options.join_timeout_s,
        start_timeout_s=options.start_timeout_s,
        max_without_progress=options.max_restarts,
        chained=settings.chained,
        stop_grace_s=options.stop_grace_s,
        end_time=None if settings.end_time is None else settings.end_time + clock_ahead_s,
        logs=str(options.logs_directory),
        hang_timeout_s=options.hangs.timeout_s,
        program=hashlib.sha256(repr(options.program).encode()).hexdigest()[:16],
        slow_ranks=options.slow.slow_ranks,
        on_corruption=options.correctness.on_corruption,
        roles=partial(role_of, options),
        plan=options.planning.plan,
        restart_policy=options.reentry.restart_policy,
        mode=options.mode,
        local_disks=bool(options.checkpoints.local_checkpoints),
        replica_copies=not options.checkpoints.partner_copies,
        test_replacements=options.check_nodes != "never",
    )


class Clock(Struct, frozen=True):
    """Two clocks: ``monotonic`` for intervals and limits, ``unix`` for what is written down."""

    monotonic: Callable[[], float]
    unix: Callable[[], float]


class Send(Struct, frozen=True):
    """Action: send a message to one agent."""

    node: str
    message: m.ToAgent


class Record(Struct, frozen=True):
    """Action: write an event to the ledger."""

    kind: str
    fields: dict[str, Any]


class Finish(Struct, frozen=True):
    """Action: write the verdict durably, then call ``Controller.verdict_written``."""

    verdict: str
    exit_code: int
    reason: str
    fields: dict[str, Any]


class QueryHistory(Struct, frozen=True):
    """Action: ask the run directory what it knows; the answer goes to ``Controller.inform``."""


class RecordEpoch(Struct, frozen=True):
    """Action: create the epoch's file, then call ``Controller.epoch_recorded``; step down if another node holds it."""


class ClaimWitness(Struct, frozen=True):
    """Action: create the witness unless it exists, then call ``Controller.witness_claimed`` with its holder."""

    witness: str


class KeepLimits(Struct, frozen=True):
    """Action: write the limits to the run directory, where the next controller finds them."""

    limits: KeptLimits


class StepDown(Struct, frozen=True):
    """Action: end this controller; it had no quorum since ``since`` (monotonic seconds).

    ``outvoted``: the other half of the nodes holds the witness.
    """

    since: float
    reason: str
    outvoted: bool = False


class StartTest(Struct, frozen=True):
    """Action: start probers on these nodes, for a test of at most ``test_s`` → ``NodeTests.ready``.

    Where there will be no result → ``NodeTests.tested``. ``start_s``: for the probers to start, where no rank
    runs: then the nodes' health checks are part of the test.
    """

    number: int
    nodes: tuple[str, ...]
    test_s: float
    start_s: float | None = None


class RunTest(Struct, frozen=True):
    """Action: let the probers work; the result → ``NodeTests.tested``."""

    number: int


class EndTest(Struct, frozen=True):
    """Action: end the probers on these nodes, and their coordinator."""

    epoch: int
    number: int
    nodes: tuple[str, ...]


TestAction = StartTest | RunTest | EndTest
Action = Send | Record | Finish | QueryHistory | RecordEpoch | ClaimWitness | KeepLimits | StepDown | TestAction


class RunHistory(Struct, frozen=True):
    """What the run directory holds. ``last_round``: the highest that left traces; ``verdict``: this job's, if any.

    ``limits``: as an earlier controller had them; ``order``: the user's.
    """

    committed: tuple[int, ...] = ()
    last_round: int = -1
    verdict: tuple[str, int] | None = None  # (name, exit code)
    limits: KeptLimits = field(default_factory=KeptLimits)
    order: LimitOrder = field(default_factory=LimitOrder)

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> RunHistory:
        """Return it from what the I/O worker has answered."""
        verdict = None if reply["verdict"] is None else (reply["verdict"][0], reply["verdict"][1])
        return cls(
            tuple(reply["steps"]), reply["last_round"], verdict,
            limit_files.parse(reply.get("limits"), KeptLimits), limit_files.parse(reply.get("limit_order"), LimitOrder),
        )  # fmt: skip


class KnownAgent(Struct):
    """What the controller knows of one node.

    ``heard``: when a message came; ``answered``: when one other than Hello came, which proves that the node hears the
    controller. Monotonic seconds.
    """

    hello: m.Hello
    heard: float
    answered: float
    answers: bool = False  # it has answered at least once
    stopped_round: int = -1
    known: m.Life = m.NO_LIFE  # the newest life whose start it knows
    held: tuple[m.Held, ...] = ()
    first_step: m.FirstStep | None = None
    done: m.RanksDone | None = None
    started: bool = False
    round: int = -1  # the round of the ranks in its last Heartbeat
    step: int = -1
    step_time: float = 0.0
    sent: float | None = None  # when it sent its newest Heartbeat, on its clock
    echoes: int = 0  # its ranks of the round before whose error reads like an echo of another one's end
    echo: float = NEVER  # when the newest Beat that it is known to have got was sent, on the controller's clock
    ready: bool = False  # as its last Heartbeat said
    copy_port: int = 0  # as its last Heartbeat said
    finishing: bool = False  # as its last Heartbeat of this round said
    calls: int = -1  # as its last Heartbeat of this round said
    section: str = ""  # as its last Heartbeat of this round said
    memory_level: int = 0  # as its last Heartbeat said
    memory: str = ""  # as its last Heartbeat said
    leaves_at: float | None = None  # when its own job ends, on the controller's clock
    clock: ClockBounds = field(default_factory=ClockBounds)  # how far its Unix clock is ahead

    def last_contact(self, patience_s: float) -> float:
        """Return when the node was last heard. Hellos alone count for ``patience_s`` at most."""
        return min(self.heard, self.answered + patience_s)

    def forget_round(self) -> None:
        """Forget the node's part in the round: a new one is prepared."""
        self.first_step = self.done = None
        self.started = False
        self.round = self.step = self.calls = -1
        self.finishing = False
        self.section = ""
