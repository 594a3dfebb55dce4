"""Calls of CUDA and cuBLAS are counted and passed on untouched; events tell how far the GPU is. The GPU is a fake."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from resilio_hpc.diagnose.hangs.call_ring import WAITS, CallRing
from resilio_hpc.diagnose.hangs.rank_sight import GpuSight
from resilio_hpc.native import intercept
from tests.support.native import gpu_program
from tests.support.waiting import PATIENCE_S, until

FAMILIES = ("cuda", "cublas", "nccl")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that uses the fakes."""
    compiler = shutil.which("cc")
    if compiler is None or None in [intercept.library(family) for family in FAMILIES]:
        pytest.skip("needs a C compiler")
    return gpu_program.build(tmp_path_factory.mktemp("gpu"), compiler)


def start(
    program: Path, ring: Path, *words: str | Path, watched: Sequence[str] = FAMILIES, **extra: str
) -> subprocess.Popen[str]:
    """Start the program. ``watched``: the families whose libraries are loaded before it."""
    preload = ":".join(str(intercept.library(family)) for family in watched)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent), "LD_PRELOAD": preload,
                   "RESILIO_CALLS": str(ring), "FAKE_RESULTS": "0", **extra}  # fmt: skip
    return subprocess.Popen([program, *words], env=environment, stdout=subprocess.PIPE, text=True)


def run(program: Path, ring: Path, *words: str | Path, watched: Sequence[str] = FAMILIES, **extra: str) -> str:
    """The program's output, once it has ended well."""
    with start(program, ring, *words, watched=watched, **extra) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0  # the fake ends a program that would have broken a real GPU's
    return said


def asked(said: str) -> tuple[int, int, int]:
    """Events that the driver was asked for, how often one was recorded, and queries."""
    _, made, _, recorded, _, queried = said.splitlines()[-1].split()
    return int(made), int(recorded), int(queried)


def await_first_call(ring: Path) -> None:
    """On a busy machine, a program that has said its first line may call late."""
    until(lambda: ring.exists() and CallRing(ring).gpu(), "the program's first call")


def gpu_of(ring: Path) -> GpuSight:
    found = CallRing(ring).gpu()
    assert found is not None
    return found


@pytest.mark.parametrize("results", ["all differ", "0"])
def test_arguments_results_and_errno_pass_untouched_to_the_same_release(
    program: Path, tmp_path: Path, results: str
) -> None:
    modules = [program.parent / f"module{release}.so" for release in gpu_program.RELEASES]
    plain = run(program, tmp_path / "none", "modules", *modules, watched=(), FAKE_RESULTS=results)
    seen = run(program, tmp_path / "ring", "modules", *modules, FAKE_RESULTS=results)
    assert seen == plain
    assert "errno" not in plain
    gpu = gpu_of(tmp_path / "ring")
    assert (gpu.launches, gpu.launching, gpu.graphs) == (36, 0, 8)
    assert (gpu.gemms, gpu.waits, gpu.waits_for) == (78, 44, "")  # cublasGemmEx is one, though it calls Lt


@pytest.mark.parametrize("results", ["all differ", "0"])
def test_calls_of_hip_pass_untouched_and_are_counted(program: Path, tmp_path: Path, results: str) -> None:
    module = program.parent / "module_hip.so"
    plain = run(program, tmp_path / "none", "modules", module, watched=(), FAKE_RESULTS=results)
    seen = run(program, tmp_path / "ring", "modules", module, watched=("hip",), FAKE_RESULTS=results)
    assert seen == plain
    assert "errno" not in plain
    gpu = gpu_of(tmp_path / "ring")
    assert (gpu.launches, gpu.graphs, gpu.waits, gpu.sampled) == (4, 1, 5, 0)


@pytest.mark.parametrize("first", [True, False])
def test_another_tool_may_stand_before_or_after(program: Path, tmp_path: Path, first: bool) -> None:
    tool = tmp_path / "tool.c"
    tool.write_text("""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <unistd.h>
        int cudaStreamSynchronize(void *stream) {
            int (*real)(void *) = (int (*)(void *))dlsym(RTLD_NEXT, "cudaStreamSynchronize");
            write(1, "tool\\n", 5);
            return real(stream);
        }""")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "tool.so", tool], check=True, timeout=PATIENCE_S)
    ours = str(intercept.library("cuda"))
    order = (str(tmp_path / "tool.so"), ours) if first else (ours, str(tmp_path / "tool.so"))
    said = run(program, tmp_path / "ring", "events", LD_PRELOAD=":".join(order))
    assert said.startswith("tool\n")
    ring = tmp_path / "ring"
    assert not first or not ring.exists()  # such a tool asks for no release's function, and finds the vendor's
    assert first or gpu_of(ring).waits == 1


def test_the_end_of_a_call_is_seen_once_the_gpu_has_reached_it(program: Path, tmp_path: Path) -> None:
    made, recorded, queried = asked(run(program, tmp_path / "ring", "events"))
    ring = CallRing(tmp_path / "ring")
    gpu = gpu_of(tmp_path / "ring")
    assert gpu.sampled == recorded
    assert made <= 16
    assert queried > 0
    assert 0 < gpu.reached < gpu.sampled  # those of the last calls are not
    assert gpu.reached_s >= 0
    assert gpu.flops == gpu.gemms * 2.0 * 10 * 20 * 30
    begun, completed = ring.counts
    assert 1 < completed < begun
    (group,), calls = ring.look()
    assert [call.sequence for call in calls if not call.completed] == [group.entered - 1, group.entered]


def test_what_the_gpu_has_not_reached_waits(program: Path, tmp_path: Path) -> None:
    run(program, tmp_path / "fast", "events", FAKE_FAST="1")
    (_, last), *_ = [CallRing(tmp_path / "fast").look()[1][-2:]]
    assert not last.completed  # it was too soon for an event
    run(program, tmp_path / "none", "other")
    _, calls = CallRing(tmp_path / "none").look()
    assert len(calls) == 1  # without any event, all but the last count as done


def test_nothing_is_asked_while_a_stream_is_captured(program: Path, tmp_path: Path) -> None:
    _, recorded, _ = asked(run(program, tmp_path / "ring", "capture"))
    assert recorded > 0  # after it
    ring = CallRing(tmp_path / "ring")
    (group,), calls = ring.look()
    assert group.entered == 25
    assert all(call.sequence > 17 for call in calls)  # nothing waits for a call that went into a graph


def test_an_event_comes_after_the_group_of_calls(program: Path, tmp_path: Path) -> None:
    said = run(program, tmp_path / "ring", "group")
    assert [line for line in said.splitlines() if "inside" in line] == ["inside 0", "inside 1", "inside 2"]
    assert asked(said)[1] == 3


def test_a_stream_of_another_context_is_left_alone(program: Path, tmp_path: Path) -> None:
    assert asked(run(program, tmp_path / "ring", "other")) == (0, 0, 0)


@pytest.mark.parametrize(
    "name", ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamGetCtx", "cuStreamIsCapturing"]
)
def test_after_an_error_nothing_more_is_asked(program: Path, tmp_path: Path, name: str) -> None:
    made, recorded, queried = asked(run(program, tmp_path / "ring", "events", FAKE_ERROR=name))
    assert max(made, recorded, queried) <= 1
    assert gpu_of(tmp_path / "ring").gemms == 8 * 16


def test_a_forked_child_asks_the_gpu_for_nothing_and_counts_for_itself(program: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    run(program, tmp_path / "ring", "fork", child)
    assert (gpu_of(child).launches, gpu_of(child).sampled) == (1, 0)
    assert gpu_of(tmp_path / "ring").launches == 0
    run(program, tmp_path / "parent", "fork")  # its child finds the file taken
    assert (gpu_of(tmp_path / "parent").launches, gpu_of(tmp_path / "parent").waits) == (0, 0)


def test_events_end_with_their_device(program: Path, tmp_path: Path) -> None:
    run(program, tmp_path / "ring", "reset")
    assert gpu_of(tmp_path / "ring").gemms == 2 * 8 * 16


def test_threads_count_without_loss(program: Path, tmp_path: Path) -> None:
    run(program, tmp_path / "ring", "threads", "1000")
    gpu = gpu_of(tmp_path / "ring")
    assert (gpu.launches, gpu.launching) == (20 * 8 * 1000, 0)


def waits(ring: Path) -> bool:
    """Whether a wait is under way; not while there is no ring, or it is half made, or still empty."""
    try:
        found = CallRing(ring).gpu()
    except OSError:
        return False
    return found is not None and found.waits_for != ""


def test_a_wait_that_does_not_end_is_seen_from_outside_dead_or_alive(program: Path, tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    with start(program, ring, "hang") as process:
        until(lambda: waits(ring), "it waits")
        first = gpu_of(ring)
        assert (first.waits_for, first.launches, first.waits) == (WAITS[1], 1, 1)
        until(lambda: gpu_of(ring).waits_s > first.waits_s, "time passes")
        process.kill()
    assert gpu_of(ring).waits_for == WAITS[1]


def test_counts_are_whole_whenever_the_program_is_killed(program: Path, tmp_path: Path) -> None:
    draw = Random(2)
    for turn in range(10):
        ring = tmp_path / f"ring{turn}"
        with start(program, ring, "forever", FAKE_FAST="1") as process:
            assert process.stdout is not None
            process.stdout.readline()
            await_first_call(ring)
            time.sleep(draw.uniform(0.0, 0.02))
            process.send_signal(signal.SIGKILL)
        gpu = gpu_of(ring)
        _, calls = CallRing(ring).look()
        assert gpu.launches - 2 * gpu.gemms in (0, 1, 2)
        assert gpu.launches - 2 * gpu.graphs in (0, 1, 2)  # a graph's launch is counted first
        assert gpu.launching in (0, 1)
        assert gpu.gemms - gpu.waits in (0, 1)
        assert gpu.gemms * 12000.0 - gpu.flops in (0.0, 12000.0)
        assert all(call.shape in ("7 float32", "") for call in calls)


def test_without_a_place_nothing_is_asked_of_the_gpu(program: Path, tmp_path: Path) -> None:
    assert asked(run(program, Path("/nowhere/ring"), "events")) == (0, 0, 0)
