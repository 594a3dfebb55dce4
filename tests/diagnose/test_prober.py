"""The prober alone: it outlives whatever its checker asks at a bad moment, and measures however late it begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from typing import IO, Any

import msgspec
import pytest

from resilio_hpc.diagnose import interpreter, work
from resilio_hpc.diagnose.policy import PairPolicy, pair_policy
from tests.support.waiting import PATIENCE_S

SMALL: PairPolicy = msgspec.structs.replace(pair_policy(), cpu_matrix=16, block_s=0.001, blocks=2)


def until(said: IO[bytes], key: str) -> dict[str, Any]:
    for line in said:
        heard: dict[str, Any] = json.loads(line)
        if key in heard:
            return heard
    raise AssertionError(f"it ended, and never said {key}")


@pytest.mark.parametrize("orders", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_a_signal_for_a_child_that_has_just_ended_does_not_end_the_prober(orders: int) -> None:
    argv = [*interpreter.command("prober"), str(os.getpid()), "1", msgspec.json.encode(SMALL).decode()]
    over = threading.Event()
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as prober:
        assert prober.stdin and prober.stdout
        until(prober.stdout, "ready")

        def signals() -> None:
            while not over.wait(0.0002):
                prober.send_signal(signal.SIGUSR1)

        storm = threading.Thread(target=signals)
        storm.start()
        try:
            for number in range(orders):
                order = {"order": number, "rank": 0, "paired": False}
                prober.stdin.write(json.dumps(order).encode() + b"\n")
                prober.stdin.flush()
                until(prober.stdout, "ended")
        finally:
            over.set()
            storm.join()
        assert prober.poll() is None
        prober.stdin.close()
        assert prober.wait(PATIENCE_S) == 0


def test_a_block_has_a_product_however_late_it_begins() -> None:
    """On a busy machine the time of a block may be over before its first product."""

    class LateStopwatch(work.Stopwatch):
        def __init__(self) -> None:
            super().__init__()
            self._began -= 1.0

    _, blocks, _ = work.compute(SMALL, LateStopwatch)
    assert len(blocks) == SMALL.blocks and min(blocks) > 0
