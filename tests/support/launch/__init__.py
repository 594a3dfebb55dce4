"""An agent alone, a bench for MPI tasks, a server of webhooks."""
