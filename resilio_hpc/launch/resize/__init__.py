"""Growing and shrinking a run while it trains: facts, the decision, and the process that carries it out.

Start reading at ``resizing``.
"""
