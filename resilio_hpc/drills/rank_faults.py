"""Drills of ranks that hang, fail or become slow, and of helper processes that are stopped."""

from __future__ import annotations

from typing import Any

from resilio_hpc.drills.kind import HANGS, LOCAL, LOST, SHRINK, SPARE, Act, Drill


def hangs() -> list[Drill]:
    """Ranks that live and do not go on."""
    waits: dict[str, Any] = {"launch_arguments": ("--hang-timeout", "5")}  # they might still go on by themselves
    absent: dict[str, Any] = {"hang": "absent", "blamed": 1, **waits}
    return [
        Drill("deadlock of two groups", (), ("hang",), hang="deadlock", script_arguments=("--hang", "deadlock")),
        Drill("mismatched collective", (), ("hang",), hang="mismatch", blamed=1,
              script_arguments=("--hang", "mismatch")),
        Drill("endless loop", (), ("hang",), script_arguments=("--hang", "loop"), **absent),
        Drill("Python's lock held for ever", (), ("hang",), script_arguments=("--hang", "lock"), **absent),
        Drill("rank sleeps for ever", (), ("hang",), script_arguments=("--hang", "sleep"), **absent),
        Drill("rank fails and its process does not end", (), ("rank_exception",), told="end_forced",
              script_arguments=("--hang", "at-exit")),
        Drill("rank sleeps before init_process_group", (), ("hang",),
              script_arguments=("--hang-before-start", "sleep"), **absent),
        Drill("rank stopped before init_process_group", (), ("hang",), hang="absent", blamed=1,
              script_arguments=("--hang-before-start", "stop")),
        # it is reported, and no rank is restarted: another one would wait there, too
        Drill("a rank reads from a shared directory that hangs for 15 s",
              (Act("hang_shared"), Act("release_shared", after_s=15.0)), **HANGS, told="hang", world_size=6,
              script_arguments=("--reads",)),
    ]  # fmt: skip


def stopped_helpers() -> list[Drill]:
    """Stop a process of the launcher's own (SIGSTOP), or hang its disk, while it is needed."""
    told: dict[str, Any] = {"told": "helper_stopped", "world_size": 6}

    def twice(helper: str, to: str) -> tuple[Act, Act]:
        return Act(f"stop_{helper}", to), Act(f"stop_{helper}", to, on="helper_stopped")

    return [
        # it is continued; the second time it is killed, while all ranks wait for their last checkpoint
        Drill("saver stopped, twice", twice("saver", "follower"), **told),
        Drill("I/O worker stopped, twice", twice("io_worker", "leader"), **told),
        Drill("zygote stopped, a rank killed meanwhile",
              (Act("stop_zygote", "follower"), Act("kill_rank", "follower", after_s=0.5)),
              ("rank_killed", "rank_exception"), **told),  # its peers may report first
        Drill("rendezvous store stopped, a rank killed meanwhile",
              (Act("stop_store", "leader"), Act("kill_rank", "follower", after_s=0.5)), ("rank_killed",), world_size=6),
        Drill("agent stopped", (Act("stop_agent", "follower"),), LOST, **SPARE),
        Drill("controller's agent stopped", (Act("stop_agent", "leader"),), LOST, **SHRINK),
        Drill("shared directory hangs at the last checkpoint",
              (Act("hang_shared", "follower", after_s=0.2), Act("release_shared", "follower", after_s=20.0)), **HANGS,
              world_size=6, steps=120),
    ]  # fmt: skip


def errors() -> list[Drill]:
    """Errors of GPUs and NCCL: whose fault, and what follows."""
    failed = ("rank_exception",)
    return [
        Drill("GPU out of memory", (), failed, fault="oom_gpu", blamed=1, script_arguments=("--fail", "gpu-memory")),
        Drill("GPU memory held by another process", (), failed, fault="oom_gpu", blamed=1,
              script_arguments=("--fail", "gpu-memory-of-others")),
        Drill("GPU with an uncorrectable error, with a spare", (), failed, fault="gpu_hardware", blamed=1, moved=True,
              script_arguments=("--fail", "gpu-sick"), **SPARE),
        Drill("NCCL error", (), failed, fault="unknown", blamed=1, traced=True, script_arguments=("--fail", "nccl")),
        Drill("NCCL watchdog ends a rank", (), ("rank_killed",), fault="unknown", blamed=1, traced=True,
              script_arguments=("--fail", "nccl-watchdog")),
        Drill("the same mistake in each life", fault="user_code", blamed=1, verdict="no_progress",
              script_arguments=("--fail", "bug")),
    ]  # fmt: skip


def hardware() -> list[Drill]:
    """Hardware that fails in silence, or fills up: GPUs are fake ones, a bit is flipped by the script."""
    bad_gpu = (Act("gpu_bad", "follower"), Act("kill_rank", "follower", after_s=0.5))
    evicts: dict[str, Any] = {"launch_arguments": ("--evict-devices=on",), "gpus": 2}
    return [
        Drill("GPU goes bad, its node goes on with the other", bad_gpu, ("rank_killed",), told="device_evicted",
              **evicts, world_size=5),
        Drill("GPU goes bad, with a spare", bad_gpu, ("rank_killed",), told="device_evicted", **evicts, **SPARE),
        # few saves: the newest verified step must still be kept when replicas are found to differ
        Drill("one bit of a parameter flips", (), ("corruption",), told="digests_differ", torch=True, steps=4000,
              step_s=0.05, launch_arguments=("--on-corruption", "restore"),
              script_arguments=("--flip-at", "330", "--every", "100")),
        Drill("local disk full", (Act("fill_local", "follower"),), told="local_failed", world_size=6,
              launch_arguments=("--local-checkpoints", LOCAL), script_arguments=("--elements", "100000")),
    ]  # fmt: skip


def slow_ranks() -> list[Drill]:
    """Ranks that train, but slower; the report must name the right rank and cause."""
    learned_s = 60.0  # what is usual must be known
    work = ("--work-seconds", "0.02", "--every", "50")
    small: dict[str, Any] = {"nodes": 2, "nnodes": "2", "steps": 6000, "step_s": 0.05}
    return [
        Drill("rank throttled by its control group", (Act("throttle_rank", "follower", after_s=learned_s),), **small,
              slow="cpu_throttled", script_arguments=work),
        Drill("slow network card", (Act("slow_link", "follower", after_s=learned_s),), **small,
              launch_arguments=("--heartbeat-timeout", "20"), slow="link",
              script_arguments=(*work, "--elements", "400000")),
        Drill("slow data loader", (Act("slow_loader", "follower", after_s=learned_s),), **small,
              slow="data_loader", script_arguments=(*work, "--loader", "/nvme/loader.slow")),
    ]  # fmt: skip
