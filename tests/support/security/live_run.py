"""What is known of the launch that the tests look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    """A live run. ``run_id`` as in run.json; ``local``: its directories in /tmp and /dev/shm."""

    path: Path
    secret: bytes
    pid: int
    local: tuple[Path, ...]

    def processes(self) -> list[int]:
        """Every process of the launch: its descendants."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except OSError:  # it has ended
                    continue
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found
