"""What measurements of a cluster say of layouts that resemble them."""

import csv
import io

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.efficiency import bounds, shipped
from resilio_hpc.autoparallel.base.efficiency import read as read_parameters
from resilio_hpc.autoparallel.measure import nearby
from resilio_hpc.autoparallel.measure.calibrate import calibrate
from resilio_hpc.autoparallel.measure.predict import predict, read
from resilio_hpc.autoparallel.measure.unstated import problem
from resilio_hpc.autoparallel.report.explain import explain
from resilio_hpc.autoparallel.search.layout_space import Space
from resilio_hpc.autoparallel.search.ranking import Training
from resilio_hpc.autoparallel.search.search import search
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

LAYOUTS = """layers,hidden,heads,seq,global_batch,micro_batch,gpu,num_gpus,tp,pp,recompute
48,8192,64,2048,1536,2,A100,512,8,4,full
48,8192,64,2048,1536,4,A100,512,8,4,full
48,8192,64,2048,1536,2,A100,512,4,8,full
48,8192,64,2048,1536,2,A100,512,2,16,full
"""
CASES = read(list(csv.DictReader(io.StringIO(LAYOUTS)))).cases


def model_times() -> np.ndarray:
    return predict(CASES, shipped()).cost.iteration


def after(times: np.ndarray, rows: list[int]) -> np.ndarray:
    """Predicted over measured, for all layouts, once some of them were measured."""
    known, beside = calibrate(shipped(), [CASES[i] for i in rows], times[rows])
    return np.asarray(predict(CASES, known, nearby=beside).cost.iteration / times)


def test_a_slower_cluster_is_learnt_for_layouts_that_were_not_measured() -> None:
    ratio = after(model_times() * 1.15, [0, 2])
    assert np.all(np.abs(ratio - 1) < 0.06)


def test_one_odd_layout_moves_its_like_more_than_others() -> None:
    times = model_times()
    times[0] *= 1.3
    moved = after(times, [0, 3]) * times / model_times()
    assert moved[0] > moved[1] > moved[3]


def test_one_mixture_of_experts_tells_more_of_itself_than_of_another_and_nothing_of_dense_models() -> None:
    rows = """layers,hidden,heads,ffn,experts,topk,seq,global_batch,micro_batch,gpu,num_gpus,tp,pp,ep
48,2048,32,768,128,8,4096,512,2,H100,64,1,1,8
48,2048,32,768,128,8,4096,1024,1,H100,128,2,2,16
94,8192,64,1536,128,8,4096,512,2,H100,64,1,1,8
48,2048,32,768,,,4096,512,2,H100,64,1,1,
"""
    points = nearby.features(problem(read(list(csv.DictReader(io.StringIO(rows)))).cases))
    first = nearby.shared(points[:1], points)[0]
    assert first[0] > first[1] > 2 * first[2] > 0
    assert first[3] < nearby.CLUSTER**2 + nearby.LAYOUT**2


def test_parameters_stay_within_their_bounds_whatever_was_measured() -> None:
    known, _ = calibrate(shipped(), CASES, model_times() * 40)
    limits = bounds()
    assert np.all(known.vector() >= limits.low * 0.999) and np.all(known.vector() <= limits.high * 1.001)


def test_a_calibration_is_read_as_it_was_written() -> None:
    _, beside = calibrate(shipped(), CASES, model_times() * np.array([1.0, 1.1, 0.9, 1.2]))
    again = nearby.read("gemm_ampere = 0.8\n" + beside.text())
    assert again is not None
    asked = problem(CASES)
    assert np.allclose(again.factor(asked), beside.factor(asked), rtol=1e-3)
    assert read_parameters("gemm_ampere = 0.8\n" + beside.text()).gemm_ampere == 0.8


def test_search_and_explanation_use_what_was_measured() -> None:
    known, beside = calibrate(shipped(), CASES, model_times() * np.array([1.3, 1.3, 1.0, 1.0]))
    one = CASES[0]
    space = Space(recompute=(one.layout.recompute,), zero=(one.layout.zero,), only={"tp": 8, "pp": 4, "micro_batch": 2})
    told = predict([one], known, nearby=beside).cost.iteration[0]
    found = search(one.model, one.machine, 512, 1536, one.stack, space, known, beside)
    times = {found.layouts.row(i): float(time) for i, time in enumerate(found.cost.iteration)}
    assert times[one.layout] == pytest.approx(told)
    training = Training(one.model, 1536, known, one.stack, space, calibrated=True, nearby=beside)
    assert explain(training, one.layout, one.machine).iteration_s == pytest.approx(told)


def test_without_measurements_nothing_is_near() -> None:
    assert nearby.read("gemm_ampere = 0.8\n") is None


@pytest.mark.parametrize(
    "text",
    [
        "nearby = 3",
        "[[nearby]]\nweight = 1.0\nfeatures = [1.0]",
        "[[nearby]]\nfeatures = [" + ", ".join(["0.0"] * len(nearby.DISTANCES)) + "]",
        "[[nearby]]\nweight = nan\nfeatures = [" + ", ".join(["0.0"] * len(nearby.DISTANCES)) + "]",
        "[[nearby]]\nweight = 'much'\nfeatures = [" + ", ".join(["0.0"] * len(nearby.DISTANCES)) + "]",
    ],
)
def test_a_damaged_calibration_is_refused(text: str) -> None:
    tomllib.loads(text)
    with pytest.raises(UsageError, match="nearby"):
        nearby.read(text)
