"""One layout in detail, and its picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines, machine
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Offload, Recompute, parse_layout
from resilio_hpc.autoparallel.base.stack import Stacks
from resilio_hpc.autoparallel.cost.cost import Problem
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.autoparallel.model.transformer import Transformers
from resilio_hpc.autoparallel.report.explain import explain
from resilio_hpc.autoparallel.report.timeline import html, svg, text_lines
from resilio_hpc.autoparallel.search.layout_space import enumerate_layouts
from resilio_hpc.autoparallel.search.ranking import Training, find
from resilio_hpc.core.errors import UsageError

A100 = machine("A100")
TRAINING = Training(uniform(preset("gpt3-175b")), 64, shipped())
PLAIN = Layout(tp=8, pp=8, dp=1, micro_batch=1, global_batch=64, sequence_parallel=True, recompute=Recompute.FULL)
INTERLEAVED = replace(PLAIN, pp=4, dp=2, vpp=2)


def test_a_layout_is_read_as_it_is_written() -> None:
    layouts = enumerate_layouts(TRAINING.model, A100, 64, 64, TRAINING.space)
    rows = [layouts.row(number) for number in range(0, len(layouts), 7)]
    assert rows and all(parse_layout(str(row), 64) == row for row in rows)
    more = replace(rows[0], etp=2, head_layers=3, offload=Offload.BOTH)
    assert parse_layout(str(more), 64) == more
    assert parse_layout("tp=8,pp=2, sp", 16) == Layout(tp=8, pp=2, global_batch=16, sequence_parallel=True)


@pytest.mark.parametrize(
    "text", ["tp8-xx2", "tp8-tp4", "tp0", "zero4", "recompute-some", "offload-all", "mb", "full", "tp8.5"]
)
def test_what_is_no_layout_is_a_mistake(text: str) -> None:
    with pytest.raises(UsageError, match="layout"):
        parse_layout(text, 8)


def test_time_and_memory_are_those_of_the_search() -> None:
    for row, layout in ((0, find(TRAINING, A100, 64).layouts.row(0)),):
        found = explain(TRAINING, layout, A100)
        best = find(TRAINING, A100, 64)
        assert found.iteration_s == pytest.approx(float(best.cost.iteration[row]))
        assert max(stage.total for stage in found.stages) == pytest.approx(float(best.memory.device[row]))


@pytest.mark.parametrize("layout", [PLAIN, INTERLEAVED, replace(PLAIN, pp=1, dp=8), replace(PLAIN, pp=7, dp=1)])
def test_every_micro_batch_passes_every_stage_once_each_way(layout: Layout) -> None:
    found = explain(TRAINING, layout, A100)
    seen = {(one.stage, one.chunk, one.micro_batch, one.forward) for one in found.passes}
    assert len(seen) == len(found.passes) == layout.pp * layout.vpp * found.drawn * 2
    assert found.drawn <= layout.micro_batches and sum(stage.layers for stage in found.stages) == 96


def test_the_ends_of_the_pipeline_hold_what_the_memory_model_says() -> None:
    for layout in (PLAIN, INTERLEAVED, replace(PLAIN, global_batch=4)):
        training = replace(TRAINING, global_batch=layout.global_batch)
        asked = Problem(
            Transformers.of([training.model]), Layouts.of([layout]), Machines.of([A100]), Stacks.of([training.stack])
        )
        held, stages = memory(asked), explain(training, layout, A100).stages
        for stage, peak in ((stages[0], held.first), (stages[-1], held.last)):
            assert stage.total - stage.other == pytest.approx(float(np.ravel(peak)[0]))
        kept = [stage.activations for stage in stages]
        assert kept == sorted(kept, reverse=True)  # the first stage warms up with the most micro-batches


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp": 7}, "does not divide 96"),
        ({"tp": 16}, "share NVLink"),
        ({"pp": 200}, "at most 128 stages"),
        ({"pp": 97}, "of 96 layers"),
        ({"dp": 3}, "cannot be split over dp 3"),
        ({"vpp": 2, "global_batch": 17}, "no multiple of 2 rounds of 8 stages"),
        ({"ep": 2}, "does not divide 0 experts"),
        ({"etp": 3}, "etp 3 does not divide tp 8"),
        ({"etp": 8, "ep": 2}, "ep x etp = 16 does not divide"),
        ({"head_layers": 40}, "less than nothing"),
    ],
)
def test_an_impossible_layout_is_a_mistake(changes: dict[str, int], why: str) -> None:
    layout = replace(PLAIN, **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=why):
        explain(replace(TRAINING, global_batch=layout.global_batch), layout, A100)


def test_the_text_has_a_line_per_stage_which_starts_later_on_later_stages() -> None:
    lines = text_lines(explain(TRAINING, PLAIN, A100).passes, 120)
    starts = [len(line) - len(line.lstrip("·")) for line in lines]
    assert len(lines) == 8 and {len(line) for line in lines} == {120}
    assert starts == sorted(set(starts)) and lines[0].startswith("0")


def test_the_picture_is_well_formed_and_shows_every_pass_and_stage() -> None:
    found = explain(TRAINING, INTERLEAVED, A100)
    root = ET.fromstring(svg(found, "a <model> & more"))
    tips = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("micro-batch" in tip for tip in tips) == len(found.passes)
    words = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("stage 3") == 2 and "a <model> & more" in words
    assert "<title>a &lt;model&gt; &amp; more</title>" in html(found, "a <model> & more")
