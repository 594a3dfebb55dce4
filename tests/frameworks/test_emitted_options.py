"""``resilio plan … --emit``, read by the frameworks' own parsers and configurations."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest

from resilio_hpc.autoparallel.base.layout import Layout, Recompute, parse_layout
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.cli.main import main
from resilio_hpc.cli.plan.emit import TITAN_CONFIGS, deepspeed, megatron, torchtitan
from resilio_hpc.cli.plan.model_flags import model_flags, precision_flags
from tests.support.environments import SUPPORT, scrubbed
from tests.support.frameworks.runs import DEEPSPEED, PYTHON, Framework
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
DENSE = ("llama3-8b", "llama3-405b", "gpt3-175b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b")
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v2-lite")
TITAN_LAYOUTS = (
    "tp2-dp8-mb2-sp-fsdp-recompute-full",
    "tp2-dp32-mb1-hsdp4-recompute-alternate",
    "tp8-cp2-dp4-mb1-sp-fsdp-recompute-none",
    "tp4-pp4-dp2-mb1-vpp2-sp-fsdp-recompute-full",
    "dp32-mb1-fsdp-offload-optimizer-recompute-full",
    "tp8-dp1-mb2-sp-recompute-none",
    "tp4-pp4-dp1-mb1-sp-recompute-full",
)


def parsed(script: str, modules: tuple[str, ...], commands: list[Any]) -> list[dict[str, Any]]:
    """What the framework makes of each command."""
    Framework("", modules).need()
    done = subprocess.run(
        [PYTHON, SUPPORT / "frameworks" / script], input=json.dumps(commands), env={**scrubbed(), **DEEPSPEED},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answer: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_torchtitans_parser_reads_every_layout_of_every_model_that_it_has() -> None:
    layouts = [parse_layout(text, 64) for text in TITAN_LAYOUTS]
    asked = [(name, layout) for name in TITAN_CONFIGS for layout in layouts]
    commands = [torchtitan(layout, uniform(preset(name), 4096)) for name, layout in asked]
    kinds = {Recompute.FULL: "FullAC.Config", Recompute.ALTERNATE: "SelectiveAC.Config", Recompute.NONE: "NoneType"}
    found = parsed("parse_torchtitan.py", ("torchtitan", "triton"), commands)
    for (name, layout), one in zip(asked, found, strict=True):
        degrees = (layout.tp, layout.pp, layout.cp, layout.dp // layout.replicas, layout.replicas)
        assert degrees == tuple(one[key] for key in ("tp", "pp", "cp", "shards", "replicas")), (name, layout)
        local = layout.micro_batch * (layout.micro_batches if layout.pp > 1 else 1)
        assert (one["local_batch"], one["global_batch"], one["seq"]) == (local, 64, 4096)
        assert (one["recompute"], one["offload"]) == (kinds[layout.recompute], layout.offload > 0)
        assert one["layers"] == preset(name).layers


def test_megatron_core_takes_every_model_and_layout() -> None:
    full = Layout(8, 1, 2, 1, 64, sequence_parallel=True, recompute=Recompute.FULL, zero=1)
    asked: list[tuple[str, Layout]] = [(name, full) for name in DENSE if name not in ("qwen2.5-7b",)]
    asked += [("llama3-405b", parse_layout("tp8-pp16-dp2-mb1-vpp8-sp-zero1", 64)),
              ("llama3-8b", parse_layout("tp2-pp4-cp2-dp2-mb1-vpp4-sp-zero1-recompute-selective", 64)),
              ("gpt3-175b", parse_layout("tp8-pp8-dp2-mb1-vpp3-sp", 64)),
              ("qwen2.5-7b", parse_layout("tp4-pp2-dp2-mb1-sp-zero1", 64))]  # fmt: skip
    asked += [(name, parse_layout("pp1-ep8-dp16-mb1-zero1-recompute-selective", 64)) for name in EXPERTS]
    asked += [
        ("deepseek-v3", parse_layout("tp2-pp16-ep8-dp4-mb1-sp-zero1-recompute-full", 64)),
        ("mixtral-8x7b", parse_layout("tp4-ep4-etp1-dp4-mb1-sp-zero1-offload-both", 64)),
        ("mixtral-8x7b", parse_layout("tp4-ep4-etp2-dp4-mb1-sp-zero1-offload-activations", 64)),
        ("llama3-8b", parse_layout("tp2-pp4-dp2-mb1-head2-sp-zero1-offload-optimizer-recompute-full", 64)),
        ("llama3-8b", parse_layout("pp4-dp2-mb1-vpp8-zero1", 12)),
    ]
    commands = []
    for name, layout in asked:
        model = preset(name)
        commands.append([*model_flags(model, uniform(model)), *precision_flags(""), *megatron(layout, uniform(model))])
    found = parsed("parse_megatron.py", ("megatron.core",), commands)
    for (name, layout), one in zip(asked, found, strict=True):
        assert (layout.tp, layout.cp, layout.ep) == (one["tp"], one["cp"], one["ep"]), (name, layout)
        assert (one["layers"], one["hidden"]) == (preset(name).layers, preset(name).hidden)
        assert one["recompute"] == layout.recompute.name.lower()
        assert one["pp"] == layout.pp
        assert one["optimizer_moved"] == layout.offload % 2 and bool(one["moved"]) == (layout.offload >= 2)
        assert not layout.etp or one["etp"] == layout.etp


def test_deepspeed_takes_every_layout() -> None:
    layouts = [
        parse_layout(text, 128)
        for text in ("dp16-mb2-zero1", "tp4-dp8-mb1-zero2", "dp32-mb4-zero3-recompute-full", "pp4-dp8-mb2-zero1",
                     "pp8-tp2-dp4-mb1-zero1-recompute-full", "dp8-mb2", "dp8-mb2-zero3-offload-both-recompute-full",
                     "dp8-mb2-zero1-offload-optimizer")
    ]  # fmt: skip
    found = parsed("parse_deepspeed.py", ("deepspeed",), [(deepspeed(layout), layout.dp) for layout in layouts])
    for layout, one in zip(layouts, found, strict=True):
        batch = (one["batch"], one["micro_batch"], one["accumulation"])
        assert batch == (128, layout.micro_batch, layout.micro_batches) and one["bf16"]
        assert (one["zero"], one["stages"]) == (layout.zero, layout.pp if layout.pp > 1 else "auto")
        assert one["interval"] == int(layout.pp > 1 and layout.recompute == Recompute.FULL)
        assert one["tp"] == (layout.tp if layout.tp > 1 else 0)
        moved = one["optimizer_on"] == "cpu", one["checkpoints_on_host"]
        assert moved == (layout.offload % 2 == 1, layout.offload > 1)


def test_what_the_command_prints_is_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("plan", "llama3-70b", "--gpus", "64", "--gpu", "h100", "--global-batch", "512", "--seq", "8192")
    assert main([*common, "--emit", "megatron"]) == 0
    (one,) = parsed("parse_megatron.py", ("megatron.core",), [shlex.split(capsys.readouterr().out)])
    assert one["layers"] == 80
    assert main([*common, "--framework", "torchtitan", "--emit", "torchtitan"]) == 0
    (other,) = parsed("parse_torchtitan.py", ("torchtitan", "triton"), [shlex.split(capsys.readouterr().out)])
    assert (other["layers"], other["global_batch"]) == (80, 512)
    assert main([*common, "--framework", "DeepSpeed", "--emit", "deepspeed"]) == 0
    settings = json.loads(capsys.readouterr().out)
    each = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"]
    (third,) = parsed("parse_deepspeed.py", ("deepspeed",), [(settings, settings["train_batch_size"] // each)])
    assert third["batch"] == 512
