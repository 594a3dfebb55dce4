"""Another user, and a run that goes on meanwhile."""
