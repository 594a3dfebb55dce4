"""Published times on A100 that are in no table and in no fit: small jobs as well as large ones."""

from __future__ import annotations

import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.measure.predict import predict_rows

# arXiv:2205.05198, tables 3 and 5: seconds of an iteration with everything recomputed, and with only the attention core
# recomputed, beside sequence parallelism. They agree with the FLOP/s of the same table.
# Layers, hidden, heads, GPUs, pp, vpp, batch, micro-batch, both times
MODELS = {
    "22B on 8": (48, 6144, 64, 8, 1, 1, 4, 4, 1.42, 1.10),
    "175B on 64": (96, 12288, 96, 64, 8, 3, 64, 1, 18.13, 13.75),
    "530B on 280": (105, 20480, 128, 280, 35, 3, 280, 1, 49.05, 37.83),
    "1T on 512": (128, 25600, 160, 512, 64, 1, 512, 1, 94.42, 71.49),
}


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_megatron_on_8_to_512_gpus(name: str, recompute: str) -> None:
    layers, hidden, heads, gpus, pp, vpp, batch, micro, full_s, selective_s = MODELS[name]
    row = {
        "layers": layers, "hidden": hidden, "heads": heads, "vocab": 51200, "seq": 2048, "global_batch": batch,
        "micro_batch": micro, "gpu": "A100", "num_gpus": gpus, "tp": 8, "pp": pp, "vpp": vpp, "zero": 0,
        "recompute": recompute, "sequence_parallel": int(recompute == "selective"), "precision": "bf16",
        "framework": "Megatron-LM",
    }  # fmt: skip
    (found,) = predict_rows([{key: str(value) for key, value in row.items()}], shipped())
    measured = full_s if recompute == "full" else selective_s
    assert float(found["pred_iter_time_s"]) == pytest.approx(measured, rel=0.09)
