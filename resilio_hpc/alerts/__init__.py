"""Alerts of a run (OPS-6): what is wrong now, since when, and the one thing to do.

``run_facts`` reads a run directory once. The detectors (``of_progress``, ``of_recovery``, ``of_checkpoints``,
``of_chain``) are pure, and ``judge`` calls them all. ``memory`` keeps what was reported, so that each alert is
reported once when it fires, and once when it clears. The table of alerts is ``alerts.toml``. Start reading at
``judge``.
"""
