"""Our checkpoints under ``torch.distributed.checkpoint``: its ``save``, ``async_save`` and ``load`` with other storage.

dcp.save(state, storage_writer=ResilioWriter("checkpoints", step=100))
dcp.load(state, storage_reader=ResilioReader("checkpoints"))
"""

from resilio_hpc.ckpt.dcp.reader import ResilioReader
from resilio_hpc.ckpt.dcp.writer import ResilioWriter

__all__ = ["ResilioReader", "ResilioWriter"]
