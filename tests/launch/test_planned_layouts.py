"""``--layout auto``: the planner's layout for each number of ranks, what stands where it has none, and what is said."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.support
from resilio_hpc.ckpt import REPLICATED, Checkpointer, Slab
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.ledger import Ledger, read_ledger
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import parse
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.planned_layouts import LayoutPlan, PlannedLayout, layout_fields
from resilio_hpc.launch.config.rank_layout import RankLayout, role_of, round_layout
from resilio_hpc.launch.controller.checkpoints.round_layouts import RoundLayouts, of_another_layout
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Clock, ControllerConfig, Record
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import first_membership
from resilio_hpc.launch.protocol.vote import Term
from resilio_hpc.launch.supervisor import layout_planning
from resilio_hpc.launch.supervisor.layout_planning import (
    Division,
    NoPlanError,
    ask_planner,
    checkpoint_pins,
    plan_layouts,
)
from resilio_hpc.launch.workers.rank_env import RankPlacement, rank_argv

AUTO = ("--nproc-per-node", "8", "--nnodes", "1:3", "--layout", "auto")
ASKED = ("--layout-options", "llama3-8b --global-batch 96 --gpu h100")
NODES = ("n1", "n2", "n3")


def options(*words: str) -> LaunchOptions:
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    return parse([*words], Caller(allocation, Path("/here"), 0.0, 11)).options


def row(ranks: int, gpu: str, tp: int, pp: int, micro: int) -> PlannedLayout:
    values = {"tp": tp, "pp": pp, "micro_batch": micro, "cp": 1, "accumulation": 1}
    return PlannedLayout(ranks, gpu, tuple((name, str(value)) for name, value in values.items()), "planned")


def with_plan(plan: LayoutPlan, *words: str) -> LaunchOptions:
    before = options(*AUTO, *ASKED, *words)
    return replace(before, planning=replace(before.planning, plan=plan))


PLAN = LayoutPlan(
    rows=(row(8, "h100", 2, 1, 4), row(24, "h100", 2, 1, 4), row(16, "a100", 4, 2, 1)), gpus=("a100", "h100"),
    gpu_of=(("n3", "a100"),), common_gpu="h100", global_batch=96, standing=row(24, "h100", 2, 1, 4),
)  # fmt: skip


def test_the_planner_itself_chooses_for_every_size_of_the_run() -> None:
    plan = plan_layouts(options(*AUTO, *ASKED, "train.py"), NODES, {}, ask_planner)
    assert [one.ranks for one in plan.rows] == [8, 16, 24]
    assert plan.failed == ""
    for one in plan.rows:
        values = dict(one.values)
        tensor, pipeline = one.degrees
        copies = one.ranks // (tensor * pipeline)
        assert copies * one.micro_batch * int(values["accumulation"]) == 96  # the global batch is kept
        assert values["cp"] == "1"
        assert "s a step" in one.why and f"planned for {one.ranks // 8} x 8 h100" in one.why


def test_a_layout_of_the_planner_reaches_the_rank() -> None:
    chosen = with_plan(PLAN, "--fill-arguments", "train.py", "{tp}/{dp}/{micro_batch}/{nodes}")
    assert round_layout(chosen, 16, "a100").variables()["RESILIO_MICRO_BATCH"] == "1"
    assert round_layout(chosen, 16, "a100").variables()["RESILIO_DP"] == "2"
    placement = RankPlacement(0, 2, 0, 8, 0, 16)
    assert rank_argv(chosen, 0, placement, "a100")[1:] == ("4/2/1/2",)
    assert [role_of(chosen, "a100", rank, 16) for rank in (0, 3, 4, 8, 15)] == [0, 3, 0, 4, 7]


@pytest.mark.parametrize(
    ("nodes", "gpu"), [(("n1", "n2"), "h100"), (("n1", "n3"), "a100"), (("n3",), "a100"), (("j1",), "h100")]
)
def test_a_mixed_round_is_planned_for_its_gpu_with_the_least_memory(nodes: tuple[str, ...], gpu: str) -> None:
    assert PLAN.gpu_among(nodes) == gpu


def test_without_a_row_tensor_and_pipeline_parallel_stand_and_the_batch_is_kept() -> None:
    stands = PLAN.of(16, "h100")
    assert stands is not None
    assert (stands.degrees, stands.micro_batch) == ((2, 1), 4)
    assert dict(stands.values)["accumulation"] == "3"  # 8 copies of 4 sequences, three times
    assert stands.why == "the planner has no layout for 16 ranks with h100: tp=2 x pp=1 is kept"
    smaller = PLAN.of(64, "h100")  # 32 copies: a micro-batch of 4 would not divide 96
    assert smaller is not None and smaller.micro_batch == 3
    none = PLAN.of(20, "h100")
    assert none is not None and "10 copies cannot share a global batch of 96" in none.why


def test_a_layout_that_does_not_divide_the_ranks_is_told() -> None:
    with pytest.raises(UsageError, match="7 ranks cannot be divided into copies of tp=2 x pp=1"):
        round_layout(with_plan(PLAN, "train.py"), 7, "h100")


def test_each_type_of_gpu_has_its_own_layouts() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(given: Sequence[str]) -> Mapping[str, Any]:
        asked.append(tuple(given))
        return ask_planner(given)

    words = ("--layout-options", "llama2-13b --global-batch 96")
    plan = plan_layouts(options(*AUTO, *words, "train.py"), NODES, {"n1": "h200", "n2": "h200", "n3": "a100-40gb"}, ask)
    assert [call[-1] for call in asked] == ["--gpu=h200", "--gpu=a100-40gb"]
    assert (plan.common_gpu, plan.gpu_of, plan.gpus) == ("h200", (("n3", "a100-40gb"),), ("a100-40gb", "h200"))
    large, small = plan.of(16, "h200"), plan.of(16, "a100-40gb")
    assert large is not None and small is not None
    assert large.values != small.values


def test_the_plan_of_a_thousand_nodes_fits_on_a_command_line_and_comes_back_as_it_was() -> None:
    (choice,) = ask_planner(["llama3-8b", "--gpu=h100", "--gpus=64", "--global-batch=1024", "--json"])["choices"]

    def ask(given: Sequence[str]) -> Mapping[str, Any]:
        return {"global_batch": 1024, "choices": [{**choice, "gpus": 8 * nodes} for nodes in range(1, 1001)]}

    large = options("--nproc-per-node", "8", "--nnodes", "1:1000", "--layout", "auto", *ASKED, "train.py")
    names = [f"a-node-with-a-long-name-{number}" for number in range(1000)]
    plan = plan_layouts(large, names, dict.fromkeys(names, "h100"), ask)
    assert [one.ranks for one in plan.rows] == [8 * nodes for nodes in range(1001 - layout_planning.MOST_ROWS, 1001)]
    made = replace(large, planning=replace(large.planning, plan=plan))
    text = made.to_json()
    assert LaunchOptions.from_json(text) == made
    assert len(text) < 110_000  # of 131,072 that Linux takes as one argument


def test_the_parts_of_many_stages_fit_on_a_command_line(tmp_path: Path) -> None:
    (choice,) = ask_planner(["llama3-8b", "--gpus=64", "--gpu=h100", "--global-batch=1024", "--json"])["choices"]
    stages = ",".join(f"model.decoder.layers.{number}.block" for number in range(64))
    choice = {**choice, "environment": {**choice["environment"], "RESILIO_STAGES": stages}}

    def ask(given: Sequence[str]) -> Mapping[str, Any]:
        return {"global_batch": 1024, "choices": [{**choice, "gpus": 8 * nodes} for nodes in range(1, 201)]}

    large = options("--nproc-per-node", "8", "--nnodes", "1:200", "--layout", "auto", *ASKED, "train.py")
    plan = plan_layouts(large, [f"n{number}" for number in range(200)], {}, ask)
    assert 10 < len(plan.rows) < layout_planning.MOST_ROWS and plan.rows[-1].ranks == 1600
    assert [one.ranks for one in plan.rows] == [1600 - 8 * back for back in reversed(range(len(plan.rows)))]
    assert len(replace(large, planning=replace(large.planning, plan=plan)).to_json()) < 110_000


def test_any_module_is_planned_and_its_ranks_hear_where_stages_begin(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "own.py").write_text(Path(tests.support.__file__).with_name("torch_modules.py").read_text())
    module = f"{tmp_path}/own.py:widening --global-batch 96 --gpu h100"
    asked = options(*AUTO, "--layout-options", module, "train.py")
    plan = plan_layouts(asked, NODES, {}, ask_planner, (("--pp=4",), "as the checkpoint has it"))
    assert plan.failed == "" and [one.ranks for one in plan.rows] == [8, 16, 24]
    chosen = replace(asked, planning=replace(asked.planning, plan=plan))
    said = round_layout(chosen, 16, "").variables()
    assert said["RESILIO_PP"] == "4" and said["RESILIO_STAGES"].count("layers.") == 3


@pytest.mark.parametrize("answer", [{}, {"choices": [{}]}, {"choices": None, "global_batch": 1}])
def test_an_answer_that_is_not_understood_is_no_plan(answer: Mapping[str, Any]) -> None:
    plan = plan_layouts(options(*AUTO, *ASKED, "train.py"), NODES, {}, lambda given: answer)
    assert (plan.rows, plan.failed) == ((), "the planner's answer is not understood")


def test_the_planners_own_words_say_why_it_cannot() -> None:
    with pytest.raises(NoPlanError, match=r"neither a model|unknown|no such") as caught:
        ask_planner(["my-own-model", "--gpu=h100", "--gpus=8", "--global-batch=8", "--json"])
    assert "my-own-model" in str(caught.value)


# -- as many ranks in another layout -----------------------------------------------------------------------------------


def test_what_another_layout_left_in_memory_is_not_restored() -> None:
    plan = replace(PLAN, rows=(*PLAN.rows, row(16, "h100", 2, 1, 4)))
    config = ControllerConfig(NodeCounts(1, 3), NODES, plan=plan)
    run = RunState(config, Term(1, "n1", "n1:1", first_membership(NODES)), Clock(lambda: 0.0, lambda: 0.0))
    out = Outbox(())
    layouts = RoundLayouts(run, out)

    def round_of(*nodes: str) -> None:
        run.set_members(tuple(m.Member(node, place, node, 8, 8 * place) for place, node in enumerate(nodes)))

    round_of("n1", "n3")  # with the a100
    assert of_another_layout(run, [5, 7]) == set()  # nothing ran before
    layouts.start(-1)
    assert of_another_layout(run, [5, 7]) == set()
    round_of("n1", "n2")  # as many ranks, all h100
    assert of_another_layout(run, [5, 7]) == {5, 7}
    layouts.start(5)
    assert of_another_layout(run, [5, 7]) == {5}  # 7 was saved in the present layout
    round_of("n1")
    assert of_another_layout(run, [5, 7]) == {5}  # another number of ranks: other rules keep these apart
    kinds = [action.fields["tp"] for action in out.take() if isinstance(action, Record)]
    assert kinds == [4, 2]


def test_a_new_controller_knows_which_steps_in_memory_are_of_another_layout() -> None:
    plan = replace(PLAN, rows=(*PLAN.rows, row(16, "h100", 2, 1, 4)))
    config = ControllerConfig(NodeCounts(1, 3), NODES, plan=plan)

    def controller(epoch: int) -> RunState:
        return RunState(config, Term(epoch, "n1", "n1:1", first_membership(NODES)), Clock(lambda: 0.0, lambda: 0.0))

    def round_of(run: RunState, *nodes: str) -> None:
        run.set_members(tuple(m.Member(node, place, node, 8, 8 * place) for place, node in enumerate(nodes)))

    first, second, third = controller(1), controller(2), controller(3)
    round_of(first, "n1", "n3")  # with the a100
    RoundLayouts(first, Outbox(())).start(-1)
    second.adopt(first.round_state())
    round_of(second, "n1", "n2")  # as many ranks, all h100
    assert of_another_layout(second, [5, 7]) == {5, 7}
    RoundLayouts(second, Outbox(())).start(5)
    third.adopt(second.round_state())
    assert of_another_layout(third, [5, 7]) == {5}


# -- what the checkpoint allows ----------------------------------------------------------------------------------------


def saved(path: Path, state: Any, **how: Any) -> Division | None:
    Checkpointer(path / "checkpoints", **how).save(3, state).wait("committed")
    return layout_planning.newest_division(path / "checkpoints")


def test_parts_of_tensors_go_into_any_layout(tmp_path: Path) -> None:
    assert saved(tmp_path, {"w": Slab(np.zeros((4, 4)), (4, 4), (0, 0))}) == "parts"
    assert checkpoint_pins("parts", row(8, "h100", 2, 2, 1)) == ((), "")


def test_whole_copies_stay_whole(tmp_path: Path) -> None:
    assert saved(tmp_path, {"w": np.zeros((4, 4))}, layout=REPLICATED) == "copies"
    pinned = checkpoint_pins("copies", None)
    asked = "llama3-8b --global-batch 96 --gpu h200 --tp 2"
    plan = plan_layouts(options(*AUTO, "--layout-options", asked, "train.py"), NODES, {}, ask_planner, pinned)
    assert {one.degrees for one in plan.rows} == {(1, 1)}
    assert plan.rows[0].why.endswith("; the checkpoint holds whole copies: data parallel alone")


def test_tensors_of_each_process_keep_the_layout_of_the_job_before(tmp_path: Path) -> None:
    assert saved(tmp_path, {"w": np.zeros((4, 4))}) == "own"
    assert checkpoint_pins("own", row(8, "h100", 4, 2, 1))[0] == ("--tp=4", "--pp=2", "--cp=1")
    assert checkpoint_pins("own", None) == ((), "")  # nothing is known of it: the restore says what is wrong


def test_a_directory_without_a_step_pins_nothing(tmp_path: Path) -> None:
    assert layout_planning.newest_division(tmp_path / "none") is None
    assert checkpoint_pins(None, row(8, "h100", 4, 2, 1)) == ((), "")


# -- the launch --------------------------------------------------------------------------------------------------------


def launched(path: Path, *words: str) -> LaunchOptions:
    site = Site(SiteMode.LOCAL, "local-1", NODES, True)
    with contextlib.closing(Ledger(path / "ledger", "test")) as ledger:
        return layout_planning.planned(options(*AUTO, *words), site, path, ledger)


UNKNOWN = ("--layout-options", "my-own-model --global-batch 96 --gpu h100")


def test_where_the_planner_cannot_the_rows_beside_auto_are_used(tmp_path: Path, capsys: Any) -> None:
    made = launched(tmp_path, "--layout", "tp=4,pp=2", *UNKNOWN, "train.py")
    assert [round_layout(made, ranks, "") for ranks in (8, 16, 24)] == [RankLayout(4, 2, n) for n in (1, 2, 3)]
    assert "tp=4 and pp=2 are kept" in capsys.readouterr().err
    (event,) = read_ledger(tmp_path / "ledger", {"layouts_planned"})
    assert "my-own-model" in words(event.kind, event.fields)


def test_where_the_planner_cannot_the_layout_of_the_job_before_is_kept(tmp_path: Path) -> None:
    site = Site(SiteMode.LOCAL, "local-1", NODES, True)
    joining.write_record(tmp_path, joining.record_of(with_plan(PLAN, "train.py"), site, False))
    made = launched(tmp_path, *UNKNOWN, "train.py")
    layout = round_layout(made, 16, "")
    assert (layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel) == (2, 1, 8)


def test_a_supervisor_that_does_not_lead_takes_the_plan_of_the_one_that_does(tmp_path: Path) -> None:
    leader = Site(SiteMode.STEP, "7", NODES, True)
    joining.write_record(tmp_path, joining.record_of(with_plan(PLAN, "train.py"), leader, False))
    follower = Site(SiteMode.STEP, "7", NODES, False)
    with contextlib.closing(Ledger(tmp_path / "ledger", "test")) as ledger:
        made = layout_planning.planned(options(*AUTO, *UNKNOWN, "train.py"), follower, tmp_path, ledger)
    assert made.planning.plan == PLAN
    assert not read_ledger(tmp_path / "ledger", {"layouts_planned"})


def test_without_anything_to_keep_the_launch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--layout auto: .*my-own-model.*\(a --layout tp=N,pp=N beside it"):
        launched(tmp_path, *UNKNOWN, "train.py")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (AUTO, "which model and batch"),
        ((*AUTO[2:], *ASKED, "--nproc-per-node", "gpu"), "how many ranks has a node"),
        (("--layout", "tp=2", *ASKED), "belong to --layout auto"),
    ],
)
def test_mistakes_are_told_at_once(given: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        options(*given, "train.py")


def test_the_ledger_says_what_changed_and_why() -> None:
    small = PLAN.of(16, "a100")
    assert small is not None
    assert words("layout", layout_fields(small, PLAN.of(24, "h100"), 3)) == (
        "layout of round 3: tp=4, pp=2, dp=2, micro-batch 1 on 16 GPUs of type a100; before: tp=2, pp=1, dp=12, "
        "micro-batch 4 on 24 GPUs of type h100 (planned)"
    )
