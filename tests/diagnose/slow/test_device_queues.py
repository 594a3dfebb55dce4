"""How much waits for network devices: asked of the real kernel, and read from answers that are cut or spoiled."""

from __future__ import annotations

import random
import struct
import subprocess
import sys

from resilio_hpc.diagnose.slow import device_queues
from tests.support.requirements import need_program, need_root
from tests.support.waiting import PATIENCE_S

QUEUED = """
import socket
from resilio_hpc.diagnose.slow import device_queues
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
    print(device_queues.backlog())
    for _ in range(20):
        out.sendto(bytes(1000), ("10.77.0.2", 9))
    print(device_queues.backlog())
"""
DEVICE = """
ip link add sends type veth peer name takes && ip link set sends arp off && ip addr add 10.77.0.1/24 dev sends &&
ip link set takes up && ip link set sends up &&
tc qdisc replace dev sends root tbf rate 8kbit burst 1600 limit 100000 &&
exec "$0" -c "$1"
"""


def test_what_waits_for_a_slow_device_is_counted() -> None:
    need_root()
    need_program("ip", "tc", package="iproute2")
    argv = ["unshare", "--net", "sh", "-c", DEVICE, sys.executable, QUEUED]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    before, after = (int(line) for line in ran.stdout.split())
    assert before < 2000  # the kernel itself may have said something
    assert after >= 15 * 1000


def answer(device: int, waits: int) -> bytes:
    queue = struct.pack("=HHIIIII", 24, 3, waits // 1000, waits, 0, 0, 0)
    basic = struct.pack("=HHQQ", 20, 1, 7, 7)
    stats = struct.pack("=HH", 4 + len(basic) + len(queue), 7) + basic + queue
    kind = struct.pack("=HH4s", 8, 1, b"tbf\0")
    body = struct.pack("=BxxxiIII", 0, device, 1 << 16, 0xFFFFFFFF, 2) + kind + stats
    return struct.pack("=IHHII", 16 + len(body), 36, 2, 1, 0) + body


END = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)


def test_an_answer_names_each_device_and_its_end() -> None:
    assert device_queues.read_answer(answer(2, 300) + answer(3, 90_000)) == ([(2, 300), (3, 90_000)], False)
    assert device_queues.read_answer(answer(2, 300) + END + answer(3, 1)) == ([(2, 300)], True)
    refused = struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -95)
    assert device_queues.read_answer(refused) == ([], True)


def test_answers_cut_or_spoiled_anywhere_are_survived() -> None:
    whole = answer(2, 300) + answer(3, 90_000) + END
    for length in range(len(whole)):
        found, _ = device_queues.read_answer(whole[:length])
        assert found in ([], [(2, 300)], [(2, 300), (3, 90_000)])
    draw = random.Random(7)
    for _ in range(2000):
        spoiled = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
        found, _ = device_queues.read_answer(bytes(spoiled))
        assert len(found) <= len(whole) // 8
