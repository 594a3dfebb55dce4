"""Which room of the package may import which: the table, and its drawing in docs/architecture.md.

python -m tests.support.rooms     # write the drawing again
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.environments import ROOT
from tests.support.sources import parsed, walked

PAGE = ROOT / "docs" / "architecture.md"
FACE = "(face)"  # a package's own modules, above its rooms; the __init__ of a package is one of them
NO_FACE = "(none)"

# Package → room → the rooms of that package that it may import. A room below a room has a dotted name.
ALLOWED: Mapping[str, Mapping[str, str]] = {
    "launch": {
        "supervisor": "cli resize chain allocation notify rundir protocol config process",
        "cli": "resize chain allocation workers workers.forking gpus config",
        "agent": (
            "agent.snapshots agent.decisions chain controller controller.facts consensus workers workers.forking "
            "workers.mpi notify gpus rundir protocol config process"
        ),
        "agent.snapshots": "agent.decisions workers protocol config process",
        "agent.decisions": "consensus workers protocol config",
        "resize": "chain rundir config process",
        "chain": "allocation rundir protocol config process",
        "allocation": "rundir config process",
        "controller": (
            "controller.members controller.checkpoints controller.faults controller.facts consensus rundir protocol "
            "config process"
        ),
        "controller.members": "controller.checkpoints controller.facts environment protocol config",
        "controller.checkpoints": "controller.facts protocol config",
        "controller.faults": "controller.facts consensus rundir protocol config",
        "controller.facts": "rundir protocol config",
        "consensus": "protocol",
        "workers.mpi": "workers workers.forking rundir protocol process",
        "workers": "workers.forking workers.output rundir protocol config process",
        "workers.forking": "process",
        "workers.output": "protocol config",
        "notify": "rundir protocol process",
        "rundir": "protocol config process",
        "gpus": "process",
        "environment": "process",
        "config": "protocol process",
        "protocol": "",
        "process": "",
    },
    "ckpt": {
        FACE: "coordination restore replication snapshot tiers store format state devices",
        "dcp": "coordination saver restore replication tiers store snapshot format state",
        "convert": "restore replication store format state",
        "coordination": "saver store snapshot format",
        "saver": "restore replication tiers store format",
        "restore": "replication tiers store snapshot format state",
        "replication": "store snapshot format devices",
        "tiers": "store format",
        "store": "format state",
        "snapshot": "format state devices",
        "format": "state",
        "state": "devices",
        "devices": "",
    },
    "slurm": {
        FACE: "submit",
        "runs": "chain client",
        "submit": "node_faults chain orders client",
        "node_faults": "drain orders client",
        "drain": "orders client",
        "orders": "client",
        "chain": "client",
        "client": "",
    },
    "autoparallel": {
        FACE: "search measure base",
        "report": "search measure cost model base",
        "search": "measure cost model base",
        "measure": "cost model base",
        "cost": "model base",
        "model": "base",
        "base": "",
    },
    "cli": {
        FACE: "plan ckpt health common",
        "plan": "common",
        "ckpt": "common",
        "nodes": "common",
        "health": "common",
        "check_nodes": "common",
        "drill": "common",
        "site": "plan common",
        "common": "",
    },
    "prolog_epilog": {
        "daemon": "drain run base",
        "hooks": "run base",
        "drain": "run base",
        "run": "checks base",
        "checks": "base",
        "base": "",
    },
    "diagnose": {FACE: "", "cascade": "causes hangs", "causes": "", "hangs": "", "slow": "hangs"},
    "report": {
        "page": f"chain {FACE} accounting",
        "chain": f"{FACE} accounting",
        FACE: "accounting",
        "accounting": "",
    },
    "train": {FACE: "validation", "validation": ""},
    "devtools": {"demo": "devcluster", "devcluster": ""},
    "drills": {FACE: "script", "script": ""},
}
DRAWN = ("launch", "ckpt", "slurm", "autoparallel", "prolog_epilog", "report")


def folder(package: str) -> Path:
    """Where the modules of a package are."""
    return (ROOT / "resilio_hpc" / package).resolve()


def modules(package: str) -> dict[str, Path]:
    """Dotted name below the package → file; "" is the package's own __init__."""
    found = {}
    for path in sorted(folder(package).rglob("*.py")):
        parts = path.relative_to(folder(package)).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(package: str, module: str, known: Mapping[str, Path]) -> str:
    """The room that a module of a package is in."""
    is_folder = module in known and known[module].name == "__init__.py"
    room = module if is_folder else module.rpartition(".")[0]
    return room or FACE


def imports(package: str) -> dict[str, set[str]]:
    """Module → modules of the same package that it imports, also inside functions and for types alone."""
    known, prefix = modules(package), f"resilio_hpc.{package}."
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = {
            _longest(whole.removeprefix(prefix), known) for whole in _names(parsed(path)) if whole.startswith(prefix)
        }
        found[name] = {target for target in targets if target and target != name}
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    for node in walked(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _longest(name: str, known: Mapping[str, Path]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def arrows(package: str) -> dict[tuple[str, str], list[str]]:
    """(importing room, imported room) → the imports behind it."""
    known = modules(package)
    found: dict[tuple[str, str], list[str]] = {}
    for name, targets in imports(package).items():
        for target in targets:
            pair = room_of(package, name, known), room_of(package, target, known)
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append(f"{name} imports {target}")
    return found


def allowed(package: str) -> set[tuple[str, str]]:
    """The pairs of the table."""
    return {(room, other) for room, others in ALLOWED[package].items() for other in others.split()}


def drawing() -> str:
    """The packages as Mermaid charts: an arrow that follows from others is left out."""
    return "\n\n".join(_chart(package) for package in DRAWN)


def _chart(package: str) -> str:
    below = {room: set(others.split()) for room, others in ALLOWED[package].items()}
    reach: dict[str, set[str]] = {}

    def reached(room: str) -> set[str]:
        if room not in reach:
            reach[room] = set().union(*({other} | reached(other) for other in below[room]))
        return reach[room]

    lines = [f"`{package}`:", "", "```mermaid", "flowchart TD"]
    for room in below:
        direct = [other for other in below[room] if not any(other in reached(between) for between in below[room])]
        lines += [f"    {_node(room)} --> {_node(other)}" for other in sorted(direct)]
    return "\n".join([*lines, "```"])


def _node(room: str) -> str:
    return (
        'face["its own modules"]' if room == FACE else room.replace(".", "_") + (f'["{room}"]' if "." in room else "")
    )


def written(text: str) -> str:
    """The page with the drawing of now."""
    begin, end = "<!-- rooms -->\n", "<!-- end of rooms -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{drawing()}\n{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
