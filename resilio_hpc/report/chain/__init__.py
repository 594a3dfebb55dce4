"""What a run's whole ledger says, over all jobs of its chain: recoveries, checkpoints, cost, what to change.

Uses ``accounting`` and the modules above. Start reading at ``run_report``.
"""
