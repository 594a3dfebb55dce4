"""Models to be traced."""
