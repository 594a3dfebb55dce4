"""The input of fetchers: the node's files, its GPUs' library, the site's settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.extras import how_to_get
from resilio_hpc.prolog_epilog.base.check import Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.isolated import Mark
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles


def nvml_module() -> Any:
    """Return nvidia-ml-py's module, which has NVIDIA's names. Raises Unreadable where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise Unreadable(f"nvidia-ml-py is not installed: {how_to_get('pynvml')}") from error


@dataclass(frozen=True)
class NodeView:
    """The node as a fetcher sees it, below ``root``. ``target``: the file system or directory to look at."""

    settings: Mapping[str, Thresholds] = field(default_factory=dict)
    root: Path = Path("/")
    nvml: Callable[[], Any] = nvml_module
    target: str = ""
    mark: Mark = lambda _: None

    @property
    def files(self) -> NodeFiles:
        return NodeFiles(self.root, self.mark)


def boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's name for this boot; "" where it cannot be read."""
    try:
        return NodeFiles(root).text("/proc/sys/kernel/random/boot_id").strip()
    except ResilioError:
        return ""


def uptime_s(root: Path = Path("/")) -> float:
    """Return seconds since boot, including those in suspend. Raises Unreadable."""
    text = NodeFiles(root).text("/proc/uptime")
    try:
        return float(text.split()[0])
    except (IndexError, ValueError) as error:
        raise Unreadable(f"/proc/uptime: {text[:40]!r}") from error
