"""The flags of ``resilio-launch`` in the order of its help: those that are fields of LaunchOptions, and the others.

Every flag of torchrun is here with torchrun's names, types and environment defaults (``PET_…``); a row whose
``no_effect`` is filled is accepted so that existing commands run unchanged, and is named once when it was given.
"""

from __future__ import annotations

from resilio_hpc.launch.config.flags import Flag, FlagGroup, number, rows, whole_number
from resilio_hpc.launch.config.options import LaunchOptions

_WE_START_AGENTS = "agents find each other without a rendezvous server"
_CONTROLLER_CHOOSES = "the controller chooses it anew for each round"

_WORLD = (
    Flag(
        ("--nnodes",),
        "nodes that train: N, or MIN:MAX to go on with fewer (default: all of the allocation but the spares)",
        metavar="N|MIN:MAX",
        pet=True,
    ),
)

_PROGRAM = (
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
)

_FAILURES = (
    Flag(("--shutdown-timeout",), "torchrun's name of --stop-grace", whole_number, None, "S", pet=True, least=0),
)

_RUN = (
    Flag(
        ("--join",),
        "instead of SCRIPT: add the nodes of this job to the run of another job (named by its directory, job, or id), "
        "which says everything else; only --join-timeout, --dry-run and --json can be given with it",
        metavar="RUN",
    ),
)

_TORCHRUN = (
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

_FIELDS = {group: tuple(rows(LaunchOptions, group)) for group in FlagGroup}
GROUPS = (
    (FlagGroup.WORLD, (*_WORLD, *_FIELDS[FlagGroup.WORLD])),
    (FlagGroup.PROGRAM, (*_PROGRAM, *_FIELDS[FlagGroup.PROGRAM])),
    (FlagGroup.FAILURES, (*_FIELDS[FlagGroup.FAILURES], *_FAILURES)),
    (FlagGroup.RUN, (*_FIELDS[FlagGroup.RUN], *_RUN)),
    (FlagGroup.OUTPUT, _FIELDS[FlagGroup.OUTPUT]),
    (FlagGroup.TORCHRUN, (*_FIELDS[FlagGroup.TORCHRUN], *_TORCHRUN)),
)
FLAGS = tuple(flag for _, flags in GROUPS for flag in flags)
