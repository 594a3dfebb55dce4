"""Published measurements predicted from the operators of a torch module, beside the description of the same model.

usage: planner_traced.py DATA

For each row without tensor parallelism and experts, with fused attention, a plain torch decoder of the row's numbers
is traced, and costed as ``resilio plan FILE.py:NAME`` costs a module that is no decoder of equal layers. Cold: no row
of the table's source is in the fit. Errors of the iteration time in %; memory beside what the description says.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planner_accuracy import File, fitted, load, others, scorer
from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.layout import Recompute
from resilio_hpc.autoparallel.cost.operator_times import operator_seconds
from resilio_hpc.autoparallel.cost.traced_cost import TracedCosts, TracedSetting, holdings, stage_sums, traced_costs
from resilio_hpc.autoparallel.measure.predict import predict
from resilio_hpc.autoparallel.measure.rows import Case
from resilio_hpc.autoparallel.model.saved_tensors import traced_model
from resilio_hpc.autoparallel.model.traced_model import TracedModel
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.autoparallel.search.partition import NoPartition, partition_graph

functional = torch.nn.functional


class Layer(torch.nn.Module):
    """A layer of a decoder, as plain torch code has it."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        size = model.head_dim or model.hidden // model.heads
        keys = model.kv_heads or model.heads
        self.split, self.size, self.gated = (model.heads, keys, keys), size, model.gated
        norm = torch.nn.RMSNorm if model.gated else torch.nn.LayerNorm
        self.first, self.second = norm(model.hidden), norm(model.hidden)
        self.qkv = torch.nn.Linear(model.hidden, sum(self.split) * size, bias=False)
        self.out = torch.nn.Linear(model.heads * size, model.hidden, bias=False)
        self.up = torch.nn.Linear(model.hidden, model.ffn * (1 + model.gated), bias=False)
        self.down = torch.nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Any) -> Any:
        batch, tokens, _ = x.shape
        joined = self.qkv(self.first(x)).view(batch, tokens, -1, self.size).transpose(1, 2)
        q, k, v = joined.split(self.split, 1)
        shared = self.split[0] > self.split[1]
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, -1))
        inner = self.up(self.second(x))
        if self.gated:
            gate, rest = inner.chunk(2, -1)
            return x + self.down(functional.silu(gate) * rest)
        return x + self.down(functional.gelu(inner))


class Decoder(torch.nn.Module):
    """A decoder with its loss in fp32."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(model.vocab, model.hidden)
        self.layers = torch.nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = torch.nn.LayerNorm(model.hidden)
        self.head = torch.nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def traced(model: Transformer) -> TracedModel:
    """Return the traced decoder, of one sequence."""

    def make() -> Any:
        return Decoder(model).to(torch.bfloat16), (torch.zeros(1, model.seq, dtype=torch.long),)

    return traced_model(make, "the row's model")


def fits(case: Case) -> bool:
    """Return whether such a row can be costed by its operators."""
    layout, stack = case.layout, case.stack
    plain = layout.tp == layout.cp == layout.vpp == 1 and not case.model.experts and not layout.offload
    return plain and stack.flash > 0 and layout.recompute in (Recompute.NONE, Recompute.FULL)


def costed(case: Case, model: TracedModel, known: Efficiency) -> TracedCosts:
    """Return the row's cost by its operators."""
    layout = case.layout
    try:
        stages = partition_graph(model.graph, layout.pp, 0.05, blocks=True)
    except NoPartition as error:
        stages = partition_graph(model.graph, layout.pp, error.nearest_band, blocks=True)
    times = operator_seconds(model, layout.micro_batch, case.machine, case.stack, known)
    setting, starts = TracedSetting(model, case.machine, case.stack, known), stages.starts
    return traced_costs(setting, [layout], holdings(model, starts), [stage_sums(model, starts, times)])


def judged(file: File, known: Efficiency) -> None:
    """Print the errors of one table."""
    rows = [i for i, case in enumerate(file.cases) if fits(case)]
    if len(rows) < 5:
        return
    began, models, found = time.perf_counter(), dict[Transformer, TracedModel](), list[TracedCosts]()
    for i in rows:
        case = file.cases[i]
        if case.model not in models:
            models[case.model] = traced(case.model)
        found.append(costed(case, models[case.model], known))
    cases = [file.cases[i] for i in rows]
    described = predict(cases, known)
    took = time.perf_counter() - began
    print(f"{file.name}: {len(rows)} rows, {len(models)} modules traced and costed in {took:.0f} s")
    if file.timed:
        times = file.times[rows]
        for name, told in (
            ("operators", np.concatenate([one.iteration for one in found])), ("description", described.cost.iteration),
        ):  # fmt: skip
            off = told / times - 1
            error, mean, most = np.abs(off).mean(), off.mean(), np.quantile(np.abs(np.log1p(off)), 0.8)
            print(f"  time, {name:<12} {error * 100:5.1f}  mean {mean * 100:+5.1f}  80 % within {most:.3f}")
    apart = np.concatenate([one.memory for one in found]) / described.memory.device - 1
    print(f"  memory beside the description's: {apart.mean():+.1%} on average, {np.abs(apart).mean():.1%} apart")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    asked = parser.parse_args()
    files = load(asked.data, scorer(asked.data))
    for file in files:
        if any(fits(case) for case in file.cases):
            judged(file, fitted(others(files, file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
