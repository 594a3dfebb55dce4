"""``resilio plan``: start reading at ``plan``."""
