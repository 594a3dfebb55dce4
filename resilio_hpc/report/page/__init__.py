"""A run's report as one page of HTML that needs no network and no script.

Uses ``chain`` and what is below it. Start reading at ``page``.
"""
