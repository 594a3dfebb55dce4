"""``resilio ckpt``: start reading at ``ckpt``."""
