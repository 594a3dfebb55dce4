"""Only the C extension is declared here; everything else is in setup.cfg."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "resilio_hpc.native._memory",
            ["native/memory.c"],
            extra_compile_args=["-O3"],
            py_limited_api=False,
        )
    ]
)
