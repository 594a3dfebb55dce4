"""Ledger events as text, for the launcher, the report and notifications.

Start reading at ``event_text``.
"""
