"""What the kernel counts of a process and of a node. Each is a small file; what is missing counts as 0."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
NETWORK = Path("/sys/class/net")
_MOST_LEVELS = 12


def queued_ns(pid: int, proc: Path = PROC) -> int:
    """Return for how long the main thread could run and had no processor (schedstat)."""
    words = _text(proc / str(pid) / "schedstat").split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def throttled_ns(pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return for how long the control groups of a process, its own and those above, used up their processor quota."""
    found = 0
    for line in _text(proc / str(pid) / "cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        controllers = names.split(",")
        if not path.startswith("/") or ".." in path or (names and "cpu" not in controllers):
            continue
        root = next((cgroups / name for name in (names, "cpu") if names and (cgroups / name).is_dir()), cgroups)
        parts = path.strip("/").split("/") if path != "/" else []
        for depth in range(len(parts), 0, -1)[:_MOST_LEVELS]:
            stat = _counters(root.joinpath(*parts[:depth]) / "cpu.stat")
            found += stat.get("throttled_usec", 0) * 1000 + stat.get("throttled_time", 0)
    return found


def storage_us(proc: Path = PROC) -> int:
    """Return for how long some process of the node waited for storage (PSI)."""
    for line in _text(proc / "pressure" / "io").splitlines():
        if line.startswith("some ") and "total=" in line:
            total = line.rpartition("total=")[2].strip()
            return int(total) if total.isdigit() else 0
    return 0


def segments(proc: Path = PROC) -> tuple[int, int]:
    """Return how many TCP segments were sent, and sent again."""
    lines = [line.split() for line in _text(proc / "net" / "snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) < 2:
        return 0, 0
    found = dict(zip(lines[0], lines[1], strict=False))
    return tuple(int(found.get(name, "0")) if found.get(name, "0").isdigit() else 0
                 for name in ("OutSegs", "RetransSegs"))  # type: ignore[return-value]  # fmt: skip


def network_errors(network: Path = NETWORK) -> int:
    """Return the errors of all network devices, but not of loopback."""
    found = 0
    for device in _devices(network):
        for name in ("rx_errors", "tx_errors"):
            text = _text(device / "statistics" / name).strip()
            found += int(text) if text.isdigit() else 0
    return found


def _devices(network: Path) -> list[Path]:
    try:
        return [path for path in sorted(network.iterdir()) if path.name != "lo"][:64]
    except OSError:
        return []


def _counters(path: Path) -> dict[str, int]:
    lines = [line.split() for line in _text(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
