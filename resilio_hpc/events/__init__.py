"""The words of the ledger's events, as the launcher, the report and notifications say them.

Start reading at ``event_text``.
"""
