"""Time and memory of given layouts: rows of a table in, the same rows with predictions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.autoparallel.cost import Problem
from resilio_hpc.autoparallel.hardware import Machines
from resilio_hpc.autoparallel.layout import Layouts
from resilio_hpc.autoparallel.rows import Case, case
from resilio_hpc.autoparallel.stack import Stacks
from resilio_hpc.autoparallel.transformer import Transformers
from resilio_hpc.core.errors import UsageError


def problem(cases: Sequence[Case]) -> Problem:
    """Cases as columns."""
    return Problem(
        Transformers.of([c.model for c in cases]),
        Layouts.of([c.layout for c in cases]),
        Machines.of([c.machine for c in cases]),
        Stacks.of([c.stack for c in cases]),
    )


@dataclass(frozen=True)
class Read:
    """Rows, understood or not: ``cases[i]`` belongs to row ``index[i]``; ``notes`` says of the others why."""

    cases: list[Case]
    index: list[int]
    notes: dict[int, str]


def read(rows: Sequence[Mapping[str, str]]) -> Read:
    done = Read([], [], {})
    for number, row in enumerate(rows):
        try:
            done.cases.append(case(row))
            done.index.append(number)
        except UsageError as error:
            done.notes[number] = str(error)
    return done
