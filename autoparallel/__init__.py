"""HPPS, the planner: which shapes and layouts a run could have on this cluster, and what each costs and holds."""

from resilio_hpc.autoparallel.base.shapes import Constraints, Shape
from resilio_hpc.autoparallel.measure.throughput import Measurement, Speed, Throughput, fit
from resilio_hpc.autoparallel.search.candidate import Candidate
from resilio_hpc.autoparallel.search.inventory import Inventory, Pool, Waiting, take_inventory
from resilio_hpc.autoparallel.search.plan import plan

__all__ = [
    "Candidate", "Constraints", "Inventory", "Measurement", "Pool", "Shape", "Speed", "Throughput", "Waiting", "fit",
    "plan", "take_inventory",
]  # fmt: skip
