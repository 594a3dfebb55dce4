"""``resilio nodes``: start reading at ``nodes``."""
