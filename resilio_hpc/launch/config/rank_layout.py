"""How the ranks of a round are divided among tensor, pipeline and data parallelism, and how a script learns it.

Pure.

``--layout tp=8,pp=2`` holds for any number of ranks, ``--layout 16:tp=8`` for 16 of them alone; data parallel is what
is left. With ``--layout auto`` the planner's layouts go before these rows (``planned_layouts``). With
``--fill-arguments`` the words ``{tp}``, ``{pp}`` … in the script's arguments become these numbers, in each round again;
without it no brace is touched.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.planned_layouts import AUTO

_ROW = re.compile(r"(?:([1-9]\d{0,8}):)?((?:tp|pp)=[1-9]\d{0,5}(?:,(?:tp|pp)=[1-9]\d{0,5})?)")
PLANNED = (
    "micro_batch", "global_batch", "accumulation", "cp", "ep", "vpp", "zero", "replicas", "recompute",
    "sequence_parallel", "etp", "head_layers", "offload", "stages",
)  # fmt: skip
"""What the planner chooses besides degrees."""
# {{name}} stands for {name}; ${name} belongs to the argument's reader (and ${local_rank} to torchrun's rule)
_WORD = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class RankLayout:
    """Degrees whose product is the world size. ``planned``: the planner's other numbers, such as micro_batch."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    planned: Mapping[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return variables for the ranks' environment."""
        return {f"RESILIO_{name.upper()}": value for name, value in self.planned.items()} | {
            "RESILIO_TP": str(self.tensor_parallel),
            "RESILIO_PP": str(self.pipeline_parallel),
            "RESILIO_DP": str(self.data_parallel),
        }


def model_parallel(rows: Sequence[str], world_size: int) -> tuple[int, int]:
    """Return (tensor, pipeline) parallel for a number of ranks: of the row that names it, else of the one for any.

    Raises UsageError for an invalid row, and for two that contradict each other.
    """
    found: dict[int, tuple[int, int]] = {}
    for row in (row for row in rows if row != AUTO):
        ranks, degrees = _parse(row)
        if found.setdefault(ranks, degrees) != degrees:
            raise UsageError(f"--layout {row}: there is another one for {ranks or 'any number of'} ranks")
    return found.get(world_size, found.get(0, (1, 1)))


def _parse(row: str) -> tuple[int, tuple[int, int]]:
    match = _ROW.fullmatch(row.replace(" ", ""))
    parts = [] if match is None else [part.partition("=") for part in match[2].split(",")]
    degrees = {name: int(value) for name, _, value in parts}
    if match is None or len(degrees) < len(parts):
        raise UsageError(f"--layout: {row!r} is not of the form [RANKS:]tp=N,pp=N (tp=8,pp=2 or 16:tp=8)")
    return int(match[1] or 0), (degrees.get("tp", 1), degrees.get("pp", 1))


def layout_of(rows: Sequence[str], world_size: int) -> RankLayout:
    """Return the layout of a round. Raises UsageError where the degrees do not divide the number of ranks."""
    return _divided(*model_parallel(rows, world_size), world_size, {})


def round_layout(options: LaunchOptions, world_size: int, gpu: str) -> RankLayout:
    """Return the layout of a round on GPUs of this type ("": not known), the planner's where it chose one.

    Raises UsageError as ``layout_of``.
    """
    planned = options.planning.plan.of(world_size, gpu) if is_auto(options) else None
    if planned is None:
        return layout_of(options.layouts, world_size)
    return _divided(*planned.degrees, world_size, dict(planned.values))


def planned_words(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what ``resilio plan`` has put into a job's environment: RESILIO_TP as tp, and so on."""
    names = ("tp", "pp", "dp", *PLANNED)
    return {name: word[:40] for name in names if (word := environment.get(f"RESILIO_{name.upper()}", ""))}


def is_auto(options: LaunchOptions) -> bool:
    """Return whether the planner chooses."""
    return AUTO in options.layouts


def _divided(tensor: int, pipeline: int, world_size: int, planned: Mapping[str, str]) -> RankLayout:
    if world_size % (tensor * pipeline):
        raise UsageError(
            f"--layout: {world_size} ranks cannot be divided into copies of tp={tensor} x pp={pipeline} ranks: add "
            f"--layout {world_size}:tp=…,pp=…, or keep to numbers of nodes that fit with --node-unit"
        )
    return RankLayout(tensor, pipeline, world_size // (tensor * pipeline), planned)


def role_of(options: LaunchOptions, gpu: str, rank: int, world_size: int) -> int:
    """Return the place of a rank in its copy of the model: ranks of one place do equal work. Never raises."""
    try:
        layout = round_layout(options, world_size, gpu)
    except UsageError:
        return 0
    tensor = layout.tensor_parallel
    return rank % tensor + tensor * (rank // (tensor * layout.data_parallel))


def check(options: LaunchOptions) -> None:
    """Raise UsageError for a layout that is wrong for some number of nodes that the run may have."""
    model_parallel(options.layouts, 0)
    if is_auto(options):
        _check_auto(options)
    elif options.planning.layout_options:
        raise UsageError("--layout-options belong to --layout auto: add it")
    if options.fill_arguments:
        known = dict.fromkeys(PLANNED, "1") if is_auto(options) else {}
        fill(options.script_args, values_of(RankLayout(1, 1, 1, known), 1, 1))
    if options.layouts and not is_auto(options) and options.nproc_per_node.isdecimal():
        unit = options.node_unit
        for nodes in range(-(-options.min_nodes // unit) * unit, options.max_nodes + 1, unit):
            layout_of(options.layouts, nodes * int(options.nproc_per_node))


def _check_auto(options: LaunchOptions) -> None:
    if not options.planning.layout_options:
        raise UsageError(
            "--layout auto: which model and batch? Add --layout-options 'MODEL --global-batch N', the words of resilio "
            "plan (resilio plan model --list: the models)"
        )
    if not options.nproc_per_node.isdecimal():
        raise UsageError(f"--layout auto: how many ranks has a node? Not {options.nproc_per_node}: --nproc-per-node N")


def values_of(layout: RankLayout, nodes: int, ranks_per_node: int) -> dict[str, str]:
    """Return the values for ``--fill-arguments``."""
    return dict(layout.planned) | {
        "tp": str(layout.tensor_parallel),
        "pp": str(layout.pipeline_parallel),
        "dp": str(layout.data_parallel),
        "world_size": str(layout.tensor_parallel * layout.pipeline_parallel * layout.data_parallel),
        "nodes": str(nodes),
        "ranks_per_node": str(ranks_per_node),
    }


def fill(arguments: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments with ``{name}`` filled in. Other braces (JSON, ``${shell}``) stay. Raises UsageError."""

    def put(match: re.Match[str]) -> str:
        literal, name = match[1], match[2]
        if literal is not None:
            return f"{{{literal}}}"
        if name not in values:
            near = difflib.get_close_matches(name, values, 1, 0.5)
            meant = f"did you mean {{{near[0]}}}? " if near else ""
            known = ", ".join(f"{{{known}}}" for known in values)
            raise UsageError(
                f"--fill-arguments: there is no {{{name}}}: {meant}There are {known}; "
                f"write {{{{{name}}}}} for the text {{{name}}} itself"
            )
        return values[name]

    return tuple(_WORD.sub(put, argument) for argument in arguments)
