"""Traced modules: FLOPs as torch counts them when they run, parameters, cuts; and what cannot be traced."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from resilio_hpc.autoparallel.model.graph import OperatorGraph
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.trace import trace, trace_made
from resilio_hpc.autoparallel.model.transformer_graph import transformer_graph
from resilio_hpc.autoparallel.search.partition import partition_graph
from resilio_hpc.core.errors import UsageError
from tests.support.autoparallel.traced_models import GPT, Calls, Chosen, Steered

TOKENS = torch.zeros(2, 32, dtype=torch.long)
BOTH = pytest.mark.parametrize("export", [True, False], ids=["export", "dispatch"])


def run_flops(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """As torch counts a real forward and backward pass."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return int(counter.get_total_flops())


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3))


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,iho->bho", x.tanh(), self.weight)


@BOTH
@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (GPT(2, 64, 4, 100, 32, fused=False), (TOKENS,)),
        (convolutions(), (torch.zeros(2, 3, 16, 16),)),
        (Einsum(), (torch.zeros(4, 8, requires_grad=True),)),
        (nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)), (torch.zeros(3, 8),)),
    ],
    ids=["gpt", "convolutions", "einsum", "frozen"],
)
def test_flops_are_those_of_a_real_pass(model: nn.Module, inputs: tuple[Any, ...], export: bool) -> None:
    graph = trace(model, inputs, export=export)
    assert graph.total_flops == run_flops(model, inputs)
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert graph.uncounted == ()


@BOTH
def test_a_traced_gpt_agrees_with_its_description(export: bool) -> None:
    graph = trace(lambda: GPT(3, 64, 4, 100, 32).to(torch.bfloat16), (TOKENS,), export=export)
    model = TransformerModel(
        "gpt", 3, 64, 4, 256, 100, 32, positions=32, tied=True,
        norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip
    described = transformer_graph(model, micro_batch=2)
    assert graph.parameter_count == model.parameters
    assert (graph.forward_flops, graph.total_flops) == (described.forward_flops, described.total_flops)
    for stages in (2, 3):
        traced, expected = (partition_graph(g, stages, 0.5) for g in (graph, described))
        assert traced.flops == expected.flops
        assert traced.input_bytes == expected.input_bytes == (0, *[2 * 32 * 64 * 2] * (stages - 1))


@BOTH
def test_a_tied_weight_is_one_parameter_of_two_operators(export: bool) -> None:
    graph = trace(GPT(1, 16, 2, 10, 32), (TOKENS,), export=export)
    tied = next(index for index, parameter in enumerate(graph.parameters) if parameter.aliases)
    assert {graph.parameters[tied].name, *graph.parameters[tied].aliases} == {"wte.weight", "head.weight"}
    assert len([operator for operator in graph.operators if tied in operator.parameters]) == 2


@BOTH
def test_masks_and_transposed_weights_are_not_sent(export: bool) -> None:
    """The mask is read by all blocks, and every stage can make it."""
    graph = trace(GPT(4, 16, 2, 10, 32, fused=False), (TOKENS,), export=export)
    assert {int(graph.cut_bytes[i]) for i, op in enumerate(graph.operators) if "norm1" in op.name} == {2 * 32 * 16 * 4}


@BOTH
def test_operators_know_their_block(export: bool) -> None:
    graph = trace(GPT(2, 16, 2, 10, 32), (TOKENS,), export=export)
    assert [block for block in dict.fromkeys(operator.block for operator in graph.operators) if block] == ["h.0", "h.1"]
    assert partition_graph(graph, 2, 0.9, blocks=True).starts[1] in {
        index for index, operator in enumerate(graph.operators) if operator.name.startswith(("h.1.norm1", "norm "))
    }


@BOTH
def test_what_is_written_in_place_is_read_anew(export: bool) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y[:, :4].mul_(2)
            return self.linear(y)

    graph = trace(InPlace(), (torch.zeros(2, 8),), export=export)
    names = [operator.name.split()[-1] for operator in graph.operators]
    write = next(index for index, name in enumerate(names) if name == "mul_")
    last = max(index for index, name in enumerate(names) if name in ("linear", "addmm"))
    assert any(value.producer == write and last in value.readers for value in graph.values)


def test_a_model_of_175_billion_parameters_takes_no_memory_for_them() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = trace(lambda: GPT(96, 12288, 96, 50257, 2048), (torch.zeros(1, 2048, dtype=torch.long),), export=False)
    assert graph.parameter_count == 174_604_259_328
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB: of 650 GiB, less than two


def test_the_model_is_left_as_it_was() -> None:
    model = GPT(1, 16, 2, 10, 32)
    before = dict(model.named_parameters())
    trace(model, (TOKENS,))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.head.weight is model.wte.weight
    assert model(TOKENS).shape == (2, 32, 10)


# -- what torch.export refuses, and what nobody can trace --------------------------------------------------------------


@dataclasses.dataclass
class Options:
    scale: float


def test_inputs_that_are_no_tensors_are_passed_as_they_are() -> None:
    model = Calls(lambda x, options, names: x * options.scale if names else x)
    graph = trace(model, (torch.zeros(2, 8), Options(2.0), ["a"]))
    assert [operator.name.split()[-1] for operator in graph.operators if "mul" in operator.name] == ["mul"]


def refused(model: nn.Module, inputs: tuple[Any, ...] = (torch.zeros(2, 4),)) -> str:
    with pytest.raises(UsageError) as told:
        trace(model, inputs)
    return str(told.value)


def test_control_flow_by_values_is_named_with_its_line() -> None:
    said = refused(Steered())
    assert "Steered cannot be traced: which way it goes depends on the values of a tensor" in said
    assert "traced_models.py" in said and "if y.sum() > 0:" in said and "torch.where" in said


def test_shapes_by_values_are_named_with_their_line() -> None:
    said = refused(Chosen())
    assert "aten.nonzero.default" in said and "rows = torch.nonzero" in said and "fixed capacity" in said


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("resilio_trace_test", "DEF")
    yield made
    made._destroy()


def test_a_custom_operator_without_a_fake_implementation_is_named(library: torch.library.Library) -> None:
    library.define("silent(Tensor x) -> Tensor")
    library.impl("silent", lambda x: x.clone(), "CPU")
    said = refused(Calls(lambda x: torch.ops.resilio_trace_test.silent(x)), (torch.zeros(2, 8),))
    assert "resilio_trace_test" in said and "silent" in said and "register_fake" in said


@BOTH
def test_a_custom_operator_without_a_formula_is_said_to_be_uncounted(
    library: torch.library.Library, export: bool
) -> None:
    library.define("known(Tensor x) -> Tensor")
    library.impl("known", lambda x: x.clone(), "CPU")
    torch.library.register_fake("resilio_trace_test::known", lambda x: torch.empty_like(x), lib=library)
    model = Calls(lambda x: torch.ops.resilio_trace_test.known(x))
    graph: OperatorGraph = trace(model, (torch.zeros(2, 8),), export=export)
    assert graph.uncounted == ("resilio_trace_test::known",)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [((torch.zeros(2, 5),), "RuntimeError"), ((), "IndexError"), (("text",), "TypeError")],
)
def test_inputs_that_do_not_fit_are_told_in_a_line(inputs: tuple[Any, ...], words: str) -> None:
    said = refused(Calls(lambda x: x), inputs)
    assert words in said and "must run with these inputs" in said and "\n" not in said


def test_a_model_that_cannot_be_made_without_memory_is_told() -> None:
    def make() -> nn.Module:
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        return nn.Dropout(rates[0])

    with pytest.raises(UsageError, match=r"cannot be made without memory.*\.item\(\).*Python numbers"):
        trace(make, (torch.zeros(2),))


@pytest.mark.parametrize("made", [nn.Linear(2, 2), (nn.Linear(2, 2),), (1, 2), None])
def test_what_is_no_model_is_told(made: Any) -> None:
    with pytest.raises(UsageError, match=r"train\.py:f must return \(module, inputs\)"):
        trace_made(lambda: made, "train.py:f")


def test_a_model_without_flops_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match="nothing to balance"):
        partition_graph(trace(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)), (torch.zeros(2, 4),)), 2, 0.1)
