"""Which of many failed ranks failed first and took the others with it (RES-3, OPS-5).

Begin with `verdict.judge`: deaths of ranks and nodes come in, a `CascadeVerdict` comes out. `death` says of one end
alone whether it can follow from another; `calls` compares what ranks had called; `clocks` bounds how far a node's clock
is ahead. Pure. Uses ``causes`` and ``hangs``.
"""
