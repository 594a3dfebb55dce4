"""Checkpoints: ``Checkpointer`` saves a run's whole state and brings it back; see ``docs/`` and ``checkpointer.py``."""

from resilio_hpc.ckpt.agent_link import EXIT_RESTORE_FAILED
from resilio_hpc.ckpt.checkpointer import REPLICATED, Checkpointer
from resilio_hpc.ckpt.handle import SaveHandle
from resilio_hpc.ckpt.rng import rng_state, set_rng_state
from resilio_hpc.ckpt.slab import Slab

__all__ = ["EXIT_RESTORE_FAILED", "REPLICATED", "Checkpointer", "SaveHandle", "Slab", "rng_state", "set_rng_state"]
