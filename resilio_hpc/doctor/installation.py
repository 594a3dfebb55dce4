"""The installed package: interpreter, C extensions, the packages that it uses, torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import struct
import sys
from dataclasses import dataclass

import resilio_hpc
from resilio_hpc.core.extras import how_to_get
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, failed, notice, ok, warning
from resilio_hpc.doctor.gpus import device_files

_LEAST_PYTHON = (3, 10)


def interpreter(view: DoctorView) -> DoctorFinding:
    """Look at Python and the kernel."""
    machine = f"{platform.machine()}, Linux {platform.release()}"
    seen = f"resilio {resilio_hpc.__version__}, Python {platform.python_version()}, {machine}"
    if sys.version_info < _LEAST_PYTHON or struct.calcsize("P") != 8:
        return failed(
            seen,
            "This package needs a 64-bit Python 3.10 or newer.",
            "make the virtual environment with a newer Python, and install there",
        )
    return ok(seen)


def extensions(view: DoctorView) -> DoctorFinding:
    """Import the C extensions, and let one compute."""
    try:
        native = importlib.import_module("resilio_hpc.native")
    except ImportError as error:
        return failed(
            f"they cannot be imported: {error}",
            "Agents, snapshots and checkpoints need them.",
            "install the package again where a C compiler and Python's headers are: pip install --force-reinstall .",
        )
    if native.crc32c(b"123456789") != 0xE3069283:  # its check value, in every catalogue of CRCs
        return failed(
            "their checksum is wrong",
            "Checkpoints would be taken for damaged.",
            "install the package again on this kind of processor: pip install --force-reinstall .",
        )
    if native.why_portable:
        return warning(
            f"not used: {native.why_portable}",
            "Checkpoints are the same; saves and restores take longer.",
            "install a wheel, or install the package again where a C compiler and Python's headers are",
        )
    kinds = ("portable code", "an instruction for CRC32C", "wide carry-less products")
    available = importlib.import_module("resilio_hpc.native._memory").available
    return ok(f"they work; checksums by {kinds[min(available, 2)]}")


@dataclass(frozen=True)
class _Package:
    """A package. ``needed``: whether launches or checkpoints fail without it; else ``means``."""

    name: str
    module: str
    means: str = ""

    @property
    def needed(self) -> bool:
        return not self.means


_PACKAGES = (
    _Package("msgspec", "msgspec"),
    _Package("pyzmq", "zmq"),
    _Package("cryptography", "cryptography.hazmat.primitives.ciphers.aead"),
    _Package("numpy", "numpy"),
    _Package("h5py", "h5py"),
    _Package("rich", "rich.console"),
    _Package("psutil", "psutil", "nodes are not sampled, and memory is not watched"),
    _Package("submitit", "submitit", "there are no jobs from Python"),
    _Package("prometheus_client", "prometheus_client", "Prometheus cannot read samples"),
)


def packages(view: DoctorView) -> DoctorFinding:
    """Import every package that the product uses, but torch."""
    found, missing = [], []
    for package in _PACKAGES:
        view.mark(f"import {package.module}")
        try:
            importlib.import_module(package.module)
            found.append(f"{package.name} {_version(package.name)}")
        except Exception as error:  # noqa: BLE001 - a broken package raises anything at its import
            missing.append((package, f"{package.name} ({_why(error)})"))
    extra = [package for package, why in missing if how_to_get(package.name) and "not installed" in why]
    if len(extra) == len(missing):
        without = "".join(f"; without {one.name} {one.means}: {how_to_get(one.name)}" for one in extra)
        return ok(", ".join(found) + without)
    names = " ".join(package.name for package, _ in missing)
    seen = f"cannot be imported: {'; '.join(text for _, text in missing)}"
    todo = f"pip install --force-reinstall {names}"
    if any(package.needed for package, _ in missing):
        return failed(seen, "Launches, or their checkpoints, fail without.", todo)
    return warning(seen, f"Without: {', '.join(package.means for package, _ in missing)}.", todo)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def _why(error: BaseException) -> str:
    return "not installed" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}"


def torch(view: DoctorView) -> DoctorFinding:
    """Import torch, and ask it for CUDA and NCCL. Where there are GPUs, it has to reach them."""
    view.mark("import torch")
    try:
        module = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return notice(
                "not installed",
                "Programs without torch run with --no-torch; all others need it.",
                f"{how_to_get('torch')}, with the build of torch for your CUDA (pytorch.org tells which)",
            )
        return _broken_torch(error)
    except Exception as error:  # noqa: BLE001 - a torch that does not fit its libraries raises anything
        return _broken_torch(error)
    if getattr(module, "__file__", None) is None:  # a folder without a package in it
        return _broken_torch(ImportError(f"nothing is in {', '.join(getattr(module, '__path__', ()))}"))
    seen = f"torch {module.__version__}, {_accelerator(module)}"
    gpus = device_files()
    if gpus and module.version.cuda:
        view.mark("torch.cuda.init")
        try:
            module.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return failed(
                f"{seen}: it cannot use the GPUs: {error}",
                "Ranks that train on GPUs fail.",
                "install a torch for this driver's CUDA, or a newer driver (nvidia-smi names the newest CUDA)",
            )
    elif gpus and not getattr(module.version, "hip", None):
        return warning(
            f"{seen}, and this machine has {gpus} GPUs",
            "Ranks train on the CPU.",
            "pip install torch, the build for your CUDA (pytorch.org tells which)",
        )
    return ok(seen)


def _accelerator(module: object) -> str:
    version = module.version  # type: ignore[attr-defined]
    if not version.cuda:
        return f"ROCm {version.hip}" if getattr(version, "hip", None) else "for CPUs"
    try:
        nccl = ".".join(map(str, module.cuda.nccl.version()))  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        nccl = "missing"
    return f"CUDA {version.cuda}, NCCL {nccl}"


def _broken_torch(error: BaseException) -> DoctorFinding:
    return failed(
        f"it cannot be imported: {_why(error)}",
        "Every launch without --no-torch fails.",
        "install torch again, in a clean virtual environment: pip install --force-reinstall torch",
    )
