"""Ground floor: errors, commands, durable files, ledger, wire, rank link. Imports nothing of ours from above."""
