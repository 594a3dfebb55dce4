"""HPPS, the planner: shapes, parallel layouts, what they cost and hold, and which of them to run."""
