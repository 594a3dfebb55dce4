"""``resilio plan profile``: measure the rates of this machine's GPU, operator by operator."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.autoparallel.measure import profile_file
from resilio_hpc.autoparallel.measure.compute_samples import KINDS, Shape
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import require

_HELP = """Measured are matrix products (bf16) of several shapes, causal attention forward and backward, layer
normalisation, and a step of fused AdamW; each as the median of repeats, on one GPU that no other process uses. It takes
about half a minute, and 6 GB of the GPU's memory. What FILE says of collectives (resilio plan profile-comm) stays.
Predictions take from it the part of the peak that products and attention reach, and that of the memory bandwidth.

examples:
  resilio plan profile --out cluster.h5                               on a node with a GPU
  srun -N1 --gpus=1 resilio plan profile --out cluster.h5             the same, through Slurm
  resilio plan profile --out cluster.h5 --dry-run                     what would be measured; needs no GPU
  resilio plan profile --device cpu --out try.h5                      tries the way; predictions do not use it

exit codes:
  0  FILE was written (--dry-run: nothing was)
  2  there is no GPU, or a mistake in the command line
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the help."""
    parser = Parser(
        prog="resilio plan profile",
        description="Measure a transformer's operators on one GPU, for resilio plan predict --profile.",
        epilog=_HELP,
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.h5", help="the profile")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda (default), or cpu for trying")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured, write nothing")
    options = parser.parse_args(argv)
    out = options.out.absolute()
    if not out.parent.is_dir():
        raise UsageError(f"--out {options.out}: there is no directory {out.parent}")
    if out.exists():
        profile_file.read(out)  # an error is reported now rather than when all is measured
    require("torch", "measuring operators")
    from resilio_hpc.autoparallel.measure import compute_bench

    shapes = compute_bench.shapes_of(options.device)
    if options.dry_run:
        return _told(options.device, shapes, options.json)
    device = compute_bench.device_of(options.device)
    name = compute_bench.device_name(device)
    if name == "cpu":
        print("resilio: a CPU is measured, for trying: predictions do not use it", file=sys.stderr)
    samples = compute_bench.measure(device, shapes, lambda text: print(text, file=sys.stderr, flush=True))
    if not samples:
        raise UsageError(f"nothing could be measured on {name}: is its memory in use? (nvidia-smi)")
    about = profile_file.about("torch", compute_bench.torch_version(), name, [socket.gethostname()], os.environ)
    profile_file.write_compute(out, samples, about)
    if options.json:
        rows = [{"kind": s.kind, "shape": s.shape, "time_s": s.median_s, "rate": s.rate} for s in samples]
        print(json.dumps({"device": name, "samples": rows}, indent=1))
    return 0


def _told(device: str, shapes: Mapping[str, Sequence[Shape]], as_json: bool) -> int:
    """Print what would be measured."""
    if as_json:
        print(json.dumps({"device": device, "would_measure": shapes}, indent=1))
        return 0
    for kind, rows in shapes.items():
        sizes = ", ".join("x".join(map(str, shape)) for shape in rows)
        print(f"{kind:<16} {' x '.join(KINDS[kind].columns)}: {sizes}")
    return 0
