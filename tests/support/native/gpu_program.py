"""Builds the fakes of CUDA, cuBLAS and NCCL, and the program that uses them."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
RELEASES = (12, 13)
LIMIT_S = 120.0


def build(folder: Path, compiler: str) -> Path:
    """Return the program, built in a folder that holds the fake libraries, too."""

    def cc(output: str, source: str, *flags: str) -> None:
        always = ("-O2", "-Wall", "-Wno-unused-function", "-o", output)
        argv = [compiler, *always, str(HERE / source), *flags, "-ldl", "-pthread"]
        subprocess.run(argv, cwd=folder, check=True, timeout=LIMIT_S)

    def library(name: str, source: str, *flags: str, versioned: bool = False) -> None:
        script = folder / f"{name}.map"
        script.write_text(f"{name} {{ global: *; }};\n")
        extra = [f"-Wl,--version-script={script}"] if versioned else []
        cc(name, source, "-shared", "-fPIC", f"-Wl,-soname,{name}", *flags, *extra)

    library("libcuda.so.1", "fake_cuda.c")
    library("libnccl.so.2", "fake_nccl.c")
    for release in RELEASES:
        said = f'-DFAKE_RELEASE=" of {release}"'
        runtime, light, blas = (f"lib{name}.so.{release}" for name in ("cudart", "cublasLt", "cublas"))
        library(runtime, "fake_cudart.c", said, versioned=True)
        library(light, "fake_cublas.c", said, "-DLT", versioned=True)
        library(blas, "fake_cublas.c", said, "-L.", f"-l:{light}", versioned=True)
        linked = ("-L.", *(f"-l:{name}" for name in (runtime, blas, light, "libcuda.so.1")))
        cc(f"module{release}.so", "gpu_module.c", "-shared", "-fPIC", *linked)
        if release == RELEASES[-1]:
            cc("program", "gpu_program.c", *linked, "-l:libnccl.so.2")
    library("libamdhip64.so.6", "fake_hip.c")
    cc("module_hip.so", "gpu_module.c", "-DHIP", "-shared", "-fPIC", "-L.", "-l:libamdhip64.so.6")
    cc("empty.so", "empty_wrappers.c", "-shared", "-fPIC")
    return folder / "program"
