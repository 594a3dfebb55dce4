"""``resilio health``: start reading at ``health``."""
