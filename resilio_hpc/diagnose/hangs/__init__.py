"""Which rank holds up a hang, from what each rank has entered and completed (RES-15). Pure but for reading dumps.

Begin with `blame.blame`: the ranks' `RankCalls` come in, a `HangBlame` comes out. `flight_recorder` makes them from
dumps of PyTorch's flight recorder, `verdict` from looks at the ranks of a run, whose calls `call_ring` reads. Uses
``core`` and ``events``.
"""
