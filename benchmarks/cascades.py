"""How often the judge of cascades names the rank or node that failed first, beside the older rule. Simulated.

python benchmarks/cascades.py [--cases 100] [--sizes 8,64,256,1024] [--first 0] [--show]

Cases come from `tests/support/diagnose/cascades`: faults of twelve kinds, ranks in tensor-, pipeline- and data-parallel
groups, gloo, NCCL and MPI, clocks that are milliseconds to seconds wrong, lost texts and reports. Half of them are
judged when all ranks have ended, half a second after the first end that is known. The older rule takes the earliest end
that does not read like an echo, on uncorrected clocks. Time: of judging all ends of one cascade, texts included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from resilio_hpc.diagnose.cascade.verdict import judge
from tests.support.diagnose.cascade_score import OUTCOMES, deaths_of, older_is_right, outcome
from tests.support.diagnose.cascades import FAULTS, cascade


def _row(name: str, found: Counter[str]) -> str:
    cases = sum(found[name] for name in OUTCOMES)
    cells = [f"{100 * found[name] / cases:.1f}" for name in OUTCOMES]
    return f"| {name} | {cases} | {' | '.join(cells)} | {100 * found['older'] / cases:.1f} |"


def _table(title: str, rows: dict[str, Counter[str]]) -> None:
    print(f"\n| {title} | cases | {' | '.join(f'{name}, %' for name in OUTCOMES)} | older rule right, % |")
    print(f"|{'---|' * (len(OUTCOMES) + 3)}")
    for name, found in rows.items():
        print(_row(name, found), flush=True)


def _judging_time(ranks: int, fault: str = "killed") -> float:
    """Return the seconds that one judgement of so many ends takes."""
    case = next(one for seed in range(1, 99, 2) if (one := cascade(fault, ranks, seed)).library == "gloo")
    began = time.process_time()
    judge(deaths_of(case), case.addresses, case.size)
    return time.process_time() - began


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="of each fault, in worlds up to 64 ranks; a third above")
    parser.add_argument("--sizes", default="8,64,256,1024")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--show", action="store_true", help="name the cases that were not right")
    options = parser.parse_args()
    sizes = [int(word) for word in options.sizes.split(",")]
    of_fault = {fault: Counter[str]() for fault in FAULTS}
    of_size = {f"{size} ranks": Counter[str]() for size in sizes}
    of_view = {"all ends known": Counter[str](), "the first second": Counter[str]()}
    everything = Counter[str]()
    for size in sizes:
        for fault in FAULTS:
            for number in range(options.cases if size <= 64 else options.cases // 3):
                seed = options.first + number
                case = cascade(fault, size, seed)
                if not case.reports:
                    continue  # nothing has been heard: there is nothing to judge
                found = outcome(case, deaths_of(case))
                older = older_is_right(case)
                view = "all ends known" if case.complete else "the first second"
                for counts in (of_fault[fault], of_size[f"{size} ranks"], of_view[view], everything):
                    counts[found] += 1
                    counts["older"] += older
                if options.show and found != "right":
                    print(f"{found}: cascade({fault!r}, {size}, {seed})")
    _table("fault", of_fault)
    _table("size", of_size)
    _table("known", of_view)
    _table("all", {"all": everything})
    for ranks in (1024, 16384):
        print(f"judging {ranks} ends: {_judging_time(ranks):.3f} s of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
