"""Write what is made from the code: docs/reference.md (options, commands, names), the table of docs/metrics.md.

.venv/bin/python scripts/reference.py
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from resilio_hpc.alerts.alert import rules
from resilio_hpc.cli.common.commands import COMMANDS
from resilio_hpc.launch.cli.option_table import GROUPS
from resilio_hpc.metrics.schema import markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, METRICS, ALERTS = DOCS / "reference.md", DOCS / "metrics.md", DOCS / "alerts.md"
MODULES = ("train", "ckpt", "ckpt.dcp", "slurm", "autoparallel")


def page() -> str:
    """Return the whole page."""
    parts = [
        "# Reference\n\nMade from the code by `scripts/reference.py`. How to use it: [the pages by task](README.md).",
        "## resilio-launch\n\n`resilio-launch [OPTIONS] SCRIPT|MODULE|COMMAND [ARGUMENTS …]`",
        *(_options(str(group), flags) for group, flags in GROUPS),
        _table("## resilio", ("command", ""), [(f"`resilio {one.name}`", one.summary) for one in COMMANDS]),
        "`resilio COMMAND --help` has its options and examples.",
        "Events: [the ledger](ledger.md#the-ledger).",
        "## Python",
        *(_module(name) for name in MODULES),
    ]
    return "\n\n".join(parts) + "\n"


def with_metrics(text: str) -> str:
    """Return the page with the metrics of now."""
    begin, end = "<!-- metrics -->\n", "<!-- end of metrics -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{markdown()}\n{end}", text, flags=re.DOTALL)


def with_alerts(text: str) -> str:
    """Return the page with the alerts of now."""
    begin, end = "<!-- alerts -->\n", "<!-- end of alerts -->"
    lines = ["| Alert | Severity | Fires | Limit | Source |", "|---|---|---|---|---|"]
    for name, rule in rules().items():
        limit = f"`{rule.option}` {rule.limit:g} {rule.unit}" if rule.limit is not None else ""
        lines.append(f"| `{name}` | {rule.severity} | {rule.what} | {limit} | {rule.source} |")
    table = "\n".join(lines)
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{table}\n{end}", text, flags=re.DOTALL)


def _options(title: str, flags: Any) -> str:
    rows = []
    for flag in flags:
        value = f" {flag.metavar or '|'.join(flag.choices or ()) or 'VALUE'}" if flag.type is not None else ""
        rows.append((f"`{', '.join(flag.names)}{value}`", flag.help.replace("%%", "%")))
    return _table(f"### {title[0].upper()}{title[1:]}", ("option", ""), rows)


def _module(name: str) -> str:
    module = importlib.import_module(f"resilio_hpc.{name}")
    rows = []
    for public in sorted(module.__all__):
        value = getattr(module, public)
        first = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ") if callable(value) else repr(value)
        rows.append((f"`{public}{_arguments(value)}`", first))
    return _table(f"### resilio_hpc.{name}", ("name", ""), rows)


def _arguments(value: Any) -> str:
    if not callable(value):
        return ""
    names = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name.startswith("_"):
            continue
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.kind is parameter.KEYWORD_ONLY and not any(name.startswith("*") for name in names):
            names.append("*")
        given = parameter.default is parameter.empty
        names.append(text if given else f"{text}={parameter.default!r}")
    return f"({', '.join(names)})"


def _table(title: str, head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |" for left, right in [head, *((_cell(a), _cell(b)) for a, b in rows)]]
    return "\n".join([title, "", lines[0], "|---|---|", *lines[1:]])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    METRICS.write_text(with_metrics(METRICS.read_text()))
    ALERTS.write_text(with_alerts(ALERTS.read_text()))
