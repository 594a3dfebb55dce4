#!/usr/bin/env python3
"""Frames found by coverage: libFuzzer (``pip install atheris``) looks for those that reach new lines of the decoder.

    python benchmarks/wire_fuzz_coverage.py                     # 500,000 frames
    python benchmarks/wire_fuzz_coverage.py --runs 20000 --seed 7

Instrumented is the Python code that a frame reaches: the codec, the bounds that messages check themselves, node lists,
host lists, memberships. The decoder may answer with a message or with WireError; a message can be encoded and decoded
again to the same, and the node it names can be looked up. The corpus lives in a folder that is removed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(
    include=["resilio_hpc.core.wire", "resilio_hpc.launch", "resilio_hpc.slurm.client.hostlist"]
):
    from resilio_hpc.core import wire
    from resilio_hpc.core.errors import WireError
    from resilio_hpc.launch.protocol import messages as m
    from resilio_hpc.launch.protocol.membership import Membership, has_quorum
from wire_fuzz import CODECS, UNIONS
from wire_fuzz_values import Values

SEEDS = 300
MAX_FRAME = 4096


def use(message: Any) -> None:
    """Do with a message what is done before its content is judged."""
    membership = getattr(message, "membership", None)
    if isinstance(membership, Membership):
        nodes = sorted(membership.nodes)
        for node in nodes[:3]:
            membership.endpoint(node)
        has_quorum(membership, nodes)
    for state in (getattr(message, "last", None), getattr(message, "state", None)):
        if isinstance(state, m.RoundState):
            m.world_of(state.members)


def decode(data: bytes) -> None:
    """One frame: its first byte says which way it goes."""
    if not data:
        return
    codec = CODECS["to agent" if data[0] & 1 else "to controller"]
    try:
        message = codec.decode(data[1:])
    except WireError:
        return
    use(message)
    again = codec.encode(message)
    assert codec.encode(codec.decode(again)) == again, "what was decoded does not say the same again"


def write_seeds(folder: Path, seed: int) -> None:
    """Write valid frames of every type to begin with."""
    values = Values(Random(seed))
    for number in range(SEEDS):
        name = ("to controller", "to agent")[number % 2]
        try:
            frame = CODECS[name].encode(values.message(UNIONS[name]))
        except WireError:
            continue
        (folder / f"{number}").write_bytes(bytes([number % 2]) + frame)


def main() -> None:
    """End with libFuzzer's exit code: 0 when nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resilio-fuzz-") as folder:
        write_seeds(Path(folder), options.seed)
        child = os.fork()
        if child == 0:
            limits = [f"-runs={options.runs}", f"-seed={options.seed}", f"-max_len={MAX_FRAME}", "-rss_limit_mb=1024"]
            atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", "-print_final_stats=1", folder], decode)
            atheris.Fuzz()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for broken in sorted(Path(folder).glob("crash-*")):
            print(f"BROKE {broken.read_bytes()!r}")
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"exit code {status}, most memory {peak_mb:.0f} MB, messages of version {wire.VERSION}")
    sys.exit(status)


if __name__ == "__main__":
    main()
