"""What several commands share. Start reading at ``steps``."""
