"""Where a run's time went: each microsecond of its wall clock has one cause, and the ledger lines that say so. Pure.

Uses ``core`` alone. Start reading at ``causes``, then ``run_time``.
"""
