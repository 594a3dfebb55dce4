"""Children's output arrives whole; one that nobody can take holds no child up."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from resilio_hpc.launch.process.output_relay import Relay
from tests.support.waiting import PATIENCE_S

LINES = b"".join(b"%d a line of output\n" % number for number in range(20_000))


def test_all_of_it_arrives_in_order_when_it_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        relay = Relay(file.fileno())
        for part in (LINES[:100_000], LINES[100_000:]):
            subprocess.run(["cat"], input=part, stdout=relay.fd, check=True, timeout=PATIENCE_S)
        relay.close()
    assert (tmp_path / "out").read_bytes() == LINES


def test_a_child_ends_though_the_output_hangs_and_it_is_said_what_is_left_out() -> None:
    read, write = os.pipe()
    relay = Relay(write, most_bytes=200_000, hangs_s=0.1)
    subprocess.run(
        ["cat"], input=LINES * 20, stdout=relay.fd, check=True, timeout=PATIENCE_S
    )  # without a reader: it ends
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(iter(lambda: os.read(read, 1 << 20), b"")))
    reader.start()
    relay.close()
    os.close(write)
    reader.join(PATIENCE_S)
    text = b"".join(got)
    assert text.startswith(LINES[:1000])
    assert text.endswith(LINES[-1000:])
    assert text.count(b"bytes of output are left out here") == 1
    assert len(text) < len(LINES) * 19


def test_an_output_that_is_only_slow_loses_nothing() -> None:
    read, write = os.pipe()
    relay = Relay(write, most_bytes=10_000, hangs_s=600.0)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(iter(lambda: os.read(read, 1000), b"")))
    reader.start()
    subprocess.run(["cat"], input=LINES, stdout=relay.fd, check=True, timeout=PATIENCE_S)
    relay.close()
    os.close(write)
    reader.join(PATIENCE_S)
    assert b"".join(got) == LINES


def test_an_output_that_is_closed_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    relay = Relay(write)
    subprocess.run(["cat"], input=LINES, stdout=relay.fd, check=True, timeout=PATIENCE_S)
    relay.close()
    os.close(write)
