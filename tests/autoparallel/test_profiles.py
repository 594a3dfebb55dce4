"""Profiles: the fit of latency and bandwidth, the file, and that predictions give back what was measured."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines, machine
from resilio_hpc.autoparallel.cost import collectives
from resilio_hpc.autoparallel.cost.collectives import CollectiveGroup
from resilio_hpc.autoparallel.measure import compute_bench, profile_file
from resilio_hpc.autoparallel.measure.comm_backends import RankAddress, open_backend, place
from resilio_hpc.autoparallel.measure.comm_bench import groups_of, sizes_to, spread
from resilio_hpc.autoparallel.measure.comm_fit import FACTORS, Curve, fit
from resilio_hpc.autoparallel.measure.compute_samples import Sample
from resilio_hpc.autoparallel.measure.measured import apply
from resilio_hpc.autoparallel.measure.predict import predict_rows
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.core.errors import UsageError

SIZES = sizes_to(256 << 20)
RING = ("all-reduce", "network")
ABOUT = {"device": "NVIDIA H100 80GB HBM3", "backend": "nccl"}


def measured(
    collective: str, span: str, ranks: int, per_node: int, latency_s: float, bandwidth: float, seed: int = 0
) -> Curve:
    """Of a machine with exactly this latency and bandwidth, 2 % of noise, and a disturbance in every fifth sample."""
    draw = random.Random(seed)
    samples = {}
    for size in SIZES:
        true = latency_s + FACTORS[collective](ranks) * size / bandwidth
        samples[size] = [true * draw.uniform(0.98, 1.02) * (5 if draw.random() < 0.2 else 1) for _ in range(7)]
    return fit(collective, span, ranks, per_node, samples)


def cluster() -> Profile:
    """Two nodes of eight GPUs: 300 GB/s inside, 90 GB/s between."""
    rings = ("all-reduce", "all-gather", "reduce-scatter")
    inner = [measured(name, "node", 8, 8, 30e-6, 300e9, seed) for seed, name in enumerate(rings)]
    outer = [measured(name, "network", 16, 8, 80e-6, 90e9, seed + 9) for seed, name in enumerate(rings)]
    return Profile((*inner, *outer, measured("send-recv", "network", 2, 1, 20e-6, 9e9)), ABOUT)


@pytest.mark.parametrize("collective", FACTORS)
def test_latency_and_bandwidth_are_found_through_noise_and_disturbances(collective: str) -> None:
    for seed in range(5):
        curve = measured(collective, "network", 16, 8, 40e-6, 25e9, seed)
        assert curve.latency_s == pytest.approx(40e-6, rel=0.05)
        assert curve.bandwidth == pytest.approx(25e9, rel=0.05)
        assert curve.error < 0.03


def test_what_no_machine_has_is_refused() -> None:
    flat = {size: [1e-3] for size in SIZES}
    with pytest.raises(UsageError, match=r"a bandwidth of \S+ bytes/s is not plausible.*larger sizes"):
        fit("broadcast", "node", 2, 2, flat)
    with pytest.raises(UsageError, match="a fit needs three"):
        fit("broadcast", "node", 2, 2, {1024: [1e-3], 4096: [2e-3]})
    with pytest.raises(UsageError, match="no clock runs like that"):
        fit("broadcast", "node", 2, 2, {size: [0.0] for size in SIZES})


def test_the_ends_are_measured_first_so_that_a_short_time_shows_both_latency_and_bandwidth() -> None:
    assert spread([1, 2, 3, 4, 5]) == [1, 5, 3, 2, 4]
    assert sorted(spread(SIZES)) == SIZES
    assert spread([1, 2, 3]) == [1, 3, 2]


def test_ranks_are_grouped_by_node_and_transfers_go_side_by_side() -> None:
    hosts = ["a", "a", "a", "b", "b", "b"]
    assert groups_of(hosts, "all-reduce") == {"node": [[0, 1, 2], [3, 4, 5]], "network": [[0, 1, 2, 3, 4, 5]]}
    assert groups_of(hosts, "send-recv") == {"node": [[0, 1], [3, 4]], "network": [[0, 3], [1, 4], [2, 5]]}
    assert groups_of(["a", "a"], "broadcast") == {"node": [[0, 1]]}
    assert groups_of(["a", "b"], "broadcast") == {"network": [[0, 1]]}


def test_a_rank_knows_its_place_from_srun_or_from_torchruns_variables() -> None:
    srun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "n[2-3]"}
    assert place({**srun, "SLURM_JOB_ID": "12001"}) == RankAddress(3, 4, 1, "n2", 20001)
    here = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99"}
    assert place({**srun, **here}) == RankAddress(1, 2, 1, "127.0.0.1", 99)
    with pytest.raises(UsageError, match="this runs under srun"):
        place({})


def test_an_unknown_back_end_is_an_error() -> None:
    with pytest.raises(UsageError, match="unknown back end 'ucx': there are gloo, nccl, mpi"):
        open_backend("ucx")


def test_a_file_holds_both_parts_with_units_and_keeps_the_other_one(tmp_path: Path) -> None:
    path, whole = tmp_path / "cluster.h5", cluster()
    samples = [Sample("matmul", (8192, 8192, 8192), (1.5e-3, 1.6e-3)), Sample("optimizer", (1000,), (1e-6, 1e-6))]
    profile_file.write_compute(path, samples, {"device": "cpu"})
    profile_file.write_communication(path, whole.curves, ABOUT)
    read = profile_file.read(path)
    assert set(read.curves) == set(whole.curves)
    assert replace(read, curves=()) == Profile((), ABOUT, tuple(samples), {"device": "cpu"})
    with h5py.File(path) as file:
        group = file["communication/all-reduce/network"]
        assert {name: group[name].attrs["units"] for name in group} == {
            "latency": "s", "bus_bandwidth": "byte/s", "size": "byte", "time": "s", "samples": "s",
        }  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_profile_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with pytest.raises(UsageError, match="No such file"):
        profile_file.read(path)
    path.write_text("no HDF5")
    with pytest.raises(UsageError, match="is no profile, or a damaged one"):
        profile_file.read(path)
    with h5py.File(path, "w") as file:
        file.attrs["format"] = "something"
    with pytest.raises(UsageError, match="but no profile"):
        profile_file.read(path)
    path.unlink()
    profile_file.write_communication(path, cluster().curves, ABOUT)
    with h5py.File(path, "a") as file:
        file["communication/all-reduce/node/bus_bandwidth"][()] = 1e20
    with pytest.raises(UsageError, match="not plausible"):
        profile_file.read(path)
    with h5py.File(path, "a") as file:
        del file["communication/all-reduce/node/bus_bandwidth"]
    with pytest.raises(UsageError, match="damaged"):
        profile_file.read(path)
    data = path.read_bytes()
    for length in range(0, len(data), 997):
        path.write_bytes(data[:length])
        with pytest.raises(UsageError):
            profile_file.read(path)


def test_the_cost_model_gives_back_what_was_measured() -> None:
    found, efficiency, notes = apply(cluster(), machine("H100"), shipped())
    assert notes == []
    machines = Machines.of([found])
    for ranks, local, latency_s, bandwidth in ((8, 8, 30e-6, 300e9), (16, 8, 80e-6, 90e9)):
        group = CollectiveGroup(np.array([float(ranks)]), np.array([float(local)]))
        for size in (1 << 20, 1 << 28):
            time = float(collectives.all_reduce(np.array([float(size)]), group, machines, efficiency)[0])
            assert time == pytest.approx(latency_s + 2 * (ranks - 1) / ranks * size / bandwidth, rel=0.06)
    sent = float(collectives.transfer(np.array([float(1 << 28)]), np.zeros(1), machines, efficiency)[0])
    assert sent == pytest.approx((1 << 28) / 9e9, rel=0.06)


def test_what_trees_gain_between_nodes_is_measured_where_rings_are_too() -> None:
    whole = cluster()
    trees = replace(whole, curves=tuple(one for one in whole.curves if (one.collective, one.span) != RING))
    faster = measured("all-reduce", "network", 16, 8, 80e-6, 1.7 * 90e9)
    found, efficiency, _ = apply(replace(trees, curves=(*trees.curves, faster)), machine("H100"), shipped())
    assert efficiency.tree == pytest.approx(0.8, rel=0.1)
    assert found.nic_gbytes_s * efficiency.nic == pytest.approx(90, rel=0.05)
    alone = replace(whole, curves=tuple(one for one in whole.curves if one.span == "node"))
    found, efficiency, _ = apply(replace(alone, curves=(*alone.curves, faster)), machine("H100"), shipped())
    group, size = CollectiveGroup(np.array([16.0]), np.array([8.0])), np.array([float(1 << 28)])
    time = float(collectives.all_reduce(size, group, Machines.of([found]), efficiency)[0])
    assert time == pytest.approx(80e-6 + 15 / 8 * size[0] / (1.7 * 90e9), rel=0.06)


def test_a_slower_network_makes_a_slower_iteration_and_other_gpus_are_left_alone() -> None:
    row = {"layers": "32", "hidden": "4096", "heads": "32", "vocab": "32000", "seq": "4096", "global_batch": "64",
           "micro_batch": "1", "gpu": "H100", "num_gpus": "64", "tp": "8", "pp": "1", "dp": "8"}  # fmt: skip
    whole = cluster()
    slow = replace(whole, curves=tuple(replace(one, bandwidth=one.bandwidth / 8) for one in whole.curves))
    fast_s, slow_s = (
        float(predict_rows([row], shipped(), profile=one)[0]["pred_iter_time_s"]) for one in (whole, slow)
    )
    assert slow_s > 1.3 * fast_s
    measured, other = predict_rows([row, {**row, "gpu": "A100"}], shipped(), profile=slow)
    (plain,) = predict_rows([{**row, "gpu": "A100"}], shipped())
    assert float(measured["pred_iter_time_s"]) == slow_s
    assert other["pred_iter_time_s"] == plain["pred_iter_time_s"]
    assert "profile: communication was measured on NVIDIA H100 80GB HBM3, not on A100: not used" in other["pred_note"]


def test_measured_operators_become_parts_of_the_peak_within_their_bounds() -> None:
    h100 = machine("H100")
    seconds = 2 * 8192**3 / (0.7 * h100.bf16 * 1e12)
    about = {"device": "NVIDIA H100 80GB HBM3"}
    good = Profile(samples=(Sample("matmul", (8192, 8192, 8192), (seconds,)),), about_compute=about)
    _, efficiency, notes = apply(good, h100, shipped())
    assert 0.7 < efficiency.gemm_hopper < 0.8 and notes == []  # waves and depth are counted apart
    fast = Profile(samples=(Sample("matmul", (8192, 8192, 8192), (seconds / 2,)),), about_compute=about)
    _, efficiency, notes = apply(fast, h100, shipped())
    assert efficiency == shipped() and "outside its physical bounds" in notes[0]
    tried = Profile(samples=good.samples, about_compute={"device": "cpu"})
    assert apply(tried, h100, shipped())[1:] == (
        shipped(),
        ["profile: operators were measured on a CPU, for trying: not used"],
    )


def test_operators_are_measured_on_a_cpu_for_trying() -> None:
    tiny = {"matmul": [(8, 8, 8)], "attention": [(1, 1, 16, 8)], "normalisation": [(4, 8)], "optimizer": [(100,)]}
    threads = torch.get_num_threads()
    try:
        samples = compute_bench.measure(torch.device("cpu"), tiny, lambda text: None)
    finally:
        torch.set_num_threads(threads)
    assert [(one.kind, list(one.shape)) for one in samples] == [(k, list(v[0])) for k, v in tiny.items()]
    assert all(len(one.samples_s) == compute_bench.REPEATS and one.median_s > 0 for one in samples)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_operators_of_a_gpu_stay_below_its_peak() -> None:
    device = compute_bench.device_of("cuda")
    samples = compute_bench.measure(device, compute_bench.SHAPES, lambda text: None)
    found = machine(compute_bench.device_name(device))
    products = [one.rate for one in samples if one.kind == "matmul"]
    assert 0.3 * found.bf16 * 1e12 < max(products) < found.bf16 * 1e12
    _, efficiency, notes = apply(
        Profile(samples=tuple(samples), about_compute={"device": compute_bench.device_name(device)}), found, shipped()
    )
    assert efficiency != shipped(), notes
