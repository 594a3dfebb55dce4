"""The options of one run: the command line after parsing, in the form that agents get."""

from __future__ import annotations

import operator
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from resilio_hpc.launch.config.checkpoint_options import CheckpointOptions
from resilio_hpc.launch.config.correctness_options import CorrectnessOptions
from resilio_hpc.launch.config.device_options import DeviceOptions
from resilio_hpc.launch.config.environment_options import EnvironmentOptions
from resilio_hpc.launch.config.flags import (
    comma_separated,
    failures_flag,
    number,
    program_flag,
    run_flag,
    torchrun_flag,
    whole_number,
    world_flag,
)  # fmt: skip
from resilio_hpc.launch.config.hang_options import HangOptions
from resilio_hpc.launch.config.metrics_options import MetricsOptions
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.config.output_options import OutputOptions
from resilio_hpc.launch.config.planned_layouts import PlanningOptions
from resilio_hpc.launch.config.reentry_options import ReentryOptions
from resilio_hpc.launch.config.resize_options import ResizeOptions
from resilio_hpc.launch.config.slow_options import SlowOptions

ProgramKind = Literal["script", "module", "command"]
CpuBind = Literal["none", "ranks"]
Echoes = Literal["fold", "show"]
CheckNodes = Literal["never", "start", "restart"]

DEFAULT_MAX_RESTARTS = 3
DEFAULT_CHAIN_MAX = 20
DEFAULT_HEARTBEAT_TIMEOUT_S = 5.0
DEFAULT_START_TIMEOUT_S = 300.0
DEFAULT_STOP_GRACE_S = 10.0  # Slurm kills 30 s (KillWait) after SIGTERM; the verdict must be written before that
DEFAULT_FAILURE_GRACE_S = 2.0  # a restart waits for it, where a rank handles SIGTERM
DEFAULT_JOIN_TIMEOUT_S = 600.0
DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class LaunchOptions:
    """A validated launch. Times are seconds; paths are absolute; a field is never None where a default exists.

    A field that is a flag says all of it: names, help, bounds, default. So do those of the options that it holds. Where
    ``reads`` is None, its value needs more than the flag (``launch/cli/option_values``). Flags that are no field are in
    ``launch/cli/option_table``.

    ``max_restarts`` counts only restarts **without progress**: one that follows a newly durable step resets the
    count (torchrun counts every restart, and allows none by default).
    """

    # what to run
    script: str  # path of a script, name of a module, or a command, as ``kind`` says
    kind: ProgramKind
    run_dir: str = run_flag(
        "ledger, logs and checkpoints (default: resilio-runs/<job id or time>, or the next free <job id>-N)",
        MISSING,
        raw=None,
        reads=None,
        metavar="DIR",
    )
    script_args: tuple[str, ...] = ()
    launch: int = 1  # of those of this run of the job in this run directory (launch/chain/run_choice.py)

    # the world
    min_nodes: int = 1
    max_nodes: int = 1
    # "8", "auto", "gpu", "cpu", "xpu": each agent resolves it on its own node
    nproc_per_node: str = world_flag(
        "ranks per node; gpu, auto: one per GPU; cpu, or auto without a GPU: one per usable CPU (default: 1)",
        "1",
        reads=None,
        metavar="N|auto|gpu|cpu|xpu",
        pet=True,
    )
    spares: int = world_flag(
        "nodes kept warm to replace a lost one (default: 0)", 0, whole_number, metavar="K", least=0
    )
    node_unit: int = world_flag(
        "train with a multiple of N nodes only (default: 1)", 1, whole_number, metavar="N", least=1
    )
    layouts: tuple[str, ...] = world_flag(  # see launch/config/rank_layout.py
        "tensor and pipeline parallel of the script, for RESILIO_TP, RESILIO_PP and RESILIO_DP of its ranks: tp=8,pp=2 "
        "or, for 16 ranks, 16:tp=8; auto: the planner chooses, for each number of ranks; may be given several times",
        (),
        reads=tuple,
        metavar="[RANKS:]tp=N,pp=N|auto",
        repeatable=True,
        names="--layout",
    )
    fill_arguments: bool = world_flag(
        "replace {tp}, {pp}, {dp}, {world_size}, {nodes} and {ranks_per_node} in the script's arguments, again in each "
        "round; {{tp}} stays {tp}",
        False,
        None,
    )
    planning: PlanningOptions = field(default_factory=PlanningOptions)
    standalone: bool = world_flag("use this machine only, even inside an allocation", False, None, reads=None, pet=True)
    local_nodes: int = 0  # > 0: no Slurm; this machine plays that many nodes (drills and tests)
    role: str = world_flag("ROLE_NAME of the ranks", "default", metavar="NAME", pet=True)
    virtual_local_rank: bool = world_flag(
        "LOCAL_RANK=0 for every rank, which sees only its own GPU", False, None, pet=True
    )
    cpu_bind: CpuBind = world_flag(
        "ranks: each rank gets its share of the node's CPUs", "none", choices=get_args(CpuBind)
    )

    # starting ranks
    zygote: bool = program_flag(
        "start each rank as a new interpreter instead of forking one with torch loaded",
        True,
        None,
        raw=False,
        reads=operator.not_,
        names="--no-zygote",
    )
    # whether ranks may use it: it is imported before the fork, and the agents hold the rendezvous store
    torch: bool = program_flag(
        "the ranks do not use torch (JAX, mpi4py, numpy): nothing of it is imported for them, and MASTER_PORT is "
        "a free port that rank 0 may listen on",
        True,
        None,
        raw=False,
        reads=operator.not_,
        names="--no-torch",
    )
    stdin_rank: int = program_flag(
        "give the launcher's standard input, read to its end before, to this rank in every round (default: all ranks "
        "find it empty)",
        -1,  # none
        whole_number,
        raw=None,
        reads=lambda rank: -1 if rank is None else rank,
        metavar="RANK",
        least=0,
        names="--stdin",
    )
    preload: tuple[str, ...] = program_flag(
        "import these too before the ranks are forked",
        (),
        comma_separated,
        raw=[],
        reads=lambda names: tuple(name.strip() for name in names if name.strip()),
        metavar="MODULES",
    )
    mpi: str = program_flag(  # "": ranks start without a PMI; else each round's ranks are one step with that PMI
        "start the ranks through srun --mpi=TYPE, so that MPI programs find their PMI (see srun --mpi=list)",
        "",
        raw="none",
        reads=None,
        metavar="pmix|pmi2|…",
    )

    # failures
    mode: Mode = failures_flag(  # docs/adoption.md
        "how far to go: observe writes down what would be done and does nothing; checkpoint also saves, restores and "
        "chains; recover also restarts after failures (default: recover)",
        Mode.RECOVER,
        raw=Mode.RECOVER.value,
        reads=Mode,
        choices=tuple(mode.value for mode in Mode),
    )
    check_nodes: CheckNodes = failures_flag(
        "pair the nodes and leave out bad and slow ones before ranks start: start, in each job; restart, in jobs that "
        "go on where another one stopped (default: never)",
        "never",
        choices=get_args(CheckNodes),
    )
    max_restarts: int = failures_flag(
        "restarts without progress before giving up: one that follows a newly durable step starts the count again "
        "(default: 3; torchrun counts every restart, default 0)",
        DEFAULT_MAX_RESTARTS,
        whole_number,
        metavar="N",
        pet=True,
        least=0,
    )
    heartbeat_timeout_s: float = failures_flag(
        "seconds of silence after which a node counts as lost (default: 5)",
        DEFAULT_HEARTBEAT_TIMEOUT_S,
        number,
        metavar="S",
        above=0,
    )
    echoes: Echoes = failures_flag(
        "tracebacks of ranks that lost their connection to the one that failed: a count, or all", "fold",
        choices=get_args(Echoes),
    )  # fmt: skip
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    hangs: HangOptions = field(default_factory=HangOptions)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    slow: SlowOptions = field(default_factory=SlowOptions)
    correctness: CorrectnessOptions = field(default_factory=CorrectnessOptions)
    reentry: ReentryOptions = field(default_factory=ReentryOptions)
    start_timeout_s: float = failures_flag(
        "seconds for all ranks of a round to be started, else it is retried (default: 300)",
        DEFAULT_START_TIMEOUT_S,
        number,
        metavar="S",
        above=0,
    )
    join_timeout_s: float = failures_flag(
        "seconds to wait for missing nodes (default: 600, or join_timeout of --rdzv-conf)",
        DEFAULT_JOIN_TIMEOUT_S,
        number,
        raw=None,
        reads=None,
        metavar="S",
        least=0,
    )
    stop_grace_s: float = failures_flag(
        "seconds from SIGTERM to SIGKILL of the ranks (default: 10, or --shutdown-timeout, "
        "or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
        DEFAULT_STOP_GRACE_S,
        number,
        raw=None,
        reads=None,
        metavar="S",
        least=0,
    )
    failure_grace_s: float = failures_flag(
        "seconds from SIGTERM to SIGKILL of the other ranks when one has failed; 0 where no rank handles SIGTERM "
        "(default: 2)",
        DEFAULT_FAILURE_GRACE_S,
        number,
        metavar="S",
        least=0,
    )
    signals_to_handle: tuple[str, ...] = failures_flag(
        "signals that stop the run in good order",
        DEFAULT_SIGNALS,
        raw=",".join(DEFAULT_SIGNALS),
        reads=None,
        metavar="NAMES",
        pet=True,
    )

    # time limits and checkpoints
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    chain: bool = run_flag("go on in a new job when the time limit ends this one", False, None)
    chain_max: int = run_flag(
        "jobs in a chain at most (default: 20)", DEFAULT_CHAIN_MAX, whole_number, metavar="N", least=1
    )

    resizing: ResizeOptions = field(default_factory=ResizeOptions)
    notify: tuple[str, ...] = run_flag(  # may hold secrets: never on a command line of an agent, never written down
        "tell of failures, losses and the verdict: a command (the event as JSON on its standard input), an http(s) URL "
        "(JSON is posted to it), or @FILE with one of these per line; may be given several times",
        (),
        reads=tuple,
        metavar="TARGET",
        repeatable=True,
    )
    dry_run: bool = run_flag("check everything, print what would be done, start nothing", False, None)
    json: bool = run_flag("with --dry-run: as JSON", False, None)

    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    output: OutputOptions = field(default_factory=OutputOptions)

    # accepted for the sake of torchrun's users
    torchelastic_run_id: str = torchrun_flag(
        "TORCHELASTIC_RUN_ID of the ranks",
        "",  # the run's own id
        raw="none",
        reads=lambda name: "" if name == "none" else name,
        metavar="ID",
        pet=True,
        names="--rdzv-id",
    )

    @property
    def program(self) -> tuple[str, ...]:
        """Return what is run, by which launches of one batch script differ."""
        return (self.kind, self.script, *self.script_args)

    @property
    def logs_directory(self) -> Path:
        """Return where the ranks' logs end up on the shared file system."""
        return Path(self.output.log_dir) if self.output.log_dir else Path(self.run_dir) / "logs"

    def to_json(self) -> str:
        """Return one line of JSON; ``from_json`` gives an equal object back."""
        import msgspec  # imported here, since it takes 25 ms that a usage error need not pay

        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> LaunchOptions:
        """Return the options of such a line. Raises msgspec.ValidationError or DecodeError for any other text."""
        import msgspec

        return msgspec.json.decode(text, type=cls)
