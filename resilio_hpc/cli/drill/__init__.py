"""``resilio drill``: faults on purpose."""
