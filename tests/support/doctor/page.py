"""The tables of docs/doctor.md, made from the registry of checks and the table of Slurm's settings.

python -m tests.support.doctor.page     # write them again
"""

from __future__ import annotations

from resilio_hpc.doctor import registry, slurm_settings
from tests.support.environments import ROOT

PAGE = ROOT / "docs" / "doctor.md"


def checks() -> str:
    """A row for each check."""
    rows = [
        f"| `{one.name}`{' *' if one.needed else ''} | {one.looks_at} | {one.matters} | {one.helps} |"
        for one in registry.CHECKS
    ]
    return "\n".join(["| Check | Looks at | Why | What helps |", "|---|---|---|---|", *rows])


def settings() -> str:
    """A row for each setting of Slurm."""
    rows = [
        f"| `{row.name}` | {row.state.value} | {_when(row)} | {row.means} | {row.todo} |"
        for row in slurm_settings.table()
    ]
    return "\n".join(["| Setting | Is a | Where it is | Means | To do |", "|---|---|---|---|---|", *rows])


def _when(row: slurm_settings.SlurmSetting) -> str:
    also = [f"`{name}` {_words(rule)}" for name, rule in row.when.items()]
    return ", and ".join([_words(row.fails_if), *also])


def _words(rule: str) -> str:
    kind, _, rest = rule.partition(" ")
    words = {"is": " or ".join(f"`{one}`" for one in rest.split("|")), "lacks": f"without `{rest}`", "set": "is set",
             "zero": "0", "unlimited": "without a limit", "below": f"below {rest}"}  # fmt: skip
    return words[kind]


def written(text: str) -> str:
    """The page with the tables of now."""
    for name, table in (("checks", checks()), ("settings", settings())):
        before, rest = text.split(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->{rest.split(f'<!-- end of {name} -->')[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
