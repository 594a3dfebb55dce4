"""For how long a save blocks training: ours beside each framework's own, in turn within one run.

    python benchmarks/frameworks.py --megabytes 300 --repeats 7

Two ranks on this machine, in the environment of ``scripts/frameworks_setup.sh``; a framework that is missing there is
left out with one line. The state is ``--megabytes`` of weights and AdamW's moments: the same in both ranks under DDP
(Lightning, Trainer, Ignite), half in each under ZeRO 3 (DeepSpeed) and FSDP2 (DCP). A save is ours when the snapshot is
taken: it is committed in the background, as that of DCP's ``async_save``; those of the frameworks are files when they
return. Neither syncs them to the disk, and ours does, in the background. Each save begins when the one before is done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from measure import Series, machine, shown

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
FRAMEWORKS = ("lightning", "transformers", "ignite", "deepspeed", "dcp")
LIMIT_S = 600.0


def measured(framework: str, megabytes: int, repeats: int, directory: Path) -> list[Series]:
    """Return the series of one framework's methods; none where it cannot be run."""
    script = str(ROOT / "benchmarks" / "framework_saves.py")
    command = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(PYTHON.parents[1] / "extensions"),
    }  # fmt: skip
    ran = subprocess.run(
        [*command, framework, str(megabytes), str(repeats), str(directory)],
        capture_output=True, text=True, timeout=LIMIT_S, env=environment,
    )  # fmt: skip
    if ran.returncode:
        print(f"{framework}: not measured: {ran.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return []
    found: dict[str, Series] = {}
    for line in ran.stdout.splitlines():
        if line.startswith('{"method"'):
            save = json.loads(line)
            series = found.setdefault(save["method"], Series(save["method"], framework))
            series.values_s.append(save["blocked_s"])
    return list(found.values())


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--directory", type=Path, help="where checkpoints go (default: the temporary directory)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: list[Series] = []
    for framework in args.frameworks:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            found += measured(framework, args.megabytes, args.repeats, Path(directory))
    if args.json:
        print(json.dumps({"machine": machine(), "megabytes": args.megabytes, "saves": [s.summary() for s in found]}))
        return
    table = Table("training", "save", "blocked, median (s)", "shortest to longest (s)", "saves")
    for series in found:
        spread = f"{shown(min(series.values_s))} to {shown(max(series.values_s))}"
        table.add_row(series.settings, series.name, shown(series.median_s()), spread, str(len(series.values_s)))
    Console().print(table)


if __name__ == "__main__":
    main()
