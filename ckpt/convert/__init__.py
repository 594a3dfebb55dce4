"""Checkpoints of other formats, read and written: torch files, safetensors, torch.distributed.checkpoint.

Start reading at ``import_step`` and ``export``.
"""
