"""How long a save to an object store takes until it is durable, beside a bare upload of as many bytes.

python benchmarks/object_store.py [--gb 1] [--files 1] [--repeats 7] [--away-ms 0] [--url http://…]

Without a URL it starts a radosgw.

All use the same bytes in shared memory, the same size of parts and as many at a time, in this process. The save is all
of it: from the snapshot to its commit, and the removal of an older step. "durable" ends once its step exists. The bare
upload has no checksum of blocks, no notes and no commit; "checked" has the checksums that boto3 adds by default. They
take turns, in an order that changes; a ratio is of the neighbours of one turn. "client" is the processor's time of this
process, as the store's own is elsewhere on most sites. ``--away-ms``: every request of all waits for so long first, as
one over a long way does. ``--files``: as many nodes write at once, a file each, and as many bare uploads go at once.
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

from resilio_hpc.ckpt.format.manifest import ShardRecord
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
    parser.add_argument("--files", type=int, default=1)
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
        found = measure(int(options.gb * 1e9), options.files, options.repeats, options.away_ms / 1e3, collect)
    report(found, int(options.gb * 1e9), options.files)


def free(conf: Path) -> None:
    """Let the store free the memory of what was removed: else it does so hours later."""
    argv = ["radosgw-admin", "-c", str(conf), "gc", "process", "--include-all"]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)


def measure(
    size_bytes: int, files: int, repeats: int, away_s: float, collect: Callable[[], object]
) -> dict[str, list[Turn]]:
    """Take turns, after one of each that does not count."""
    bucket = S3Bucket("benchmark")
    client = bucket._client
    checked = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket=bucket.name)
    counted: list[float] = []
    steps: list[float] = []

    def before(params: Any, context: Any, **of: Any) -> None:
        context["path"] = params["url_path"]
        counted.append(time.monotonic())
        time.sleep(away_s)

    def after(context: Any, **of: Any) -> None:
        if "/step-" in context["path"]:
            steps.append(time.monotonic())

    for each in (client, checked):
        each.meta.events.register("before-call.s3", before)
    client.meta.events.register("after-call.s3.PutObject", after)
    found: dict[str, list[Turn]] = {BARE: [], CHECKED: [], SAVE: [], DURABLE: []}
    tensors = max(1, TENSORS // files)
    size = int(size_bytes / files / tensors / 8)
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        owners = [Owner(rank, rank, files, files, 0, "own", "run") for rank in range(files)]
        arenas = [stack.enter_context(closing(ArenaPair(None, owner, SHM))) for owner in owners]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        nodes = stack.enter_context(ThreadPoolExecutor(files))
        mappings = [Mappings() for _ in owners]
        numbers = rng.random(size + tensors)
        state = {f"layer-{number}": numbers[number : number + size] for number in range(tensors)}
        for turn in range(repeats + 1):
            paths = [Snapshot(pair, turn + 1, flatten(state), pool).finish()[0] for pair in arenas]
            payloads = [mapped(path)[: 8 * tensors * size] for path in paths]
            acts = {
                BARE: partial(all_bare, nodes, client, payloads),
                CHECKED: partial(all_bare, nodes, checked, payloads),
                SAVE: partial(save, paths, turn + 1, nodes, mappings),
            }
            for name in sorted(acts, reverse=bool(turn % 2)):
                counted.clear()
                began, cpu_s = time.monotonic(), time.process_time()
                acts[name]()
                took = Turn(time.monotonic() - began, time.process_time() - cpu_s, len(counted))
                if turn:
                    found[name].append(took)
                    if name == SAVE:
                        found[DURABLE].append(took._replace(seconds=steps[-1] - began))
                for number in range(files):
                    client.delete_object(Bucket=bucket.name, Key=f"bare-{number}")
                collect()
            if turn:
                print(f"{turn:3}", *(f"{name} {turns[-1].seconds:.2f} s" for name, turns in found.items()), flush=True)
    return found


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file in shared memory."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def all_bare(nodes: ThreadPoolExecutor, client: Any, payloads: list[memoryview]) -> None:
    """Upload all of them at once."""
    list(nodes.map(partial(bare, client), payloads, range(len(payloads))))


def bare(client: Any, payload: memoryview, number: int) -> None:
    """Upload in parts, as the client's documentation does; what fits one part at once."""
    where = {"Bucket": "benchmark", "Key": f"bare-{number}"}
    if len(payload) <= PART_BYTES:
        client.put_object(Body=bytearray(payload), **where)
        return
    upload = client.create_multipart_upload(**where)["UploadId"]

    def part(number: int) -> dict[str, object]:
        data = bytearray(payload[number * PART_BYTES : (number + 1) * PART_BYTES])
        answer = client.upload_part(Body=data, PartNumber=number + 1, UploadId=upload, **where)
        return {key: answer[key] for key in ("ETag", "ChecksumCRC32") if key in answer} | {"PartNumber": number + 1}

    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(part, range(-(-len(payload) // PART_BYTES))))
    client.complete_multipart_upload(UploadId=upload, MultipartUpload={"Parts": parts}, **where)


def save(arenas: list[Path], step: int, nodes: ThreadPoolExecutor, mappings: list[Mappings]) -> None:
    """Write the files of all nodes and commit, as savers do."""
    directory, world = "/s3:/benchmark/run", len(arenas)

    def persist(node: int) -> ShardRecord:
        written = saver.serve(Persist(step, 0, 0, world, node, [str(arenas[node])], directory), mappings=mappings[node])
        assert isinstance(written, Persisted), written
        return written.record

    shards = list(nodes.map(persist, range(world)))
    done = saver.serve(Commit(step, 0, 0, world, directory, shards, Retention(keep_last=1)))
    assert isinstance(done, Committed), done
    for each in mappings:
        each.let_go()


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median ratio."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def report(found: dict[str, list[Turn]], size: int, files: int) -> None:
    """Print medians, spread, and the ratios to the bare upload."""
    text = f"{size / 1e9:.2f} GB in {files} files" if files > 1 else f"{size / 1e9:.2f} GB"
    print(f"{text} in parts of {PART_BYTES >> 20} MiB, {THREADS} at a time, {len(found[BARE])} turns")
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
