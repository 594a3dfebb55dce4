"""Only the C extensions are declared here (native/NAME.c is resilio_hpc.native._NAME); the rest is in setup.cfg."""

from pathlib import Path

from setuptools import Extension, setup

HEADERS = sorted(map(str, Path("native").glob("*.h")))

setup(
    ext_modules=[
        Extension(
            f"resilio_hpc.native._{source.stem}",
            [str(source)],
            depends=HEADERS,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        )
        for source in sorted(Path("native").glob("*.c"))
    ]
)
