"""What one run was asked to do: the command line after it was understood, in a form that travels to the agents."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

ProgramKind = Literal["script", "module", "command"]
CpuBind = Literal["none", "ranks"]
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
    """How far decisions are acted upon: docs/adoption.md."""

    OBSERVE = "observe"  # they are written down, and nothing is done
    CHECKPOINT = "checkpoint"  # saves, restores and chains; a failure ends the run
    RECOVER = "recover"  # everything


@dataclass(frozen=True)
class LaunchOptions:
    """A validated launch. Times are seconds; paths are absolute; a field is never None where a default exists.

    ``max_restarts`` counts only restarts **without progress**: one that follows a newly durable step resets the
    count (torchrun counts every restart, and allows none by default).
    """

    # what to run
    script: str  # path of a script, name of a module, or a command, as ``kind`` says
    kind: ProgramKind
    run_dir: str
    script_args: tuple[str, ...] = ()

    launch: int = 1  # of those that this run of the job has made in this run directory (launch/chain/run_choice.py)

    # the world
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: str = "1"  # "8", "auto", "gpu", "cpu", "xpu": each agent resolves it on its own node
    spares: int = 0
    node_unit: int = 1
    standalone: bool = False  # this machine only, even inside an allocation
    local_nodes: int = 0  # > 0: no Slurm, this machine plays that many nodes (drills and tests)
    evict_devices: EvictDevices = "off"  # launch/agent/device_eviction.py; the two below are its rules
    min_devices: int = 1
    device_unit: int = 1
    role: str = "default"
    virtual_local_rank: bool = False
    cpu_bind: CpuBind = "none"
    layouts: tuple[str, ...] = ()  # tensor and pipeline parallel: see launch/config/rank_layout.py
    fill_arguments: bool = False  # {tp} and the like in script_args become numbers, anew in each round
    torchelastic_run_id: str = ""  # --rdzv-id; "" lets the run's own id stand

    # failures
    max_restarts: int = DEFAULT_MAX_RESTARTS
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    stop_grace_s: float = DEFAULT_STOP_GRACE_S
    failure_grace_s: float = DEFAULT_FAILURE_GRACE_S  # for ranks with a handler of SIGTERM, when another one failed
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    signals_to_handle: tuple[str, ...] = DEFAULT_SIGNALS
    mode: Mode = Mode.RECOVER  # how far decisions are acted upon: docs/adoption.md
    check_nodes: CheckNodes = "never"  # the pair check before a job's first round
    notify: tuple[str, ...] = ()  # may hold secrets: never sent to agents by a command line, never written down

    # time limits and checkpoints
    chain: bool = False
    chain_max: int = DEFAULT_CHAIN_MAX
    keep_checkpoints: int = DEFAULT_KEEP_CHECKPOINTS  # these four: ckpt.retention.Retention
    keep_every: int = 0
    keep_hours: float | None = None
    keep_gb: float | None = None
    checkpoint_gb_per_s: float | None = None  # of a node to the shared file system, at most
    partner_copies: bool = False  # snapshots also in another node's memory
    local_checkpoints: str = ""  # a directory on each node's own disk, by way of which steps are written; "": none

    # more nodes and fewer, by joiner jobs: docs/resizing.md
    resize: bool = False
    resize_policy: str = ""  # a file with numbers for resize_policy.toml's
    resize_options: tuple[str, ...] = ()  # more words for ``resilio resize``

    # starting ranks
    zygote: bool = True
    torch: bool = True  # whether ranks may use it: import it before the fork, and hold their rendezvous store
    preload: tuple[str, ...] = ()
    stdin_rank: int = -1  # the rank that gets the launcher's standard input, in every round; -1: none
    mpi: str = ""  # a type of srun --mpi: each round's ranks are one step with that PMI; "": ranks are ours

    # output
    view: bool = False
    log_dir: str = ""  # "" is RUN_DIR/logs
    redirects: str = "0"  # see launch/config/streams.py
    tee: str = "0"
    local_ranks_filter: tuple[int, ...] = ()  # empty: all
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    log_line_prefix_template: str = ""
    dry_run: bool = False
    json: bool = False

    @property
    def program(self) -> tuple[str, ...]:
        """What is run: tells one launch of a batch script from another."""
        return (self.kind, self.script, *self.script_args)

    @property
    def logs_directory(self) -> Path:
        """Where the ranks' logs end up on the shared file system."""
        return Path(self.log_dir) if self.log_dir else Path(self.run_dir) / "logs"

    def to_json(self) -> str:
        """One line of JSON; ``from_json`` gives an equal object back."""
        import msgspec  # here, since it costs 25 ms that a usage error need not pay

        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> LaunchOptions:
        """Raises msgspec.ValidationError or msgspec.DecodeError for anything that ``to_json`` did not write."""
        import msgspec

        return msgspec.json.decode(text, type=cls)
