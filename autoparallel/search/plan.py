"""The planner: which shapes a run could have, best first. Pure.

``inventory → shapes → those that fit → step time of each → ranked candidates``
"""

from __future__ import annotations

from resilio_hpc.autoparallel.base.shapes import Constraints, Shape, shapes
from resilio_hpc.autoparallel.measure.throughput import LayoutSpeed, Speed
from resilio_hpc.autoparallel.search.candidate import Candidate
from resilio_hpc.autoparallel.search.inventory import Inventory, Pool


def plan(inventory: Inventory, model: Speed, constraints: Constraints) -> list[Candidate]:
    """Candidates by expected speed, the fastest first; of equally fast ones that with fewer nodes.

    Those that Slurm could not start now are among them, and say so: what would be worth waiting for. With a
    model that knows layouts (``model_speed``) each has one, and shapes without any are left out.
    """
    free = idle_beside(inventory, constraints)
    found = [_candidate(shape, model, constraints, free) for shape in shapes(constraints)]
    found = [one for one in found if one.layout is not None or not isinstance(model, LayoutSpeed)]
    return sorted(found, key=lambda one: (-one.speed, one.nodes))


def idle_beside(inventory: Inventory, constraints: Constraints) -> tuple[str, ...]:
    """Idle nodes that the run could take in addition to those it holds."""
    names = {node for pool in inventory.pools if _fits(pool, constraints) for node in pool.idle}
    return tuple(sorted(names - constraints.held))


def _fits(pool: Pool, constraints: Constraints) -> bool:
    same_type = constraints.gpu_type is None or pool.gpu_type == constraints.gpu_type
    same_count = constraints.gpus_per_node is None or pool.gpus_per_node == constraints.gpus_per_node
    return pool.partition in constraints.partition.split(",") and same_type and same_count


def _candidate(shape: Shape, model: Speed, constraints: Constraints, free: tuple[str, ...]) -> Candidate:
    more = max(0, shape.nodes - len(constraints.held))
    copies = shape.ranks // constraints.model_parallel
    batch = constraints.global_batch // (copies * constraints.micro_batch) if constraints.global_batch else 0
    layout = model.layout(shape.nodes) if isinstance(model, LayoutSpeed) else None
    if layout is not None:
        copies, batch = layout.dp * layout.cp, layout.micro_batches
    return Candidate(
        shape=shape,
        partition=constraints.partition,
        step_s=model.step_s(shape.nodes),
        speed=model.speed(shape.nodes),
        more_nodes=more,
        startable=more <= len(free),
        data_parallel=copies,
        accumulation=batch,
        layout=layout,
    )
