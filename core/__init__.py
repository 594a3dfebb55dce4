"""Ground floor: errors, commands, durable files, ledger, wire, rank link.

It imports nothing from the other packages.
"""
