"""The command line of ``resilio-launch`` as data: one row per flag.

Every flag of torchrun is here with torchrun's names, types and environment defaults (``PET_…``); a row whose
``no_effect`` is filled is accepted so that existing commands run unchanged, and is named once when it was given.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resilio_hpc.launch.config import options as o
from resilio_hpc.launch.config.options import Mode


@dataclass(frozen=True)
class Flag:
    """One flag. ``names`` hold the hyphen spelling; the underscore spelling is added by the parser."""

    names: tuple[str, ...]
    help: str
    type: Callable[[str], Any] | None = str  # None: a switch
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    pet: bool = False  # torchrun reads its default from PET_<NAME>
    no_effect: str = ""  # why giving it changes nothing here
    repeatable: bool = False  # each time it is given adds to a list

    @property
    def dest(self) -> str:
        """The attribute in the parsed namespace, as argparse (and torchrun) derive it."""
        return self.names[-1].lstrip("-").replace("-", "_")


def whole_number(text: str) -> int:
    """int, with our words in the error."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A finite float, with our words in the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def comma_separated(text: str) -> list[str]:
    """``a,b`` → [a, b]; ``,,`` is a comma inside an item (torchrun's rule)."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


_WE_START_AGENTS = "agents find each other without a rendezvous server"
_CONTROLLER_CHOOSES = "the controller chooses it anew for each round"

WORLD = (
    Flag(
        ("--nnodes",),
        "nodes that train: N, or MIN:MAX to go on with fewer (default: all of the allocation but the spares)",
        metavar="N|MIN:MAX",
        pet=True,
    ),
    Flag(
        ("--nproc-per-node",),
        "ranks per node; gpu, auto: one per GPU; cpu, or auto without a GPU: one per usable CPU (default: 1)",
        metavar="N|auto|gpu|cpu|xpu",
        default="1",
        pet=True,
    ),
    Flag(("--spares",), "nodes kept warm to replace a lost one (default: 0)", whole_number, 0, "K"),
    Flag(("--node-unit",), "train with a multiple of N nodes only (default: 1)", whole_number, 1, "N"),
    Flag(
        ("--layout",),
        "tensor and pipeline parallel of the script, for RESILIO_TP, RESILIO_PP and RESILIO_DP of its ranks: "
        "tp=8,pp=2; for a certain number of ranks 16:tp=8; may be given several times",
        metavar="[RANKS:]tp=N,pp=N",
        default=(),
        repeatable=True,
    ),
    Flag(
        ("--fill-arguments",),
        "replace {tp}, {pp}, {dp}, {world_size}, {nodes} and {ranks_per_node} in the script's arguments, anew in each "
        "round; {{tp}} stays {tp}",
        None,
        False,
    ),
    Flag(("--standalone",), "use this machine only, even inside an allocation", None, False, pet=True),
    Flag(("--role",), "ROLE_NAME of the ranks", default="default", metavar="NAME", pet=True),
    Flag(("--virtual-local-rank",), "LOCAL_RANK=0 for every rank, which sees only its own GPU", None, False, pet=True),
    Flag(
        ("--cpu-bind",), "ranks: each rank gets its share of the node's CPUs", default="none", choices=("none", "ranks")
    ),
)

PROGRAM = (
    Flag(("-m", "--module"), "the program is a module, run as by python -m", None, False, pet=True),
    Flag(("--no-python",), "the program is any command, not Python", None, False, pet=True),
    Flag(
        ("--run-path",),
        "accepted; wins over --no-python",
        None,
        False,
        pet=True,
        no_effect="a script always runs in the interpreter that the rank was forked from",
    ),
    Flag(
        ("--no-zygote",), "start each rank as a new interpreter instead of forking one with torch loaded", None, False
    ),
    Flag(
        ("--no-torch",),
        "the ranks do not use torch (JAX, mpi4py, numpy): nothing of it is imported for them, and MASTER_PORT is "
        "a free port that rank 0 may listen on",
        None,
        False,
    ),
    Flag(
        ("--stdin",),
        "give the launcher's standard input, read to its end before, to this rank in every round (default: all ranks "
        "find it empty)",
        whole_number,
        None,
        "RANK",
    ),
    Flag(("--preload",), "import these too before the ranks are forked", comma_separated, [], "MODULES"),
    Flag(
        ("--mpi",),
        "start the ranks through srun --mpi=TYPE, so that MPI programs find their PMI (see srun --mpi=list)",
        metavar="pmix|pmi2|…",
        default="none",
    ),
)

FAILURES = (
    Flag(
        ("--mode",),
        "how far to go: observe writes down what would be done and does nothing; checkpoint also saves, restores and "
        "chains; recover also restarts after failures (default: recover)",
        default=Mode.RECOVER.value,
        choices=tuple(mode.value for mode in Mode),
    ),
    Flag(
        ("--check-nodes",),
        "pair the nodes and leave out bad and slow ones before ranks start: start, in each job; restart, in jobs that "
        "go on where another one stopped (default: never)",
        default="never",
        choices=("never", "start", "restart"),
    ),
    Flag(
        ("--max-restarts",),
        "restarts without progress before giving up: one that follows a newly durable step starts the count anew "
        "(default: 3; torchrun counts every restart, default 0)",
        whole_number,
        o.DEFAULT_MAX_RESTARTS,
        "N",
        pet=True,
    ),
    Flag(
        ("--heartbeat-timeout",),
        "seconds of silence after which a node counts as lost (default: 5)",
        number,
        o.DEFAULT_HEARTBEAT_TIMEOUT_S,
        "S",
    ),
    Flag(
        ("--evict-devices",),
        "look at a node's GPUs before ranks are (re)started; on: bad ones are hidden from ranks, and the node goes on "
        "with fewer, or a spare takes its place; observe: only say so (default: off)",
        default="off",
        choices=("off", "observe", "on"),
    ),
    Flag(
        ("--min-devices",),
        "with --evict-devices: a node with fewer GPUs left takes no part (default: 1)",
        whole_number,
        1,
        "N",
    ),
    Flag(
        ("--device-unit",),
        "with --evict-devices: a node runs a multiple of N ranks, as groups of N GPUs need (default: 1)",
        whole_number,
        1,
        "N",
    ),
    Flag(
        ("--start-timeout",),
        "seconds for all ranks of a round to come up, else it is retried (default: 300)",
        number,
        o.DEFAULT_START_TIMEOUT_S,
        "S",
    ),
    Flag(
        ("--join-timeout",),
        "seconds to wait for missing nodes (default: 600, or join_timeout of --rdzv-conf)",
        number,
        None,
        "S",
    ),
    Flag(
        ("--stop-grace",),
        "seconds from SIGTERM to SIGKILL of the ranks (default: 10, or --shutdown-timeout, "
        "or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
        number,
        None,
        "S",
    ),
    Flag(
        ("--failure-grace",),
        "seconds from SIGTERM to SIGKILL of the other ranks when one has failed; 0 where no rank handles SIGTERM "
        "(default: 2)",
        number,
        o.DEFAULT_FAILURE_GRACE_S,
        "S",
    ),
    Flag(("--shutdown-timeout",), "torchrun's name of --stop-grace", whole_number, None, "S", pet=True),
    Flag(
        ("--signals-to-handle",),
        "signals that stop the run in good order",
        default=",".join(o.DEFAULT_SIGNALS),
        metavar="NAMES",
        pet=True,
    ),
)

RUN = (
    Flag(
        ("--run-dir",),
        "ledger, logs and checkpoints (default: resilio-runs/<job id or time>, or the next free <job id>-N)",
        metavar="DIR",
    ),
    Flag(
        ("--keep-checkpoints",), "newest checkpoints kept (default: 5)", whole_number, o.DEFAULT_KEEP_CHECKPOINTS, "N"
    ),
    Flag(("--keep-every",), "also keep checkpoints of steps that K divides", whole_number, None, "K"),
    Flag(("--keep-hours",), "of those, keep none committed more than H hours ago", number, None, "H"),
    Flag(
        ("--keep-gb",),
        "of those, keep as many as fit into G gigabytes; the oldest go first, the newest always stays",
        number,
        None,
        "G",
    ),
    Flag(
        ("--checkpoint-gb-per-s",),
        "each node writes checkpoints to the shared file system at this many GB per second, at most",
        number,
        None,
        "N",
    ),
    Flag(("--partner-copies",), "keep snapshots in another node's memory, too: to lose one costs less", None, False),
    Flag(
        ("--local-checkpoints",),
        "write checkpoints to this directory on each node's own disk (NVMe) first, and restore from there",
        metavar="DIR",
    ),
    Flag(("--chain",), "go on in a new job when the time limit ends this one", None, False),
    Flag(("--chain-max",), "jobs in a chain at most (default: 20)", whole_number, o.DEFAULT_CHAIN_MAX, "N"),
    Flag(
        ("--resize",),
        "add idle nodes to the run while no other job wants them, and give them back, by jobs of their own (needs "
        "--nnodes MIN:MAX)",
        None,
        False,
    ),
    Flag(("--resize-policy",), "with --resize: a TOML file with numbers of one's own for when it does", metavar="FILE"),
    Flag(
        ("--resize-options",),
        "with --resize: options of resilio resize, in one word: '--max-nodes 16 --model gpt3-175b --global-batch 512'",
        metavar="WORDS",
    ),
    Flag(
        ("--notify",),
        "tell of failures, losses and the verdict: a command (the event as JSON on its standard input), an http(s) URL "
        "(JSON is posted to it), or @FILE with one of these per line; may be given several times",
        metavar="TARGET",
        default=(),
        repeatable=True,
    ),
    Flag(
        ("--join",),
        "instead of SCRIPT: add the nodes of this job to the run of another job, which says everything else; "
        "only --join-timeout, --dry-run and --json can be given with it",
        metavar="RUN_DIR",
    ),
    Flag(("--dry-run",), "check everything, print what would be done, start nothing", None, False),
    Flag(("--json",), "with --dry-run: as JSON", None, False),
)

OUTPUT = (
    Flag(("--view",), "live view of the run instead of the ranks' output", None, False),
    Flag(("--log-dir",), "the ranks' log files (default: RUN_DIR/logs)", metavar="DIR", pet=True),
    Flag(
        ("-r", "--redirects"),
        "streams that go to the log files only: 0 none, 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:VALUE,…",
        default="0",
        metavar="STD",
        pet=True,
    ),
    Flag(("-t", "--tee"), "streams that also go to the console (same notation)", default="0", metavar="STD", pet=True),
    Flag(("--local-ranks-filter",), "show only these local ranks: 0,1", default="", metavar="RANKS", pet=True),
    Flag(
        ("--duplicate-stdout-filters",),
        "copy stdout lines that hold one of these words to filtered_stdout.log",
        comma_separated,
        [],
        "WORDS",
        pet=True,
    ),
    Flag(
        ("--duplicate-stderr-filters",),
        "the same for stderr",
        comma_separated,
        [],
        "WORDS",
        pet=True,
    ),
)

TORCHRUN = (
    Flag(("--rdzv-id",), "TORCHELASTIC_RUN_ID of the ranks", default="none", metavar="ID", pet=True),
    Flag(("--rdzv-conf",), "only join_timeout=S is used", default="", metavar="K=V,…", pet=True),
    Flag(("--rdzv-backend",), "no effect", default="static", metavar="NAME", pet=True, no_effect=_WE_START_AGENTS),
    Flag(("--rdzv-endpoint",), "no effect", default="", metavar="HOST:PORT", pet=True, no_effect=_WE_START_AGENTS),
    Flag(("--node-rank",), "no effect", whole_number, 0, "N", pet=True, no_effect="the controller ranks the nodes"),
    Flag(("--master-addr",), "no effect", default="127.0.0.1", metavar="HOST", pet=True, no_effect=_CONTROLLER_CHOOSES),
    Flag(("--master-port",), "no effect", whole_number, None, "PORT", pet=True, no_effect=_CONTROLLER_CHOOSES),
    Flag(
        ("--local-addr",),
        "no effect",
        metavar="HOST",
        pet=True,
        no_effect="each agent tells its own address",
    ),
    Flag(
        ("--monitor-interval",),
        "no effect",
        number,
        0.1,
        "S",
        pet=True,
        no_effect="the end of a rank is an event, nothing is polled",
    ),
    Flag(
        ("--start-method",),
        "no effect",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        pet=True,
        no_effect="ranks are forked from an interpreter with torch loaded; see --no-zygote",
    ),
    Flag(
        ("--event-log-handler",),
        "no effect",
        default="null",
        metavar="NAME",
        pet=True,
        no_effect="events go to the ledger in the run directory",
    ),
    Flag(("--logs-specs",), "no effect", metavar="NAME", no_effect="logs go to --log-dir"),
    Flag(
        ("--numa-binding",),
        "no effect",
        choices=("node", "socket", "exclusive", "core-complex"),
        no_effect="ranks are not bound to NUMA nodes; --cpu-bind ranks gives each its own CPUs",
    ),
)

GROUPS = (
    ("the world", WORLD),
    ("the program", PROGRAM),
    ("failures", FAILURES),
    ("the run", RUN),
    ("output", OUTPUT),
    ("accepted for torchrun's sake", TORCHRUN),
)
