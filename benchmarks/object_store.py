"""How long a save to an object store takes until it is durable, beside a bare upload of as many bytes.

python benchmarks/object_store.py [--gb 1] [--repeats 7] [--url http://…]    # radosgw is started where no URL is given

Both use the same client, the same size of parts and as many at a time, in this process; the save is all of it, from the
snapshot in shared memory to its commit. They take turns. The bare upload has no checksum of blocks, no notes and no
commit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Commit, Committed, Persist, Persisted
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.s3_bucket import THREADS, S3Bucket
from resilio_hpc.ckpt.store.s3_files import PART_BYTES

TENSORS = 40


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    with ExitStack() as stack:
        if not options.url:
            from tests.support.ckpt.object_server import ACCESS, SECRET, object_server

            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options.url = stack.enter_context(object_server(home))
            os.environ.update(AWS_ACCESS_KEY_ID=ACCESS, AWS_SECRET_ACCESS_KEY=SECRET)
        os.environ["AWS_ENDPOINT_URL"] = options.url
        measure(options.gb, options.repeats)


def measure(gb: float, repeats: int) -> None:
    """Take turns, after one of each that does not count."""
    bucket = S3Bucket("benchmark")
    bucket._client.create_bucket(Bucket=bucket.name)
    size = int(gb * 1e9 / TENSORS / 8)
    rng = np.random.default_rng(0)
    state = {f"layer-{number}": rng.random(size) for number in range(TENSORS)}
    times: dict[str, list[float]] = {"bare upload": [], "save": []}
    with closing(ArenaPair(None, Owner(0, 0, 1, 1, 0, "own", "run"), Path("/dev/shm"))) as arenas:
        with ThreadPoolExecutor(2) as pool:
            arena = Snapshot(arenas, 1, flatten(state), pool).finish()[0]
        payload = memoryview(np.concatenate([part.view(np.uint8) for part in state.values()]).tobytes())
        for turn in range(repeats + 1):
            for name, act in (("bare upload", lambda: bare(bucket, payload)), ("save", lambda: save(arena))):
                began = time.monotonic()
                act()
                if turn:
                    times[name].append(time.monotonic() - began)
                clear(bucket)
    report(times, len(payload))


def bare(bucket: S3Bucket, payload: memoryview) -> None:
    """Upload in parts, as the client's documentation does."""
    client = bucket._client
    where = {"Bucket": bucket.name, "Key": "bare"}
    upload = client.create_multipart_upload(**where)["UploadId"]

    def part(number: int) -> dict[str, object]:
        data = bytearray(payload[number * PART_BYTES : (number + 1) * PART_BYTES])
        answer = client.upload_part(Body=data, PartNumber=number + 1, UploadId=upload, **where)
        return {"PartNumber": number + 1, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(part, range(-(-len(payload) // PART_BYTES))))
    client.complete_multipart_upload(UploadId=upload, MultipartUpload={"Parts": parts}, **where)


def save(arena: Path) -> None:
    """Write the file of a node and commit, as a saver does."""
    directory = "/s3:/benchmark/run"
    written = saver.serve(Persist(1, 0, 0, 1, 0, [str(arena)], directory))
    assert isinstance(written, Persisted), written
    done = saver.serve(Commit(1, 0, 0, 1, directory, [written.record], Retention()))
    assert isinstance(done, Committed), done


def clear(bucket: S3Bucket) -> None:
    """Remove all objects: the store keeps them in memory."""
    for key, _ in list(bucket.listed("")):
        bucket.delete(key)


def report(times: dict[str, list[float]], size: int) -> None:
    """Print medians and spread."""
    base = statistics.median(times["bare upload"])
    print(f"{size / 1e9:.2f} GB in parts of {PART_BYTES >> 20} MiB, {THREADS} at a time")
    for name, found in times.items():
        middle = statistics.median(found)
        print(
            f"{name:12} median {middle:6.2f} s  min {min(found):6.2f}  max {max(found):6.2f}  n {len(found)}  "
            f"{size / middle / 1e6:6.0f} MB/s  × {middle / base:.2f}"
        )


if __name__ == "__main__":
    main()
