"""Only what is built from C is declared here; the rest is in setup.cfg.

native/NAME.c is the extension resilio_hpc.native._NAME. native/intercept/NAME.c is a library for LD_PRELOAD: no module.

One build serves CPython 3.11 and all later ones (abi3): from 3.11 on, the buffer protocol is in the limited API. Other
interpreters (3.10, free-threaded ones) get a build of their own. Without a compiler, or with RESILIO_NO_NATIVE=1, the
package has no extensions, and resilio_hpc.native takes its modules in Python. _fabric needs libfabric's headers, and
imports nowhere without them.
"""

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HEADERS = sorted(map(str, Path("native").glob("*.h")))
IS_LIMITED = (
    sys.implementation.name == "cpython"
    and sys.version_info >= (3, 11)
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
WITHOUT = os.environ.get("RESILIO_NO_NATIVE", "") not in ("", "0")

setup(
    ext_modules=[
        Extension(
            f"resilio_hpc.native._{source.stem}",
            [str(source)],
            depends=HEADERS,
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if IS_LIMITED else [],
            py_limited_api=IS_LIMITED,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            libraries=["dl"] if source.stem == "fabric" else [],
            optional=True,
        )
        for source in sorted(Path("native").glob("*.c"))
        if not WITHOUT
    ]
    + [
        Extension(
            f"resilio_hpc.native.intercept.{source.stem}",
            [str(source)],
            depends=sorted(map(str, (*source.parent.glob("*.h"), *source.parent.glob("*.map")))),
            py_limited_api=IS_LIMITED,
            # C++ exceptions of what is wrapped pass through
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-fexceptions"],
            # releases of the vendor's functions, where a library stands before several
            extra_link_args=[f"-Wl,--version-script={script}"]
            if (script := source.with_suffix(".map")).exists()
            else [],
            libraries=["dl", "pthread"],
            optional=True,
        )
        for source in sorted(Path("native/intercept").glob("*.c"))
        if not WITHOUT
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_LIMITED and not WITHOUT else {},
)
