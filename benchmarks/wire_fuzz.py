#!/usr/bin/env python3
"""A million messages that no correct program sends, into the decoder and into the controller: what breaks?

    python benchmarks/wire_fuzz.py                      # 1,000,000 frames, 200,000 messages to controllers
    python benchmarks/wire_fuzz.py --frames 20000 --messages 5000 --seed 7

Frames: real ones of every type, mutated, truncated, spliced, nested, oversized, of another version, with wrong or
missing or unknown fields, and plain garbage. The decoder may answer with a message or with WireError, nothing else.
Messages: valid structs with nonsense in them, in any order, to the real Controller, which may answer with actions that
can be sent and written down, and nothing else. Memory is measured before and after.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.launch.protocol import messages as m
from wire_fuzz_controller import fuzz_controller
from wire_fuzz_values import Values

CODECS: dict[str, wire.Codec[object]] = {"to controller": m.to_controller, "to agent": m.to_agent}  # type: ignore[dict-item]
UNIONS = {"to controller": m.ToController, "to agent": m.ToAgent}
OVERSIZED_ONE_IN = 20_000  # each costs a copy of 16 MiB


@dataclass
class Outcome:
    """What became of the frames. ``broke``: an error that is no WireError, with the frame that raised it."""

    frames: int = 0
    decoded: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by kind of frame
    broke: list[str] = field(default_factory=list)
    seconds: float = 0.0


def rss_mb() -> float:
    """Return what this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


# -- frames ----------------------------------------------------------------------------------------------------------


def flip(rng: Random, frame: bytearray) -> bytes:
    """Return some bits."""
    for _ in range(rng.randint(1, 8)):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return bytes(frame)


def splice(rng: Random, frame: bytearray) -> bytes:
    """Return a piece removed, doubled, or put elsewhere."""
    begin = rng.randrange(len(frame))
    piece = frame[begin : begin + rng.randint(1, 16)]
    if rng.random() < 0.5:
        del frame[begin : begin + len(piece)]
    at = rng.randint(0, len(frame))
    frame[at:at] = piece * rng.randint(0, 3)
    return bytes(frame)


def nest(rng: Random, frame: bytearray) -> bytes:
    """Arrays or maps in one another, at the end or somewhere inside."""
    opening = rng.choice([b"\x91", b"\x81\xa1x", b"\xdc\x00\x01", b"\x92\xc0"])
    at = rng.randint(1, len(frame))
    return bytes(frame[:at]) + opening * rng.choice([10, 200, 900, 1100, 5000]) + bytes(frame[at:])


def lie(rng: Random, frame: bytearray) -> bytes:
    """Return a length that promises more than there is."""
    at = rng.randint(1, len(frame))
    length = rng.choice(
        [b"\xdf\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    )
    return bytes(frame[:at]) + length + bytes(frame[at + rng.randint(0, 4) :])


MUTATIONS = {
    "bits": flip,
    "spliced": splice,
    "nested": nest,
    "lying": lie,
    "truncated": lambda rng, frame: bytes(frame[: rng.randrange(len(frame))]),
    "version": lambda rng, frame: bytes([rng.randrange(256)]) + bytes(frame[1:]),
    "garbage": lambda rng, frame: rng.randbytes(rng.randint(0, 200)),
    "garbage body": lambda rng, frame: bytes([wire.VERSION]) + rng.randbytes(rng.randint(0, 200)),
    "doubled": lambda rng, frame: bytes(frame) + bytes(frame[1:]),
    "untouched": lambda rng, frame: bytes(frame),
}


def make_frame(rng: Random, values: Values) -> tuple[str, str, bytes]:
    """(codec, kind of frame, frame)."""
    name = rng.choice(list(CODECS))
    if rng.random() < 1 / OVERSIZED_ONE_IN:
        return name, "oversized", bytes([wire.VERSION]) + b"\xc6" + b"\x00" * wire.MAX_BYTES
    if rng.random() < 0.2:
        return name, "wrong fields", bytes([wire.VERSION]) + values.wrong_fields(UNIONS[name])
    try:
        frame = CODECS[name].encode(values.message(UNIONS[name]))
    except WireError:  # too large for the wire: it cannot be sent
        return name, "garbage", b""
    kind = rng.choice(list(MUTATIONS))
    return name, kind, MUTATIONS[kind](rng, bytearray(frame))


def fuzz_frames(count: int, seed: int) -> Outcome:
    """Decode so many frames."""
    rng = Random(seed)
    values = Values(rng)
    outcome = Outcome()
    for _ in range(count):
        name, kind, frame = make_frame(rng, values)
        began = time.perf_counter()
        try:
            CODECS[name].decode(frame)
            outcome.decoded += 1
        except WireError:
            outcome.refused[kind] += 1
        except BaseException as error:  # noqa: BLE001 - finding these is what this is for
            outcome.broke.append(f"{kind}: {error!r}: {frame[:200]!r}")
        outcome.seconds += time.perf_counter() - began
        outcome.frames += 1
    return outcome


# -- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Exit code 0 when nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames for the decoder")
    parser.add_argument("--messages", type=int, default=200_000, help="valid messages for controllers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    fuzz_frames(2000, options.seed - 1)  # so that what is made once is not taken for growth
    fuzz_controller(2000, options.seed - 1)
    before = rss_mb()
    frames = fuzz_frames(options.frames, options.seed)
    between = rss_mb()
    controllers = fuzz_controller(options.messages, options.seed)
    after = rss_mb()
    refused = sum(frames.refused.values())
    print(f"{frames.frames} frames: {frames.decoded} decoded, {refused} refused, {len(frames.broke)} broke the decoder")
    print(f"   {frames.seconds / max(frames.frames, 1) * 1e6:.1f} µs each; memory {before:.0f} MB → {between:.0f} MB")
    print(f"   refused by kind: {dict(frames.refused.most_common())}")
    print(f"{controllers.messages} messages to {controllers.lives} controllers: {len(controllers.broke)} broke one")
    print(f"   {controllers.actions} actions; at most {controllers.most_agents} agents known; memory → {after:.0f} MB")
    print(f"   phases reached: {dict(controllers.phases.most_common())}")
    for line in [*frames.broke, *controllers.broke][:20]:
        print("BROKE", line)
    if options.json:
        results = {"frames": vars(frames), "controllers": vars(controllers), "rss_mb": [before, between, after]}
        options.json.write_text(json.dumps(results, indent=1, default=str))
    return 1 if frames.broke or controllers.broke else 0


if __name__ == "__main__":
    sys.exit(main())
