#!/usr/bin/env python3
"""Whether the vendors' real libraries have the names that native/intercept stands before; no GPU is needed.

    scripts/real_symbols.py /some/folder            # NCCL of three releases; about 0.5 GB are downloaded
    scripts/real_symbols.py /some/folder --torch    # and the CUDA build of torch: which of its calls come to us (5 GB)

Everything goes into that folder, and is not downloaded again. The working environment keeps its own torch. Exit code 1:
a name is missing that the newest NCCL should have, has other parameters there, or torch does not call us.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from resilio_hpc.native import intercept

NCCL = {"nvidia-nccl-cu12": ("2.21.5",), "nvidia-nccl-cu13": ("2.28.9", "2.32.3")}
TORCH = "torch==2.11.0"
LIMIT_S = 3600.0
SOURCE = Path(__file__).resolve().parents[1] / "native" / "intercept" / "nccl.c"
PROTOTYPE = re.compile(r"^ncclResult_t\s+(nccl\w+)\(([^;]*?)\);", re.MULTILINE | re.DOTALL)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True, timeout=LIMIT_S)


def exported(library: str | Path) -> set[str]:
    """Return the functions that a library defines."""
    argv = ["nm", "-D", "--defined-only", str(library)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    return {line.split()[-1].partition("@")[0] for line in said.splitlines() if line.split()[-2] in "TW"}


def unpacked(folder: Path, package: str, version: str) -> Path:
    """Return the folder of a release of NCCL, downloaded where it is not there."""
    there = folder / f"{package}-{version}"
    if not there.exists():
        pip("download", "--no-deps", "-d", str(folder), f"{package}=={version}")
        (wheel,) = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(there, [name for name in archive.namelist() if "nccl.h" in name or ".so" in name])
        wheel.unlink()
    return there


def parameters(header: Path) -> dict[str, int]:
    """Return how many parameters each function has."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    return {name: len(words.split(",")) for name, words in PROTOTYPE.findall(text)}


def ours() -> dict[str, int]:
    """Return how many parameters our functions have, as the preprocessor leaves them."""
    argv = ["cc", "-E", "-P", str(SOURCE)]
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"\bresult (nccl\w+)\s*\(([^;{]*?)\);", text, re.DOTALL)
    return {name: len(words.split(",")) for name, words in found}


def check_nccl(folder: Path) -> bool:
    """Print which names each release lacks, and those with other parameters."""
    names, right, missing = ours(), True, set()
    for package, versions in NCCL.items():
        for version in versions:
            there = unpacked(folder, package, version)
            (library,), (header,) = there.rglob("libnccl.so*"), there.rglob("nccl.h")
            missing = set(names) - exported(library)
            known = parameters(header)
            other = [name for name, count in names.items() if known.get(name, count) != count]
            right &= not other
            lacks = f", without {', '.join(sorted(missing))}" if missing else ""
            print(f"NCCL {version}: {len(names) - len(missing)} of our {len(names)} functions{lacks}")
            for name in other:
                print(f"  {name} has {known[name]} parameters there, {names[name]} here")
    return right and not missing  # of the newest


def check_torch(folder: Path) -> bool:
    """Print which calls of the CUDA build of torch the loader binds to our libraries."""
    there, trace = folder / "torch", folder / "trace"
    if not (there / "torch").exists():
        pip("install", "--no-compile", "--target", str(there), TORCH)
    libraries = [str(intercept.library(family)) for family in ("nccl", "gloo")]
    environment = {**os.environ, "PYTHONPATH": str(there), "LD_PRELOAD": ":".join(libraries), "LD_BIND_NOW": "1",
                   "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(trace)}  # fmt: skip
    subprocess.run([sys.executable, "-c", "import torch; print(torch.__version__)"], env=environment, check=True,
                   timeout=600)  # fmt: skip
    lines = [line for file in folder.glob("trace.*") for line in file.read_text(errors="replace").splitlines()]
    for file in folder.glob("trace.*"):
        file.unlink()
    bound = {(Path(library).stem.partition(".")[0], symbol) for library in libraries for line in lines
             if f"to {library}" in line and (symbol := line.rpartition("`")[2].partition("'")[0])}  # fmt: skip
    right = True
    for family, wanted in (("nccl", ("ncclAllReduce", "ncclCommSplit")), ("gloo", ("enqueue", "finish"))):
        names = sorted(symbol for where, symbol in bound if where == family)
        right &= all(any(word in name for name in names) for word in wanted)
        print(f"{TORCH} (CUDA): {len(names)} names are bound to our {family} library")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", action="store_true", help="the CUDA build of torch, too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    right = check_nccl(options.folder)
    if options.torch:
        right &= check_torch(options.folder)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
