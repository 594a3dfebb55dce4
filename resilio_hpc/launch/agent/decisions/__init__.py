"""What an agent does with its ranks, as the controller orders. Pure. Start reading at ``agent_core``."""
