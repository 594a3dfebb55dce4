"""``resilio check-nodes``: start reading at ``check_nodes``."""
