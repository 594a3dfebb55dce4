"""What sampling a node costs: processor time of the sampling process for each sample, as a share of a processor.

.venv/bin/python benchmarks/metrics_cost.py [--samples 30] [--ranks 8] [--gpus 8]

Ranks are processes of this machine, each with a full ring of calls. GPUs are a fake of NVML, so the driver's own time
is not in it. The first sample, in which libraries are imported, is shown apart.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the fake

from resilio_hpc.metrics.messages import RankFacts, SampleRequest, Setup
from resilio_hpc.metrics.sampler import Sampler
from resilio_hpc.prolog_epilog.base.node import NodeView
from tests.support.environments import ROOT
from tests.support.prolog_epilog.fake_nvml import FakeNvml

INTERVAL_S = 10.0
WRITER = ROOT / "tests" / "support" / "native" / "ring_writer.c"


def ranks(folder: Path, count: int) -> tuple[list[subprocess.Popen[bytes]], list[RankFacts]]:
    """Return stopped processes with full rings, and what an agent tells of them."""
    subprocess.run([shutil.which("cc") or "cc", "-O2", "-pthread", "-o", folder / "writer", WRITER], check=True)
    processes, facts = [], []
    for number in range(count):
        ring = folder / f"ring{number}"
        process = subprocess.Popen(
            [folder / "writer", "forever", "3"], env={"RESILIO_CALLS": str(ring)}, stdout=subprocess.DEVNULL
        )
        processes.append(process)
        facts.append(RankFacts(number, process.pid, str(ring), 5, 0.1))
    time.sleep(0.5)
    for process in processes:
        process.send_signal(19)  # SIGSTOP: the rings are full, and they leave the processors to the sampler
    return processes, facts


def tree(folder: Path, gpus: int) -> NodeView:
    """Return a node with so many GPUs on its PCI bus."""
    for number in range(gpus):
        device = folder / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    nvml = FakeNvml(count=gpus)
    return NodeView(root=folder, nvml=lambda: nvml)


def main() -> None:
    """Measure, and print one line for each kind of sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        processes, facts = ranks(folder, options.ranks)
        try:
            setup = Setup("n1", "abc", name, name, INTERVAL_S, textfile=str(folder / "text"))
            sampler = Sampler(setup, tree(folder, options.gpus))
            spent = []
            for number in range(options.samples + 1):
                before = time.process_time()
                sampler.sample(SampleRequest(number, tuple(facts)))
                spent.append(time.process_time() - before)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    first, *rest = spent
    mean = sum(rest) / len(rest)
    print(f"{options.ranks} ranks, {options.gpus} GPUs: first sample {first * 1000:.1f} ms of processor time")
    print(f"later ones {mean * 1000:.2f} ms each (most {max(rest) * 1000:.2f}): {mean / INTERVAL_S:.3%} of a processor "
          f"at {INTERVAL_S:g} s")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
