"""HPPS, the planner: which shapes and layouts a run could have on this cluster, and what each costs and holds."""

from resilio_hpc.autoparallel.base.shapes import Constraints, Shape
from resilio_hpc.autoparallel.measure.throughput import Measurement, Speed, Throughput, fit, sizes
from resilio_hpc.autoparallel.search.inventory import Inventory, Pool, Waiting, take_inventory

__all__ = [
    "Constraints", "Inventory", "Measurement", "Pool", "Shape", "Speed", "Throughput", "Waiting", "fit", "sizes",
    "take_inventory",
]  # fmt: skip
