"""Code that several commands share. Start reading at ``steps``."""
