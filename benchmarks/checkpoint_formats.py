"""What it costs to bring a step to torch.save, safetensors and DCP, and back: ours beside doing it by hand.

    python benchmarks/checkpoint_formats.py [--megabytes 1000] [--tensors 4] [--rounds 3] [--directory DIR]

By hand: restore all of it and save it with the other library; load all of it with that and save it as a step. Each runs
in a process of its own. Seconds are without the import of libraries; memory is the peak of what was resident (VmHWM),
libraries included.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from measure import machine, shown

TIMEOUT_S = 600.0
TARGETS = {"torch": "model.pt", "safetensors": "model.safetensors", "dcp": "model"}
MAKE = """
state = {f"w{number}": torch.rand(megabytes * 250_000 // tensors // 1000, 1000) for number in range(tensors)}
Checkpointer("steps").save(1, state).wait()
"""
OURS = {
    "export": "main(['ckpt', 'export', 'steps', target])",
    "import": "main(['ckpt', 'import', target, 'back', '1'])",
}
SAVES = {
    "torch": "torch.save(state, target)",
    "safetensors": "safetensors.torch.save_file(state, target)",
    "dcp": "dcp.save(state, checkpoint_id=target, no_dist=True)",
}
LOADS = {
    "torch": "state = torch.load(target, weights_only=True)",
    "safetensors": "state = safetensors.torch.load_file(target)",
    "dcp": "state = {f'w{number}': torch.empty(megabytes * 250_000 // tensors // 1000, 1000) for number in "
    "range(tensors)}\ndcp.load(state, checkpoint_id=target, no_dist=True)",
}
HEAD = """
import sys, time, warnings
warnings.simplefilter("ignore")
megabytes, tensors, target, form, by_hand = {megabytes}, {tensors}, {target!r}, {form!r}, {by_hand}
from resilio_hpc.cli.main import main
if by_hand or form != "safetensors":
    import torch
    import torch.distributed.checkpoint as dcp
    from resilio_hpc.ckpt import Checkpointer
if by_hand and form == "safetensors":
    import safetensors.torch
began = time.monotonic()
"""
TAIL = """
seconds = time.monotonic() - began
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, peak * 1024 / 1e6)
"""


def by_hand(act: str, form: str) -> str:
    if act == "export":
        return f"state = Checkpointer('steps').restore()[1]\n{SAVES[form]}"
    return f"{LOADS[form]}\nCheckpointer('back').save(1, state).wait()"


def run(code: str, directory: Path, **names: object) -> tuple[float, float]:
    """One process: seconds, and megabytes."""
    text = HEAD.format(**names) + code + TAIL
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    seconds, megabytes = done.stdout.splitlines()[-1].split()
    return float(seconds), float(megabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="size of the state (1000)")
    parser.add_argument("--tensors", type=int, default=4, metavar="N", help="how many of one size (4)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of each (3)")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    options = parser.parse_args()
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    directory = Path(tempfile.mkdtemp(prefix="formats-", dir=options.directory))
    sizes = {"megabytes": options.megabytes, "tensors": options.tensors}
    try:
        run(MAKE, directory, **sizes, target="", form="", by_hand=True)
        for _ in range(options.rounds):
            for form, target in TARGETS.items():
                for act in ("export", "import"):
                    for who, code in (("by hand", by_hand(act, form)), ("resilio ckpt", OURS[act])):
                        # an import finds what its own side has exported
                        where = f"{who.split()[0]}-{target}"
                        if act == "export":
                            shutil.rmtree(directory / where, ignore_errors=True)
                            (directory / where).unlink(missing_ok=True)
                        shutil.rmtree(directory / "back", ignore_errors=True)
                        one = run(code, directory, **sizes, target=where, form=form, by_hand=who == "by hand")
                        found.setdefault((form, act, who), []).append(one)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    title = f"{options.megabytes} MB in {options.tensors} tensors; median of {options.rounds} processes"
    table = Table(title=title, title_justify="left")
    for column in ("", "", "", "s", "peak MB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for names, values in found.items():
        table.add_row(*names, *(shown(statistics.median(column)) for column in zip(*values, strict=True)))
    print(machine())
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
