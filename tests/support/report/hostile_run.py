"""A run whose names, messages and times are made to break a page, a terminal, or a sum."""

from __future__ import annotations

import json
from pathlib import Path

HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>\"'&\x1b[31m\u202e</style><b>"
BEGAN = 1_760_000_000.0


def write_hostile_run(path: Path) -> Path:
    """Write the run directory; return it."""
    (path / "ledger").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"version": 1, "run_id": HOSTILE[:30], "created": BEGAN}))
    events = [
        (0, "launch", {"job": HOSTILE, "nodes": [HOSTILE, "n2"], "argv": [HOSTILE]}),
        (1, "round", {"round": 0, "members": [HOSTILE, "n2"], "world_size": 2}),
        (5, "first_step", {"round": 0, "step": 1, "restored": -1, "source": HOSTILE, "restore_s": 1e308}),
        (50, "committed", {"step": 1 << 62, "seconds": -5, "blocked_s": 1e300}),
        (60, "rank_failed", {"round": 0, "node": HOSTILE, "rank": 1, "kind": HOSTILE, "message": HOSTILE * 50,
                             "place": HOSTILE, "class": HOSTILE}),
        (60.5, "decision", {"round": 0, "rung": HOSTILE, "reason": HOSTILE}),
        (60.6, "origin", {"round": 0, "node": HOSTILE, "rank": 1, "primary": True, "confidence": 7,
                          "evidence": HOSTILE}),
        (61, "echoes", {"round": 0, "node": HOSTILE, "rank": 1, "count": -4, "logs": HOSTILE}),
        (70, "round", {"round": 1, "members": [HOSTILE], "world_size": 1}),
        (80, "first_step", {"round": 1, "step": 2, "restored": 1, "source": HOSTILE, "restore_s": 2}),
        (80, "recovered", {"round": 1, "kind": HOSTILE, "node": HOSTILE, "lost_steps": -3, "recovery_s": 20}),
        (90, "verdict", {"verdict": HOSTILE, "reason": HOSTILE}),
    ]  # fmt: skip
    writer = f"{HOSTILE}-supervisor-main"
    with open(path / "ledger" / "w<i>&.jsonl", "wb") as file:
        for at, kind, fields in events:
            line = {"v": 1, "time": BEGAN + at, "writer": writer, "event": kind, **fields}
            file.write(json.dumps(line).encode() + b"\n")
            file.write(b'{"v":1,"time":1e999,"event":"round"\n\xff\xfe{"event":"launch"}\n')
        file.write(b'{"v":1,"time":5,"wri')
    return path
