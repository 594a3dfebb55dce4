"""Models from presets, config.json and Megatron's arguments: exact parameters, FLOPs, and what bad input is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.autoparallel.model.huggingface_config import READERS, from_huggingface, from_mapping
from resilio_hpc.autoparallel.model.megatron_arguments import from_megatron
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.presets import Preset, find_model, preset, presets
from resilio_hpc.autoparallel.model.transformer_graph import transformer_graph
from resilio_hpc.core.errors import UsageError
from tests.support.environments import ROOT

LLAMA: dict[str, object] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", presets())
def test_presets_have_their_published_parameters(name: str) -> None:
    one: Preset = presets()[name]
    if isinstance(one.published, int):
        assert one.model.parameters == one.published
    else:
        digits = len(one.published.partition(".")[2])
        assert f"{one.model.parameters / 1e9:.{digits}f}" == one.published


def test_every_reader_is_used_by_a_preset() -> None:
    text = (ROOT / "autoparallel" / "model" / "presets.toml").read_text()
    assert [kind for kind in READERS if f'"{kind}"' not in text] == []


@pytest.mark.parametrize("name", presets())
def test_the_graph_of_a_model_has_its_parameters_and_flops(name: str) -> None:
    model = preset(name)
    graph = transformer_graph(model, micro_batch=1, seq=16)
    assert graph.parameter_count == model.parameters
    assert graph.total_flops == 16 * model.flops_per_token(16)


def test_flops_are_those_of_the_published_formula() -> None:
    """Narayanan et al., arXiv:2104.04473, without recomputation: 72·l·h²·(1 + s/6h + V/12lh) per token."""
    layers, hidden, seq, vocab = 96, 12288, 2048, 51200
    model = TransformerModel("gpt", layers, hidden, 96, 4 * hidden, vocab, seq, tied=True)
    formula = 72 * layers * hidden**2 + 12 * layers * hidden * seq + 6 * vocab * hidden
    assert model.flops_per_token() == formula


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    assert round(preset("mixtral-8x7b").active_parameters / 1e9, 1) == 12.9
    assert preset("qwen3-30b-a3b").active_parameters == 3_353_032_704
    assert preset("deepseek-v3").active_parameters == 37_552_282_624 + 58 * 256  # published without router biases


def test_megatrons_arguments_give_the_same_model() -> None:
    said = (
        "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
        "--ffn-hidden-size 28672 --swiglu --disable-bias-linear --normalization RMSNorm --vocab-size 128256 "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 8192 --bf16 --lr 1e-4"
    )
    assert from_megatron(said.split()).parameters == preset("llama3-70b").parameters
    equals = said.replace("--num-layers 80", "--num-layers=80")
    assert from_megatron(equals.split()) == from_megatron(said.split())


def test_megatron_with_experts_and_latent_attention() -> None:
    said = (
        "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --swiglu "
        "--disable-bias-linear --normalization RMSNorm --vocab-size 129280 --make-vocab-size-divisible-by 1 "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --multi-latent-attention "
        "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
        "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-router-enable-expert-bias "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58)"
    )
    assert from_megatron(said.split()).parameters == preset("deepseek-v3").parameters


def test_megatron_pads_the_vocabulary() -> None:
    said = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "50257"]
    assert from_megatron(said).vocab == 50304
    assert from_megatron([*said, "--tensor-model-parallel-size", "8"]).vocab == 51200


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("--num-layer 2 --hidden-size 64", "--num-layers is missing: did you mean it by --num-layer"),
        ("--num-layers two", "--num-layers 'two' is not a whole number"),
        ("--num-layers", "--num-layers '' is not a whole number"),
        ("--num-layers 2 --hidden-size 64 --num-attention-heads 4", "--vocab-size is missing: Megatron takes it from"),
        ("--hybrid-override-pattern M*-", "--hybrid-override-pattern describes layers that differ"),
        ("--num-layers " + "9" * 5000, "--num-layers"),
        (
            "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 9 --num-experts 4 "
            "--moe-layer-freq ([1]*2+[0]*2)",
            "--moe-layer-freq",
        ),
    ],
)
def test_wrong_arguments_are_named(said: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        from_megatron(said.split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba' is not known.*Known are gpt2, .*--module"),
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": 3}, "model_type is 3, not a string"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 10**5000}, "hidden_size is a number of many digits"),
        ({"hidden_size": 2**40}, "hidden is 1099511627776, not 1 to 1048576"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 kv_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True, not False: only decoders"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "topk 9 of 8 experts"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8, "mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ({"model_type": "\x1b[31m"}, r"model_type '\\x1b\[31m' is not known"),
    ],
)
def test_a_wrong_config_names_the_key(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_mapping({**LLAMA, **changes}, "config.json")


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"\xff\xfe", b"{" * 100_000, b'{"a": ' * 50_000, b"1" * 9000, b" " * (5 << 20)]
)
def test_what_is_no_config_is_told(text: bytes) -> None:
    with pytest.raises(UsageError, match="config: not a JSON object"):
        from_huggingface(text, "config")


def test_a_model_is_found_by_name_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json"))
    assert find_model("GPT3-175B") == preset("gpt3-175b")
    for name, words in (
        ("gpt3-175", "did you mean gpt3-175b"),
        ("my.json", "there is no such file"),
        ("a\0b", "no model is named"),
    ):
        with pytest.raises(UsageError, match=words):
            find_model(name)
