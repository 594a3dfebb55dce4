"""Replay a seed with its story, or search many seeds: see the package."""

from __future__ import annotations

import argparse
import sys
import time

import pytest

from tests.support.simulator.mutations import MUTATIONS
from tests.support.simulator.run import run
from tests.support.simulator.schedule import schedule
from tests.support.simulator.search import Found, search
from tests.support.simulator.shrink import shrink

SAY_EVERY_S = 10.0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("simulator", description="Replay a seed with its story, or search many seeds.")
    parser.add_argument("first", type=int, metavar="SEED")
    parser.add_argument("count", type=int, nargs="?", help="search so many seeds from SEED on")
    parser.add_argument("at_most", type=int, nargs="?", default=1, help="stop after so many that fail (1)")
    parser.add_argument("--mutation", choices=MUTATIONS, default="", metavar="NAME", help="plant a bug first")
    parser.add_argument("--shrink", action="store_true", help="leave out the faults that a failure does not need")
    return parser.parse_args(argv)


def _replay(seed: int, mutation: str, smallest: bool) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if mutation:
            MUTATIONS[mutation](patch)
        plan = schedule(seed)
        outcome = run(shrink(plan) if smallest else plan, tell=True)
    print("\n".join(outcome.story))
    return 1 if outcome.violation else 0


def main(argv: list[str]) -> int:
    asked = _arguments(argv)
    if asked.count is None:
        return _replay(asked.first, asked.mutation, asked.shrink)
    began = time.monotonic()
    said = began
    told = 0

    def progress(found: Found) -> None:
        nonlocal said, told
        for outcome in found.violations[told:]:
            print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
        told = len(found.violations)
        if time.monotonic() > said + SAY_EVERY_S:
            said = time.monotonic()
            print(f"{found.runs} runs, {len(found.violations)} violations, {said - began:.0f} s", flush=True)

    found = search(asked.first, asked.count, asked.at_most, progress, asked.mutation)
    print(f"{found.runs} runs in {time.monotonic() - began:.1f} s: {dict(found.verdicts.most_common())}")
    print(f"felt: {dict(found.felt.most_common())}; at most {found.most_events} events in a run")
    if found.violations:
        _replay(found.violations[0].seed, asked.mutation, True)
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
