"""Why a rank is slow: its own work against waiting, from its call ring, and the cause, from what its node sees.

Start with `call_times`; `causes` is pure. Uses the reader of rings in ``hangs``.
"""
