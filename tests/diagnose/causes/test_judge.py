"""Which line names the cause: echoes, progress, several logs, and the public cases where they are at hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.diagnose.causes.judge import LogStream, judge, judge_lines
from resilio_hpc.diagnose.causes.pattern_table import CauseClass
from tests.support.environments import ROOT

CASES = ROOT.parent / "shared" / "failure_logs" / "cases.jsonl"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE) ran for 600000 milliseconds before timing out."
)
STEP = "step 120 loss 2.31 lr 0.0001"


@pytest.mark.parametrize(
    ("lines", "label", "root"),
    [
        ([PEER, OOM, PEER], CauseClass.OOM_GPU, 1),
        ([WATCHDOG, PEER, ECC], CauseClass.GPU_HARDWARE, 2),
        ([PEER, PEER], CauseClass.UNKNOWN, None),
        ([WATCHDOG, PEER], CauseClass.UNKNOWN, 0),
        (["all is well"], CauseClass.UNKNOWN, None),
        ([], CauseClass.UNKNOWN, None),
        # a worker's end is explained only afterwards
        (["RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed.",
          "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed"],
         CauseClass.OOM_HOST, 1),
        # the program's own error beside what follows from it
        (["[rank0]: KeyError: 'lr'", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"],
         CauseClass.USER_CODE, 0),
        (["srun: error: n3: task 3: Exited with exit code 1", "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT x"],
         CauseClass.UNKNOWN, None),
        (["slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***"], CauseClass.SLURM, 0),
        # NCCL informs of a library that it can do without
        (["n1:7:7 [0] NCCL INFO Plugin: libnccl-net.so: cannot open shared object file", OOM], CauseClass.OOM_GPU, 1),
        (["n1:7:7 [0] NCCL WARN NET/IB : mlx5_1:1 async fatal event on QP (0x7): local work queue error"],
         CauseClass.NIC_NETWORK, 0),
        (["OSError: [Errno 28] No space left on device"], CauseClass.STORAGE, 0),
        (["n1:7:7 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device"],
         CauseClass.OOM_HOST, 0),
        (["This may be caused by: No space left on device"], CauseClass.UNKNOWN, None),
    ],
)  # fmt: skip
def test_the_line_that_names_the_cause(lines: list[str], label: CauseClass, root: int | None) -> None:
    cause = judge_lines(lines)
    assert (cause.label, None if cause.root is None else cause.root.index) == (label, root)


def test_a_fault_that_was_followed_by_progress_is_not_the_cause() -> None:
    cause = judge_lines([ECC, STEP, OOM])
    assert (cause.label, cause.overcome) == (CauseClass.OOM_GPU, False)
    overcome = judge_lines([ECC, STEP, PEER])
    assert (overcome.label, overcome.overcome) == (CauseClass.GPU_HARDWARE, True)
    assert overcome.confidence < 0.5


def test_progress_that_a_stream_is_told_of_counts_as_well() -> None:
    stream = LogStream("ledger", ["node n3 lost: silent for 5 s", "step 40 is committed", OOM], progress=frozenset({1}))
    assert judge([stream]).label is CauseClass.OOM_GPU


def test_the_surest_line_of_several_logs_counts_and_its_place_is_known() -> None:
    ranks = [LogStream("rank0.log", [STEP, PEER]), LogStream("rank1.log", [STEP, "", ECC], first=41)]
    cause = judge(ranks)
    assert cause.root is not None
    assert ranks[cause.root.stream].place(cause.root.index) == "rank1.log:43"
    assert sum(cause.others.values()) == 1


@pytest.mark.parametrize(
    ("lines", "label", "root"),
    [
        (["all is well", "zz: the RDMA thing of our own cannot start"], CauseClass.NIC_NETWORK, 1),
        (["zz: no error of RDMA, 0 errors of disks"], CauseClass.UNKNOWN, None),
        (["zz: the disk of our own failed", PEER], CauseClass.STORAGE, 0),
        ([PEER, "zz: the disk of our own failed"], CauseClass.UNKNOWN, None),
        (["zz: the disk of our own failed", "KeyError: 'lr'"], CauseClass.USER_CODE, 1),
        (["step 7 loss 2.1, retries of a failed disk: 3"], CauseClass.UNKNOWN, None),
        (["zz: the disk of our own failed", *["all is well"] * 50], CauseClass.UNKNOWN, None),
        (["zz: the disk of our own failed", STEP], CauseClass.UNKNOWN, None),
    ],
)
def test_without_any_known_line_the_words_of_a_failure_give_a_guess(
    lines: list[str], label: CauseClass, root: int | None
) -> None:
    cause = judge_lines(lines)
    assert (cause.label, None if cause.root is None else cause.root.index) == (label, root)
    if root is not None and label is not CauseClass.USER_CODE:
        assert cause.confidence <= 0.3


def test_a_surer_root_counts_before_an_earlier_one() -> None:
    noise = "[n1:7] PMIX ERROR: PMIX_ERR_NO_PERMISSIONS in file dstore_base.c at line 7"
    assert judge_lines([noise, ECC]).label is CauseClass.GPU_HARDWARE


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=8))
def test_any_lines_get_an_answer(lines: list[str]) -> None:
    cause = judge_lines(lines)
    assert 0 <= cause.confidence <= 1
    assert cause.root is None or 0 <= cause.root.index < len(lines)


@pytest.mark.skipif(not CASES.exists(), reason="the public cases are not at hand")
def test_the_public_cases() -> None:
    wrong, echoes, overconfident, decided = [], [], [], 0
    for case in map(json.loads, CASES.read_text().splitlines()):
        cause = judge_lines([line["text"] for line in case["lines"]])
        label = "user_code" if cause.label is CauseClass.LAUNCH_CONFIG else cause.label.value
        right = label in (case["label"], *case["also_ok"])
        if cause.root is not None and case["lines"][cause.root.index]["role"] == "echo":
            echoes.append(case["id"])
        if case["decidable"] == "yes":
            decided += 1
            wrong += [] if right else [case["id"]]
        elif not right and cause.confidence >= 0.7:
            overconfident.append(case["id"])
    assert (echoes, overconfident) == ([], [])
    assert len(wrong) <= 0.03 * decided, wrong
