"""How long a save to an object store takes until it is durable, beside a bare upload of as many bytes.

python benchmarks/object_store.py [--gb 1] [--repeats 7] [--away-ms 0] [--url http://…]    # without a URL: radosgw

All use the same bytes in shared memory, the same size of parts and as many at a time, in this process. The save is all
of it: from the snapshot to its commit, and the removal of an older step. "durable" ends once its step exists. The bare
upload has no checksum of blocks, no notes and no commit; "checked" has the checksums that boto3 adds by default. They
take turns, in an order that changes; a ratio is of the neighbours of one turn. "client" is the processor's time of this
process, as the store's own is elsewhere on most sites. ``--away-ms``: every request of all waits for so long first, as
one over a long way does.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import numpy as np

from resilio_hpc.ckpt.restore.arena_source import Mappings
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Commit, Committed, Persist, Persisted
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.s3_bucket import S3Bucket
from resilio_hpc.ckpt.store.s3_client import THREADS
from resilio_hpc.ckpt.store.s3_files import PART_BYTES

TENSORS = 40
BARE, CHECKED, SAVE, DURABLE = "bare upload", "checked", "save", "durable"
SHM = Path("/dev/shm")


class Turn(NamedTuple):
    """What one of them took. ``client_s``: of the processor, in this process."""

    seconds: float
    client_s: float
    requests: int


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--away-ms", type=float, default=0.0)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    with ExitStack() as stack:
        collect: Callable[[], object] = int
        if not options.url:
            sys.path.insert(0, str(Path(__file__).parent.parent))
            from tests.support.ckpt.object_server import ACCESS, SECRET, object_server

            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options.url = stack.enter_context(object_server(home))
            os.environ.update(AWS_ACCESS_KEY_ID=ACCESS, AWS_SECRET_ACCESS_KEY=SECRET)
            collect = partial(free, home / "ceph.conf")
        os.environ["AWS_ENDPOINT_URL"] = options.url
        found = measure(options.gb, options.repeats, options.away_ms / 1e3, collect)
    report(found, int(options.gb * 1e9))


def free(conf: Path) -> None:
    """Let the store free the memory of what was removed: else it does so hours later."""
    argv = ["radosgw-admin", "-c", str(conf), "gc", "process", "--include-all"]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)


def measure(gb: float, repeats: int, away_s: float, collect: Callable[[], object]) -> dict[str, list[Turn]]:
    """Take turns, after one of each that does not count."""
    bucket = S3Bucket("benchmark")
    client = bucket._client
    checked = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket=bucket.name)
    counted: list[float] = []
    steps: list[float] = []

    def before(**of: Any) -> None:
        counted.append(time.monotonic())
        time.sleep(away_s)

    def after(context: Any, **of: Any) -> None:
        steps.append(time.monotonic())

    for each in (client, checked):
        each.meta.events.register("before-call.s3", before)
    client.meta.events.register("after-call.s3.PutObject", after)
    found: dict[str, list[Turn]] = {BARE: [], CHECKED: [], SAVE: [], DURABLE: []}
    size = int(gb * 1e9 / TENSORS / 8)
    rng = np.random.default_rng(0)
    with closing(ArenaPair(None, Owner(0, 0, 1, 1, 0, "own", "run"), SHM)) as arenas, ThreadPoolExecutor(2) as pool:
        mappings = Mappings()
        numbers = rng.random(size + TENSORS)
        state = {f"layer-{number}": numbers[number : number + size] for number in range(TENSORS)}
        for turn in range(repeats + 1):
            arena = Snapshot(arenas, turn + 1, flatten(state), pool).finish()[0]
            with arena.open("rb") as file:
                payload = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[: 8 * TENSORS * size]
            acts = {
                BARE: partial(bare, client, payload),
                CHECKED: partial(bare, checked, payload),
                SAVE: partial(save, arena, turn + 1, mappings),
            }
            for name in sorted(acts, reverse=bool(turn % 2)):
                counted.clear()
                began, cpu_s = time.monotonic(), time.process_time()
                acts[name]()
                took = Turn(time.monotonic() - began, time.process_time() - cpu_s, len(counted))
                if turn:
                    found[name].append(took)
                    if name == SAVE:
                        found[DURABLE].append(took._replace(seconds=steps[-2] - began))  # `latest` comes after the step
                client.delete_object(Bucket=bucket.name, Key="bare")
                collect()
            if turn:
                print(f"{turn:3}", *(f"{name} {turns[-1].seconds:.2f} s" for name, turns in found.items()), flush=True)
    return found


def bare(client: Any, payload: memoryview) -> None:
    """Upload in parts, as the client's documentation does."""
    where = {"Bucket": "benchmark", "Key": "bare"}
    upload = client.create_multipart_upload(**where)["UploadId"]

    def part(number: int) -> dict[str, object]:
        data = bytearray(payload[number * PART_BYTES : (number + 1) * PART_BYTES])
        answer = client.upload_part(Body=data, PartNumber=number + 1, UploadId=upload, **where)
        return {key: answer[key] for key in ("ETag", "ChecksumCRC32") if key in answer} | {"PartNumber": number + 1}

    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(part, range(-(-len(payload) // PART_BYTES))))
    client.complete_multipart_upload(UploadId=upload, MultipartUpload={"Parts": parts}, **where)


def save(arena: Path, step: int, mappings: Mappings) -> None:
    """Write the file of a node and commit, as a saver does."""
    directory = "/s3:/benchmark/run"
    written = saver.serve(Persist(step, 0, 0, 1, 0, [str(arena)], directory), mappings=mappings)
    assert isinstance(written, Persisted), written
    done = saver.serve(Commit(step, 0, 0, 1, directory, [written.record], Retention(keep_last=1)))
    assert isinstance(done, Committed), done
    mappings.let_go()


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median ratio."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def report(found: dict[str, list[Turn]], size: int) -> None:
    """Print medians, spread, and the ratios to the bare upload."""
    print(f"{size / 1e9:.2f} GB in parts of {PART_BYTES >> 20} MiB, {THREADS} at a time, {len(found[BARE])} turns")
    for name, turns in found.items():
        seconds = [turn.seconds for turn in turns]
        ratios = [turn.seconds / base.seconds for turn, base in zip(turns, found[BARE], strict=True)]
        of_client = [turn.client_s / base.client_s for turn, base in zip(turns, found[BARE], strict=True)]
        low, high = interval(ratios)
        print(
            f"{name:12} median {statistics.median(seconds):6.2f} s ({min(seconds):.2f} … {max(seconds):.2f})  "
            f"× {statistics.median(ratios):.2f} ({low:.2f} … {high:.2f})  "
            f"client {statistics.median(turn.client_s for turn in turns):.2f} s × {statistics.median(of_client):.2f}  "
            f"{statistics.median(turn.requests for turn in turns):.0f} requests"
        )


if __name__ == "__main__":
    main()
