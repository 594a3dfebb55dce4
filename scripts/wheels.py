"""Make the sdist and all wheels in dist/, and check each of them.

    python scripts/wheels.py [--machines x86_64 aarch64] [--no-emulation]

One wheel of each architecture serves CPython 3.11 and later (abi3). 3.10 has one of its own where setup.cfg allows that
version and it is found. zig compiles for glibc 2.28, whatever this machine has. Needs Linux on x86-64, a Python from
3.11 on with headers, those of libfabric, and a registry of packages. All that is fetched stays in .setup/wheels. Wheels
of this machine are installed for every Python that is found. Those for aarch64 run under qemu-user. That and an arm64
Python come from Debian's packages (apt-get; nothing is installed).
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from interpreters import ROOT, WORK, Interpreter, environment, interpreters, run, say

DIST = ROOT / "dist"
CHECK = ROOT / "scripts" / "wheel_check.py"
GLIBC = "2.28"
BUILD_TOOLS = ("build==1.6.1", "setuptools==80.9.0", "wheel==0.48.0")
TOOLS = (*BUILD_TOOLS, "ziglang==0.17.1", "auditwheel==6.8.2", "abi3audit==0.0.26")
NEEDS = ("numpy", "h5py", "rich", "pyzmq", "cryptography", "msgspec", "typing_extensions", "tomli")
"""What an installation without torch has."""
TYPES = {"void *": "VOID_P", "long": "LONG", "long long": "LONG_LONG", "size_t": "SIZE_T", "wchar_t": "WCHAR_T"} | {
    f"{name}_t": f"{name.upper()}_T" for name in ("off", "pid", "time")
}
"""Types whose sizes the headers of a Python state."""
EMULATED = (  # Debian packages of an arm64 Python
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1", "libstdc++6"),
    *("libssl3", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1"),
)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_sdist(tools: Path) -> Path:
    """Return the unpacked sdist. It is made from the tracked files: no build of this checkout gets in."""
    copy, source = WORK / "checkout", WORK / "source"
    for folder in (copy, source, DIST):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for name in run(["git", "ls-files"]).splitlines():
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    run([tools / "python", "-m", "build", "--sdist", "--no-isolation", "-o", DIST], cwd=copy)
    (sdist,) = DIST.glob("*.tar.gz")
    run(["tar", "-xzf", sdist, "-C", source, "--strip-components", "1"])
    say(f"made {sdist.name}")
    return source


def make_wheel(source: Path, tools: Path, python: Path, machine: str, suffix: str) -> Path:
    """Return a wheel of the sources, compiled for that machine.

    ``suffix``: of the names of its extensions; "": that of this machine, or of abi3.
    """
    include = run([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]).strip()
    compiler = f"{tools / 'python'} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    # The headers of this machine's Python serve for another machine only if its types have the same sizes.
    sizes = WORK / "sizes.c"
    checks = [f'_Static_assert(sizeof({kind}) == SIZEOF_{name}, "{name}");' for kind, name in TYPES.items()]
    sizes.write_text("\n".join(["#include <Python.h>", *checks, ""]))
    run([*compiler.split(), f"-I{include}", "-c", sizes, "-o", WORK / "sizes.o"])
    built = WORK / "built"
    for folder in (source / "build", built):
        shutil.rmtree(folder, ignore_errors=True)
    cross = {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared -Wl,-s",
        "CFLAGS": f"-g0 -I{libfabric_headers()}",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    if suffix:
        cross["SETUPTOOLS_EXT_SUFFIX"] = suffix
    run([python, "-m", "build", "--wheel", "--no-isolation", "-o", built], cwd=source, extra=cross)
    (wheel,) = built.glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"  # "inspect" holds it against what is in the wheel
    name = run([tools / "python", "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel]).split()[-1]
    return Path(shutil.move(built / name, DIST / name))


def libfabric_headers() -> Path:
    """Return a folder with this machine's headers of libfabric, which are the same for every machine, and no others."""
    found = [Path("/usr/include/rdma/fabric.h"), *Path("/usr/include/rdma").glob("fi_*.h")]
    if len(found) == 1:
        sys.exit("wheels: libfabric's headers are missing (apt-get install libfabric-dev)")
    folder = WORK / "include"
    (folder / "rdma").mkdir(parents=True, exist_ok=True)
    for header in found:
        shutil.copy2(header, folder / "rdma")
    return folder


def inspect(wheel: Path, tools: Path) -> None:
    """Say what the wheel holds. Ends the program where its tag promises more, or something is missing in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    extensions = sorted(name for name in names if re.search(r"/native/(_|intercept/)\w+\.\S*so$", name))
    sources = sorted(str(path.relative_to(ROOT / "native").with_suffix("")) for path in (ROOT / "native").rglob("*.c"))
    found = sorted(re.sub(r".*/native/_?([\w/]+)\..*", r"\1", name) for name in extensions)
    if found != sources or any(".libs/" in name for name in names):
        sys.exit(f"wheels: {wheel.name} has the extensions {found}, not {sources}, or libraries of others")
    if "-abi3-" in wheel.name:
        run([tools / "abi3audit", "--strict", wheel])
    shown = " ".join(run([tools / "auditwheel", "show", wheel]).split())
    policy = re.search(r'the following platform tag: "manylinux_2_(\d+)_(\w+)"', shown)
    if policy is None or int(policy[1]) > int(GLIBC.split(".")[1]) or not wheel.stem.endswith(policy[2]):
        sys.exit(f"wheels: {wheel.name} is none: {shown}")
    versions = sorted(set(re.findall(r"GLIBC_([\d.]+)", shown)), key=lambda text: [*map(int, text.split("."))])
    needs = f"glibc {versions[-1]}" if versions else "no versions of glibc"
    say(f"made {wheel.name}: {wheel.stat().st_size >> 10} KiB, needs {needs}; auditwheel: manylinux_2_{policy[1]}")


# ---- checking --------------------------------------------------------------------------------------------------------


def check_here(python: Interpreter, what: Path, is_portable: bool = False, others: Sequence[Path] = ()) -> Path:
    """Install it in a clean environment and check it; return a checkpoint of it.

    ``is_portable``: without a compiler, from the sdist. ``others``: checkpoints that it must read.
    """
    name = f"{python.name}{'-portable' if is_portable else ''}"
    programs = environment(python, f"check-{name}", [*NEEDS, *BUILD_TOOLS] if is_portable else NEEDS)
    extra = {"PATH": str(programs), "CC": "/bin/false"} if is_portable else {}
    run(
        [programs / "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", what],
        extra=extra,
    )
    kept = WORK / "checkpoints" / name
    words = ["--save", kept, "--restore", *others, *(["--portable"] if is_portable else [])]
    said = run([programs / "python", CHECK, *words], cwd=Path("/"))
    say(f"{what.name}{' without a compiler' if is_portable else ''}: {said.splitlines()[-1]}")
    return kept


def emulated_python(python: Interpreter) -> Path | None:
    """Return a program that runs a Python for arm64, or None, having said why there is none."""
    folder = WORK / "arm64"
    program = folder / "python3.11"
    if program.exists():
        return program
    if shutil.which("apt-get") is None:
        say("aarch64 was not run: qemu-user and an arm64 Python are taken from Debian, and there is no apt-get")
        return None
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("lists/partial", "cache/archives/partial", "packages", "root"):
        (folder / part).mkdir(parents=True)
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=root"]
    options += [f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache", "Dir::State::status=/dev/null"]
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    run([*apt, "update"])
    run([*apt, "download", *EMULATED], cwd=folder / "packages")
    run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "qemu-user-static"], cwd=folder / "packages")
    for package in (folder / "packages").iterdir():
        run(["dpkg", "-x", package, folder / ("qemu" if "qemu" in package.name else "root")])
    # A script, since the kernel runs no arm64 program by itself, and a saver is started by the name of its Python.
    program.write_text(
        f"#!/bin/sh\nexport PYTHONHOME={folder}/root/usr\n"
        f'exec {folder}/qemu/usr/bin/qemu-aarch64-static -L {folder}/root -0 "$0" '
        f'{folder}/root/usr/bin/python3.11 "$@"\n'
    )
    program.chmod(0o755)
    return program


def check_emulated(python: Interpreter, wheel: Path, others: Sequence[Path]) -> Path | None:
    """Do as ``check_here`` for a wheel for aarch64, under qemu-user."""
    program = emulated_python(python)
    if program is None:
        return None
    site = WORK / "arm64" / "site"
    shutil.rmtree(site, ignore_errors=True)
    pip = [python.program, "-m", "pip", "install", "--quiet", "--target", site, "--only-binary=:all:"]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 26, 27, 28)]
    target = [*platforms, "--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none"]
    run([*pip, *target, *NEEDS])
    run([*pip, *target, "--no-deps", wheel])
    kept = WORK / "checkpoints" / "arm64"
    said = run([program, CHECK, "--save", kept, "--restore", *others], cwd=Path("/"), extra={"PYTHONPATH": str(site)})
    say(f"{wheel.name} under qemu-user: {said.splitlines()[-1]}")
    return kept


def main() -> None:
    """Make and check everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", default=["x86_64", "aarch64"], choices=["x86_64", "aarch64"])
    parser.add_argument("--no-emulation", action="store_true", help="do not run the wheels for aarch64")
    options = parser.parse_args()
    if platform.machine() != "x86_64":
        sys.exit("wheels: runs on x86-64")
    found = list(interpreters())
    newer = [python for python in found if python.version >= (3, 11)]
    older = [python for python in found if python.version == (3, 10)]
    if not newer:
        sys.exit("wheels: needs a Python from 3.11 on, with its headers")
    WORK.mkdir(parents=True, exist_ok=True)
    tools = environment(newer[0], "tools", TOOLS, is_kept=True)
    source = make_sdist(tools)
    is_for_older = "python_requires = >=3.10" in (ROOT / "setup.cfg").read_text()
    wheels: dict[tuple[str, bool], Path] = {}  # by machine, and whether for 3.10
    for machine in options.machines:
        wheels[machine, False] = make_wheel(source, tools, tools / "python", machine, "")
        if is_for_older and older:
            builder = environment(older[0], "tools-3.10", BUILD_TOOLS, is_kept=True) / "python"
            suffix = f".cpython-310-{machine}-linux-gnu.so"
            wheels[machine, True] = make_wheel(source, tools, builder, machine, suffix)
    if not is_for_older or not older:
        say(
            "no wheel for CPython 3.10: "
            + ("it is not found here" if is_for_older else "setup.cfg asks for a later one")
        )
    for wheel in wheels.values():
        inspect(wheel, tools)
    shutil.rmtree(WORK / "checkpoints", ignore_errors=True)
    (WORK / "checkpoints").mkdir()
    (sdist,) = DIST.glob("*.tar.gz")
    kept = [check_here(newer[0], sdist, is_portable=True)]
    for python in found:
        wheel = wheels.get(("x86_64", python in older))
        if wheel is not None:
            kept.append(check_here(python, wheel, others=kept))
    arm64 = wheels.get(("aarch64", False))
    if arm64 is not None and not options.no_emulation and (emulated := check_emulated(newer[0], arm64, kept)):
        programs = WORK / f"check-{newer[0].name}-portable" / "bin"
        run([programs / "python", CHECK, "--portable", "--restore", emulated, *kept], cwd=Path("/"))
        say("without extensions, checkpoints of all of these are read")


if __name__ == "__main__":
    main()
