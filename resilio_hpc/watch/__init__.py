"""What is seen of a run while it trains: whether its steps go on (RES-2, NVX-1). Pure.

`step_watch` compares the time without a step with what `learned_limit` has seen of this run. Uses nothing of ours;
`launch/controller/faults/hangs` feeds it.
"""
