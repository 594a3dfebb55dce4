"""The hooks that a site installs, and its lines of slurm.conf: texts, from settings. Pure, except ``install``."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import resilio_hpc
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import HealthError, UsageError
from resilio_hpc.prolog_epilog.base.reports import SPOOL
from resilio_hpc.prolog_epilog.run.cached_verdict import DIRECTORY
from resilio_hpc.slurm.node_faults.ledger import SYSTEM

TEMPLATES = Path(__file__).parent
HOOKS = ("prolog", "epilog", "task_prolog", "health_check")
INSTALLED = Path("/usr/local/lib/resilio")
UNIT = "resilio-health.service"
STANDARD_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class HookSettings:
    """A site's settings. ``package``: a folder for PYTHONPATH, "" where the interpreter needs none.

    ``path``: where commands such as scontrol are looked for; Slurm gives its health check none.
    """

    where: Path = INSTALLED
    directory: Path = DIRECTORY
    mode: Literal["observe", "enforce"] = "enforce"
    missing: Literal["pass", "fail"] = "pass"
    ttl_s: int = 900
    interval_s: int = 60
    python: str = sys.executable
    package: str = ""
    site: str = ""
    path: str = STANDARD_PATH


def search_path() -> str:
    """Return the standard path, with the directory of Slurm's commands here after it."""
    found = shutil.which("scontrol")
    folder = str(Path(found).parent) if found else ""
    return STANDARD_PATH if folder in ("", *STANDARD_PATH.split(":")) else f"{STANDARD_PATH}:{folder}"


def package_folder() -> str:
    """Return the folder for imports of this package, where this interpreter does not find it by itself (a checkout)."""
    folder = Path(resilio_hpc.__file__).resolve().parent.parent
    return "" if folder in (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")) else str(folder)


def render_hooks(settings: HookSettings) -> dict[str, str]:
    """Return file name → its whole text."""
    values = {
        "PATH": settings.path,
        "DIR": str(settings.directory),
        "MODE": settings.mode,
        "MISSING": settings.missing,
        "TTL_S": str(settings.ttl_s),
        "FRESH_S": str(settings.ttl_s // 3),
        "PYTHON": settings.python,
        "PACKAGE": settings.package,
        "SITE": settings.site,
    }
    hooks = {name: filled((TEMPLATES / f"{name}.sh").read_text(), values) for name in HOOKS}
    return {**hooks, UNIT: render_unit(settings)}


def filled(template: str, values: Mapping[str, str]) -> str:
    """Return the template with its settings replaced: lines such as ``TTL_S=900`` before the first command."""

    def line(found: re.Match[str]) -> str:
        return f"{found[1]}={shlex.quote(values[found[1]])}" if found[1] in values else found[0]

    head, separator, body = template.partition("\nset -u\n")
    return re.sub(r"^([A-Z_]+)=.*$", line, head, flags=re.MULTILINE) + separator + body


def render_conf(settings: HookSettings) -> list[str]:
    """Return slurm.conf's lines. Lines that a site has already, with other values, are only recommended (comments)."""
    return [
        f"Prolog={settings.where}/prolog",
        f"Epilog={settings.where}/epilog",
        f"TaskProlog={settings.where}/task_prolog",
        f"HealthCheckProgram={settings.where}/health_check",
        f"HealthCheckInterval={settings.interval_s}",
        "HealthCheckNodeState=ANY",
        # without it, another prolog that hangs does so for ever; from 25.05: PrologTimeout, EpilogTimeout
        "PrologEpilogTimeout=60",
    ]


def recommended() -> list[str]:
    """Return what to add to lines that a site has already."""
    return [
        "# PrologFlags: add Alloc, so that the prolog runs on all nodes of a job before it starts",
        "# SchedulerParameters: add nohold_on_prolog_fail, or a job whose prolog fails is held for ever",
    ]


def render_unit(settings: HookSettings) -> str:
    """Return the systemd unit of the node daemon. Without it, Slurm's health check starts the checks."""
    package = [f"Environment=PYTHONPATH={settings.package}"] if settings.package else []
    site = f" --site {settings.site}" if settings.site else ""
    command = f"{settings.python} -m resilio_hpc.cli.main health watch --directory {settings.directory}{site}"
    command += f" --drain {'act' if settings.mode == 'enforce' else 'observe'} --faults {SYSTEM} --reports {SPOOL}"
    return "\n".join(
        [
            "[Unit]",
            "Description=Node health for Slurm's prolog (resilio health watch)",
            "After=local-fs.target",
            "",
            "[Service]",
            *package,
            f"Environment=PATH={settings.path}",
            f"ExecStart={command}",
            "Restart=always",
            "RestartSec=10",
            "Nice=10",
            "MemoryMax=512M",
            "TasksMax=64",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def install(settings: HookSettings) -> list[Path]:
    """Write the files to ``settings.where``, each whole or not at all. Raises UsageError, HealthError."""
    if not settings.where.is_absolute():
        raise UsageError(f"--to {settings.where}: give an absolute path, since slurm.conf needs one")
    written = []
    try:
        settings.where.mkdir(0o755, parents=True, exist_ok=True)
        for name, text in render_hooks(settings).items():
            mode = 0o644 if name == UNIT else 0o755
            write_atomic(settings.where / name, text.encode(), mode=mode)
            written.append(settings.where / name)
    except OSError as error:
        raise HealthError(f"cannot write hooks to {settings.where}: {error.strerror}") from error
    return written
