"""This package's checkpoints under ``torch.distributed.checkpoint``: storage for save, async_save and load.

dcp.save(state, storage_writer=ResilioWriter("checkpoints", step=100)) dcp.load(state,
storage_reader=ResilioReader("checkpoints"))
"""

from resilio_hpc.ckpt.dcp.reader import ResilioReader
from resilio_hpc.ckpt.dcp.writer import ResilioWriter

__all__ = ["ResilioReader", "ResilioWriter"]
