#!/usr/bin/env python3
"""Whether the vendors' real libraries have the names that native/intercept stands before; no GPU is needed.

    scripts/real_symbols.py /some/folder            # NCCL, the CUDA runtime and cuBLAS; about 1.6 GB are downloaded
    scripts/real_symbols.py /some/folder --torch    # and the CUDA build of torch: which of its calls come to us (5 GB)

Everything goes into that folder, and is not downloaded again. The working environment keeps its own torch. Exit code 1:
a name is missing that the newest NCCL, or a release of CUDA, should have, has other parameters there, or torch does not
call us. The driver is part of no wheel: its names and parameters are looked up in cuda.h.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from resilio_hpc.native import intercept

NCCL = {"nvidia-nccl-cu12": ("2.21.5",), "nvidia-nccl-cu13": ("2.28.9", "2.32.3")}
CUDA = {"12": {"nvidia-cuda-runtime-cu12": "12.9.79", "nvidia-cublas-cu12": "12.9.1.4"},
        "13": {"nvidia-cuda-runtime": "13.0.96", "nvidia-cublas": "13.1.0.3",
               "nvidia-cuda-crt": "13.0.88"}}  # fmt: skip
TORCH = "torch==2.11.0"
LIMIT_S = 3600.0
Sizes = Mapping[str, tuple[int, ...]]
WANTED = {
    "nccl": ("ncclAllReduce", "ncclCommSplit", "ncclGroupEnd"),
    "gloo": ("enqueue", "finish"),
    "cuda": ("__cudaLaunchKernel", "cudaGraphLaunch", "cudaStreamSynchronize", "cudaStreamEndCapture"),
    "cublas": ("cublasGemmEx", "cublasGemmStridedBatchedEx", "cublasLtMatmul"),
}  # some of what torch has to call through us
SOURCES = Path(__file__).resolve().parents[1] / "native" / "intercept"
SIZES = {
    "long|u?int64_t|size_t|CUdeviceptr": 8, "dim3": 12, "ncclUniqueId|unique_id": 128,
    "int|u?int32_t|enum|cublasOperation_t|cudaDataType(_t)?|cublasComputeType_t|cublasGemmAlgo_t|CUdevice|"
    "CUstreamCaptureMode|ncclDataType_t|ncclRedOp_t": 4,
}  # fmt: skip
PROTOTYPE = re.compile(
    r"\b(?:ncclResult_t|cudaError_t|CUresult|cublasStatus_t)\s+(?:\w+API\s+)?(\w+)\s*\(([^;{]*?)\)\s*;", re.DOTALL
)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True, timeout=LIMIT_S)


def exported(library: str | Path, version: str = "") -> set[str]:
    """Return the functions that a library defines. ``version``: those of this one."""
    argv = ["nm", "-D", "--defined-only", str(library)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    found = [line.split()[-1] for line in said.splitlines() if line.split()[-2] in "TW"]
    return {name.partition("@")[0] for name in found if not version or name.rpartition("@")[2] == version}


def unpacked(folder: Path, package: str, version: str) -> Path:
    """Return the folder of a release of a wheel, downloaded where it is not there."""
    there = folder / f"{package}-{version}"
    if not there.exists():
        pip("download", "--no-deps", "-d", str(folder), f"{package}=={version}")
        (wheel,) = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(there, [name for name in archive.namelist() if name.endswith(".h") or ".so" in name])
        wheel.unlink()
    return there


def parameters(headers: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of each function's parameters."""
    found: dict[str, tuple[int, ...]] = {}
    for header in headers:
        text = re.sub(r"/\*.*?\*/|//[^\n]*|^#[^\n]*", "", header.read_text(), flags=re.DOTALL | re.MULTILINE)
        for name, words in PROTOTYPE.findall(text):
            found.setdefault(name, sizes_of(words))
    return found


def sizes_of(words: str) -> tuple[int, ...]:
    """Return the size of each parameter in a list, bytes; default values such as ``__dv(0)`` are none."""
    bare = re.sub(r"\([^()]*\)", "", words).strip()
    return () if bare in ("", "void") else tuple(map(size_of, bare.split(",")))


def size_of(parameter: str) -> int:
    """Return a parameter's size: what is no number, enumeration or structure is a pointer."""
    if re.search(r"[*\[]", parameter):
        return 8
    for pattern, size in SIZES.items():
        if re.search(rf"\b({pattern})\b", parameter):
            return size
    return 8


def ours(family: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of our functions' parameters, as the preprocessor leaves them."""
    argv = ["cc", "-E", "-P", str(SOURCES / f"{family}.c")]
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"\bresult ((?:nccl|cu|__cu)\w+)\s*\(([^;{]*?)\);", text, re.DOTALL)
    return {name: sizes_of(words) for name, words in found}


def check_nccl(folder: Path) -> bool:
    """Print which names each release lacks, and those with other parameters."""
    names, right, missing = ours("nccl"), True, set()
    for package, versions in NCCL.items():
        for version in versions:
            there = unpacked(folder, package, version)
            (library,), (header,) = there.rglob("libnccl.so*"), there.rglob("nccl.h")
            missing = set(names) - exported(library)
            known = parameters([header])
            other = [name for name, sizes in names.items() if known.get(name, sizes) != sizes]
            right &= not other
            lacks = f", without {', '.join(sorted(missing))}" if missing else ""
            print(f"NCCL {version}: {len(names) - len(missing)} of our {len(names)} functions{lacks}")
            for name in other:
                print(f"  {name} has other parameters there: {known[name]}, here {names[name]}")
    return right and not missing  # of the newest


def told(where: str, names: Iterable[str], present: set[str], here: Sizes, known: Sizes) -> bool:
    """Print which of our functions are there, and with the same sizes of parameters where these are declared."""
    names = sorted(names)
    missing = [name for name in names if name not in present]
    declared = {name: bare for name in names if (bare := re.sub(r"_pt[sd][sz]$", "", name)) in known}
    other = [name for name, bare in declared.items() if known[bare] != here[name]]
    found = len(names) - len(missing)
    print(f"{where}: {found} of our {len(names)} functions; parameters of {len(declared)} are declared")
    for name in (*missing, *other):
        print(f"  {name} is missing, or has other parameters")
    return not missing and not other


def check_cuda(folder: Path) -> bool:
    """Print what each release of CUDA has of our functions, with the same version and parameters of the same sizes."""
    here = {
        re.sub(r"_of_\d+$", "", name): sizes for family in ("cuda", "cublas") for name, sizes in ours(family).items()
    }
    right = True
    for release, wheels in CUDA.items():
        roots = [unpacked(folder, package, version) for package, version in wheels.items()]
        headers = [header for root in roots for header in sorted(root.rglob("*.h"))]
        known = parameters(headers)
        for name, family in (("cudart", "cuda"), ("cublas", "cublas"), ("cublasLt", "cublas")):
            version = f"lib{name}.so.{release}"
            (file,) = (file for root in roots for file in root.rglob(version))
            names = exported(str(intercept.library(family)), version)
            right &= bool(names) and told(version, names, exported(file, version), here, known)
        (header,) = (header for header in headers if header.name == "cuda.h")
        words = set(re.findall(r"\bcu[A-Z]\w+", header.read_text()))
        words |= {f"{word}{own}" for word in words for own in ("_ptsz", "_ptds")}  # made by macros
        driver = [name for name in here if re.match(r"cu[A-Z]", name)]
        right &= told(f"cuda.h of {release}", driver, words, here, known)
    return right


def check_torch(folder: Path) -> bool:
    """Print which calls of the CUDA build of torch the loader binds to our libraries."""
    there, trace = folder / "torch", folder / "trace"
    if not (there / "torch").exists():
        pip("install", "--no-compile", "--target", str(there), TORCH)
    libraries = [str(intercept.library(family)) for family in ("nccl", "gloo", "cuda", "cublas")]
    environment = {**os.environ, "PYTHONPATH": str(there), "LD_PRELOAD": ":".join(libraries), "LD_BIND_NOW": "1",
                   "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(trace)}  # fmt: skip
    subprocess.run([sys.executable, "-c", "import torch; print(torch.__version__)"], env=environment, check=True,
                   timeout=600)  # fmt: skip
    lines = [line for file in folder.glob("trace.*") for line in file.read_text(errors="replace").splitlines()]
    for file in folder.glob("trace.*"):
        file.unlink()
    bound = {(Path(library).stem.partition(".")[0], symbol) for library in libraries for line in lines
             if f"to {library}" in line and (symbol := line.rpartition("`")[2].partition("'")[0])
             and not symbol.startswith("resilio_")}  # fmt: skip
    right = True
    for family, wanted in WANTED.items():
        names = sorted(symbol for where, symbol in bound if where == family)
        right &= all(any(word in name for name in names) for word in wanted)
        print(f"{TORCH} (CUDA): {len(names)} names are bound to our {family} library")
        if family != "gloo":  # C++
            print(f"  {' '.join(names)}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", action="store_true", help="the CUDA build of torch, too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    right = check_nccl(options.folder)
    right &= check_cuda(options.folder)
    if options.torch:
        right &= check_torch(options.folder)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
