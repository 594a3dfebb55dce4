"""HPPS, the planner: the shapes and layouts that a run can have on this cluster, with the time and memory of each."""

from resilio_hpc.autoparallel.base.shapes import Constraints, Shape
from resilio_hpc.autoparallel.measure.throughput import Measurement, Speed, Throughput, fit, sizes
from resilio_hpc.autoparallel.search.inventory import Inventory, Pool, Waiting, take_inventory

__all__ = [
    "Constraints", "Inventory", "Measurement", "Pool", "Shape", "Speed", "Throughput", "Waiting", "fit", "sizes",
    "take_inventory",
]  # fmt: skip
