"""A strict agent, and training programs."""
