"""The options of one run: the command line after parsing, in the form that agents get."""

from __future__ import annotations

import operator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal, get_args

from resilio_hpc.core.compat import StrEnum
from resilio_hpc.launch.config.flags import (
    comma_separated,
    failures_flag,
    number,
    output_flag,
    program_flag,
    run_flag,
    torchrun_flag,
    whole_number,
    world_flag,
)  # fmt: skip

ProgramKind = Literal["script", "module", "command"]
CpuBind = Literal["none", "ranks"]
Echoes = Literal["fold", "show"]
EvictDevices = Literal["off", "observe", "on"]
CheckNodes = Literal["never", "start", "restart"]

DEFAULT_MAX_RESTARTS = 3
DEFAULT_CHAIN_MAX = 20
DEFAULT_HEARTBEAT_TIMEOUT_S = 5.0
DEFAULT_START_TIMEOUT_S = 300.0
DEFAULT_STOP_GRACE_S = 10.0  # Slurm kills 30 s (KillWait) after SIGTERM; the verdict must be written before that
DEFAULT_FAILURE_GRACE_S = 2.0  # a restart waits for it, where a rank handles SIGTERM
DEFAULT_JOIN_TIMEOUT_S = 600.0
DEFAULT_KEEP_CHECKPOINTS = 5
DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class Mode(StrEnum):
    """What the launcher does about decisions: docs/adoption.md."""

    OBSERVE = "observe"  # decisions are written down, and not carried out
    CHECKPOINT = "checkpoint"  # saves, restores and chains; a failure ends the run
    RECOVER = "recover"  # everything


@dataclass(frozen=True)
class LaunchOptions:
    """A validated launch. Times are seconds; paths are absolute; a field is never None where a default exists.

    A field that is a flag says all of it: names, help, bounds, default. Where ``reads`` is None, its value needs more
    than the flag (``launch/cli/option_values``). Flags that are no field are in ``launch/cli/option_table``.

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

    # which launch it is, of those of this run of the job in this run directory (launch/chain/run_choice.py)
    launch: int = 1

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
        "tensor and pipeline parallel of the script, for RESILIO_TP, RESILIO_PP and RESILIO_DP of its ranks: "
        "tp=8,pp=2; for a certain number of ranks 16:tp=8; may be given several times",
        (),
        reads=tuple,
        metavar="[RANKS:]tp=N,pp=N",
        repeatable=True,
        names="--layout",
    )
    fill_arguments: bool = world_flag(
        "replace {tp}, {pp}, {dp}, {world_size}, {nodes} and {ranks_per_node} in the script's arguments, again in each "
        "round; {{tp}} stays {tp}",
        False,
        None,
    )
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
    evict_devices: EvictDevices = failures_flag(  # launch/agent/device_eviction.py; the two below are its rules
        "look at a node's GPUs before ranks are (re)started; on: bad ones are hidden from ranks, and the node goes on "
        "with fewer, or a spare takes its place; observe: only say so (default: off)",
        "off",
        choices=get_args(EvictDevices),
    )
    min_devices: int = failures_flag(
        "with --evict-devices: a node with fewer GPUs left takes no part (default: 1)",
        1,
        whole_number,
        metavar="N",
        least=1,
    )
    device_unit: int = failures_flag(
        "with --evict-devices: a node runs a multiple of N ranks, as groups of N GPUs need (default: 1)",
        1,
        whole_number,
        metavar="N",
        least=1,
    )
    start_timeout_s: float = failures_flag(
        "seconds for all ranks of a round to come up, else it is retried (default: 300)",
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
    keep_checkpoints: int = run_flag(  # these four are ckpt.retention.Retention
        "newest checkpoints kept (default: 5)", DEFAULT_KEEP_CHECKPOINTS, whole_number, metavar="N", least=1
    )
    keep_every: int = run_flag(
        "also keep checkpoints of steps that K divides",
        0,
        whole_number,
        raw=None,
        reads=lambda steps: steps or 0,
        metavar="K",
        least=1,
    )
    keep_hours: float | None = run_flag(
        "of those, keep none committed more than H hours ago", None, number, metavar="H", above=0
    )
    keep_gb: float | None = run_flag(
        "of those, keep as many as fit into G gigabytes; the oldest go first, the newest always stays",
        None,
        number,
        metavar="G",
        above=0,
    )
    checkpoint_gb_per_s: float | None = run_flag(
        "each node writes checkpoints to the shared file system at this many GB per second, at most",
        None,
        number,
        metavar="N",
        above=0,
        names="--checkpoint-gb-per-s",
    )
    partner_copies: bool = run_flag("keep snapshots in another node's memory, too: to lose one costs less", False, None)
    local_checkpoints: str = run_flag(
        "write checkpoints to this directory on each node's own disk (NVMe) first, and restore from there",
        "",
        raw=None,
        reads=None,
        metavar="DIR",
    )
    chain: bool = run_flag("go on in a new job when the time limit ends this one", False, None)
    chain_max: int = run_flag(
        "jobs in a chain at most (default: 20)", DEFAULT_CHAIN_MAX, whole_number, metavar="N", least=1
    )

    # more nodes and fewer, by joiner jobs: docs/resizing.md
    resize: bool = run_flag(
        "add idle nodes to the run while no other job wants them, and give them back, by jobs of their own (needs "
        "--nnodes MIN:MAX)",
        False,
        None,
    )
    resize_policy: str = run_flag(
        "with --resize: a TOML file with numbers of one's own for when it does",
        "",
        raw=None,
        reads=None,
        metavar="FILE",
    )
    resize_options: tuple[str, ...] = run_flag(
        "with --resize: options of resilio resize, in one word: '--max-nodes 16 --model gpt3-175b --global-batch 512'",
        (),
        raw=None,
        reads=None,
        metavar="WORDS",
    )
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

    # output
    view: bool = output_flag("live view of the run instead of the ranks' output", False, None)
    log_dir: str = output_flag(
        "the ranks' log files (default: RUN_DIR/logs)", "", raw=None, reads=None, metavar="DIR", pet=True
    )
    redirects: str = output_flag(  # see launch/config/streams.py
        "streams that go to the log files only: 0 none, 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:VALUE,…",
        "0",
        metavar="STD",
        pet=True,
        names="-r --redirects",
    )
    tee: str = output_flag(
        "streams that also go to the console (same notation)", "0", metavar="STD", pet=True, names="-t --tee"
    )
    local_ranks_filter: tuple[int, ...] = output_flag(
        "show only these local ranks: 0,1", (), raw="", reads=None, metavar="RANKS", pet=True
    )
    duplicate_stdout_filters: tuple[str, ...] = output_flag(
        "copy stdout lines that hold one of these words to filtered_stdout.log",
        (),
        comma_separated,
        raw=[],
        reads=tuple,
        metavar="WORDS",
        pet=True,
    )
    duplicate_stderr_filters: tuple[str, ...] = output_flag(
        "the same for stderr", (), comma_separated, raw=[], reads=tuple, metavar="WORDS", pet=True
    )
    log_line_prefix_template: str = ""

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
        return Path(self.log_dir) if self.log_dir else Path(self.run_dir) / "logs"

    def to_json(self) -> str:
        """Return one line of JSON; ``from_json`` gives an equal object back."""
        import msgspec  # imported here, since it takes 25 ms that a usage error need not pay

        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> LaunchOptions:
        """Return the options of such a line. Raises msgspec.ValidationError or DecodeError for any other text."""
        import msgspec

        return msgspec.json.decode(text, type=cls)
