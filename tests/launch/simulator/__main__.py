"""``python -m simulator SEED``: replay one. ``python -m simulator FIRST COUNT [AT_MOST]``: search."""

from __future__ import annotations

import sys
import time

from simulator.run import simulate
from simulator.search import Found, search


def main(argv: list[str]) -> int:
    numbers = [int(text) for text in argv]
    if len(numbers) == 1:
        outcome = simulate(numbers[0], tell=True)
        print("\n".join(outcome.story))
        return 1 if outcome.violation else 0
    began = time.monotonic()
    said = [began]

    def progress(found: Found) -> None:
        if time.monotonic() > said[0] + 10:
            said[0] = time.monotonic()
            print(f"{found.runs} runs, {len(found.violations)} violations, {said[0] - began:.0f} s", flush=True)

    found = search(numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 1, progress)
    for outcome in found.violations:
        print(f"seed {outcome.seed}: {outcome.violation}")
    print(f"{found.runs} runs in {time.monotonic() - began:.1f} s: {dict(found.verdicts.most_common())}")
    print(f"felt: {dict(found.felt.most_common())}; at most {found.most_events} events in a run")
    if found.violations:
        print("\n".join(simulate(found.violations[0].seed, tell=True).story))
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
