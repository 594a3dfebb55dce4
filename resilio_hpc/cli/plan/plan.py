"""``resilio plan``: its commands; a command's module is imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import textwrap
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

COMMANDS = {
    "search": ("resilio_hpc.cli.plan.search", "every layout of every shape that the cluster offers, ranked"),
    "explain": ("resilio_hpc.cli.plan.explain", "one layout: its pipeline in time, parts of an iteration, memory"),
    "predict": ("resilio_hpc.cli.plan.predict", "time and memory of the layouts of a table"),
    "model": ("resilio_hpc.cli.plan.model", "a model's parameters, FLOPs, and its cuts into pipeline stages"),
    "profile": ("resilio_hpc.cli.plan.profile", "what this machine's GPU reaches, operator by operator"),
    "profile-comm": ("resilio_hpc.cli.plan.profile_comm", "latency and bandwidth of collectives, measured in a job"),
    "measure": ("resilio_hpc.cli.plan.measure", "the few short runs that tell most of a cluster: chosen, submitted"),
    "calibrate": ("resilio_hpc.cli.plan.calibrate", "parameters of a cluster, from a few measured iterations"),
}
"""By name: its module, which has ``main(argv) -> int``, and a line on it."""


def main(argv: Sequence[str]) -> int:
    """Run a command. Exit code: the command's; 2 after a mistake of the user.

    A model in place of a command means search.
    """
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print("usage: resilio plan COMMAND …\n       resilio plan MODEL …      (as resilio plan search)\n")
        width = terminal.columns(200)
        for command, (_, text) in COMMANDS.items():
            head = f"  {command:<12}  "
            print("\n".join(textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head))))
        print("\nresilio plan COMMAND --help tells more.")
        return 0 if argv else 2
    if name not in COMMANDS:
        _check_model(name)
        name, rest = "search", list(argv)
    return int(importlib.import_module(COMMANDS[name][0]).main(rest))


def _check_model(name: str) -> None:
    """Raise UsageError for what is neither a command nor a model."""
    from resilio_hpc.autoparallel.model.presets import presets

    if name.startswith("-") or name.lower() in presets() or "/" in name or "." in name or Path(name).is_dir():
        return
    near = difflib.get_close_matches(name, COMMANDS, 1, 0.5) or difflib.get_close_matches(
        name.lower(), presets(), 1, 0.5
    )
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise UsageError(f"{printable(repr(name), 60)} is neither a model nor a command of resilio plan: {hint}")
