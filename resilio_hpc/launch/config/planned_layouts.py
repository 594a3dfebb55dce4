"""The layouts that the planner chose for each number of ranks that a run may have (``--layout auto``). Pure.

They are made once, when a job's launch begins, and are part of the options that each agent gets: a round needs no
planner, and all agents of a round come to the same layout without a word between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.launch.config.flags import world_flag

AUTO = "auto"


@dataclass(frozen=True)
class PlannedLayout:
    """The layout of so many ranks on GPUs of one type.

    ``values``: its numbers by the names of their variables (``tp``: RESILIO_TP); ``why``: how it was chosen.
    """

    ranks: int
    gpu: str
    values: tuple[tuple[str, str], ...]
    why: str

    @property
    def degrees(self) -> tuple[int, int]:
        """Return (tensor, pipeline) parallel."""
        found = dict(self.values)
        return int(found.get("tp", "1")), int(found.get("pp", "1"))

    @property
    def micro_batch(self) -> int:
        return int(dict(self.values).get("micro_batch", "1"))


@dataclass(frozen=True)
class LayoutPlan:
    """What the planner said. ``rows``: one for each type of GPU and number of ranks, where a layout fits.

    ``gpus``: types, the one with the least memory first; ``gpu_of``: (node, type), without the nodes of the most
    frequent type, ``common_gpu``; ``global_batch``: sequences of an iteration; ``standing``: the layout whose tensor
    and pipeline parallel are kept where there is no row, None where the plan says nothing.
    ``failed``: why there are no rows.
    """

    rows: tuple[PlannedLayout, ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_of: tuple[tuple[str, str], ...] = ()
    common_gpu: str = ""
    global_batch: int = 0
    standing: PlannedLayout | None = None
    failed: str = ""

    def gpu_among(self, nodes: Sequence[str]) -> str:
        """Return the type that a round of these nodes is planned for: of theirs, the one with the least memory."""
        other = dict(self.gpu_of)
        types = {other.get(node, self.common_gpu) for node in nodes}
        return next((gpu for gpu in self.gpus if gpu in types), self.common_gpu)

    def of(self, ranks: int, gpu: str) -> PlannedLayout | None:
        """Return the layout of so many ranks; None where none was planned and nothing stands.

        Without a row, tensor and pipeline parallel stand, data parallel takes the rest, and the micro-batch is the
        largest one up to the planned one that keeps the global batch.
        """
        for row in self.rows:
            if (row.ranks, row.gpu) == (ranks, gpu):
                return row
        return None if self.standing is None else self._stands(self.standing, ranks, gpu)

    def _stands(self, kept: PlannedLayout, ranks: int, gpu: str) -> PlannedLayout:
        tensor, pipeline = kept.degrees
        why = self.failed or f"the planner has no layout for {ranks} ranks" + (f" with {gpu}" if gpu else "")
        values = dict(kept.values)
        data_parallel, over = divmod(ranks, tensor * pipeline)
        if not over and self.global_batch and "micro_batch" in values:
            copies = data_parallel // int(values.get("cp", "1")) or 1
            if micro := _largest(self.global_batch, copies, kept.micro_batch):
                values |= {"micro_batch": str(micro), "accumulation": str(self.global_batch // (copies * micro))}
            else:
                why += f"; {copies} copies cannot share a global batch of {self.global_batch}"
        return PlannedLayout(ranks, gpu, tuple(values.items()), f"{why}: tp={tensor} x pp={pipeline} is kept")


def layout_fields(layout: PlannedLayout, before: PlannedLayout | None, number: int) -> dict[str, object]:
    """Return what the ledger's ``layout`` says of a round. ``before``: the layout of the round before, where known."""
    tensor, pipeline = layout.degrees
    fields: dict[str, object] = {
        "round": number, "ranks": layout.ranks, "gpu": layout.gpu, "tp": tensor, "pp": pipeline,
        "dp": layout.ranks // (tensor * pipeline), "micro_batch": layout.micro_batch, "why": layout.why,
        "planned": dict(layout.values),
    }  # fmt: skip
    if before is not None:
        was = before.degrees
        fields["before"] = {
            "ranks": before.ranks, "gpu": before.gpu, "tp": was[0], "pp": was[1],
            "dp": before.ranks // (was[0] * was[1]), "micro_batch": before.micro_batch,
        }  # fmt: skip
    return fields


def _largest(batch: int, copies: int, most: int) -> int:
    """Return the largest micro-batch up to ``most`` with which so many copies make the batch; 0: there is none."""
    return next((micro for micro in range(most, 0, -1) if batch % (copies * micro) == 0), 0)


@dataclass(frozen=True)
class PlanningOptions:
    """What ``--layout auto`` asks the planner, and its answer, which the launch adds before it starts agents."""

    layout_options: tuple[str, ...] = world_flag(
        "with --layout auto: what resilio plan is asked, in one word: 'llama3-70b --global-batch 1024'",
        (),
        raw=None,
        reads=None,
        metavar="WORDS",
    )
    plan: LayoutPlan = LayoutPlan()
