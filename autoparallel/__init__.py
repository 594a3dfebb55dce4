"""HPPS, the planner: which shapes and layouts a run could have on this cluster, and what each costs and holds."""

from resilio_hpc.autoparallel.candidate import Candidate
from resilio_hpc.autoparallel.inventory import Inventory, Pool, Waiting, take_inventory
from resilio_hpc.autoparallel.plan import plan
from resilio_hpc.autoparallel.shapes import Constraints, Shape
from resilio_hpc.autoparallel.throughput import Measurement, Speed, Throughput, fit

__all__ = [
    "Candidate", "Constraints", "Inventory", "Measurement", "Pool", "Shape", "Speed", "Throughput", "Waiting", "fit",
    "plan", "take_inventory",
]  # fmt: skip
