"""Checkpoints in a real object store, Ceph's radosgw: what a user does with them, and what harm does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilio_hpc.ckpt import Checkpointer, Slab
from resilio_hpc.ckpt.dcp import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.saver.messages import Committed
from resilio_hpc.ckpt.store import checkpoint_index, s3_bucket, s3_files
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from resilio_hpc.cli.main import main as resilio
from tests.support.ckpt.object_looks import BUCKET, data_of, forget, keys_of, url_of
from tests.support.ckpt.object_server import (
    Answer,
    Asked,
    Proxy,
    client_of,
)
from tests.support.ckpt.stores import PART, WORLD, Place

pytestmark = pytest.mark.slow  # the store starts in about ten seconds


def test_steps_are_kept_restored_verified_copied_and_removed(
    place: Place, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.take_over(1)
    for step in (1, 2, 3):
        assert isinstance(place.save(step, keep_last=2), Committed)
    assert place.steps() == [2, 3]
    assert place.restored() == 3
    keys = keys_of(server, place)
    assert len(data_of(keys)) == 2, "what a removed step left is removed"
    assert [key for key in keys if "/" not in key] == ["epoch-fence", "latest", "step-0000000002", "step-0000000003"]

    def said(*argv: str, code: int = 0) -> str:
        assert resilio_ckpt(list(argv)) == code
        return capsys.readouterr().out

    here = url_of(place)
    assert [one["step"] for one in json.loads(said("ls", here, "--json"))["steps"]] == [2, 3]
    assert said("verify", here).count("good") == 2
    said("show", here)
    said("copy", here, str(tmp_path / "copy"), "2")
    assert checkpoint_index.committed_steps(tmp_path / "copy") == [2]
    said("copy", str(tmp_path / "copy"), f"{here}-back", "2")
    said("diff", here, "2", "3", code=1)
    said("prune", here, "--keep-checkpoints", "1")
    assert place.steps() == [3]
    said("export", here, str(tmp_path / "state.safetensors"), "--format", "safetensors")


def test_torch_saves_and_loads(place: Place) -> None:
    url = url_of(place)
    state = {"w": torch.arange(12_000.0).reshape(100, 120), "n": {"step": 7}}
    dcp.save(state, storage_writer=ResilioWriter(url, 3))
    found = {"w": torch.zeros(100, 120), "n": {"step": 0}}
    dcp.load(found, storage_reader=ResilioReader(url))
    assert torch.equal(found["w"], state["w"])
    assert found["n"] == state["n"]


def test_a_large_file_goes_in_parts_and_a_rank_reads_only_what_it_needs(
    place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(place)
    whole = np.arange(6 << 20, dtype=np.int64)  # 48 MiB
    Checkpointer(url, local=str(place.scratch)).save(1, {"x": Slab(whole, whole.shape, (0,))}).wait()
    parts = [asked for asked in proxy.seen if "partNumber=" in asked.path and asked.method == "PUT"]
    assert len(parts) == -(-whole.nbytes // s3_files.PART_BYTES) + bool(whole.nbytes % s3_files.PART_BYTES == 0)
    proxy.sent_bytes = 0
    part = np.zeros(len(whole) // 8, dtype=np.int64)  # as the last of eight ranks restores it
    start = len(whole) - len(part)
    found = Checkpointer(url).restore({"x": Slab(part, whole.shape, (start,))})
    assert found is not None
    assert np.array_equal(part, whole[start:])
    assert proxy.sent_bytes < 2 * part.nbytes, "the rest of the file was not asked for"


def test_mistakes_are_told_in_one_line(
    place: Place, server: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(url: str) -> str:
        forget()
        code = resilio(["ckpt", "ls", url])
        text = capsys.readouterr().err
        assert code != 0
        assert text.count("\n") == 1
        return text

    assert "there is no such bucket" in said("s3://no-such-bucket/x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "it refuses these credentials" in said(f"s3://{BUCKET}/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(s3_bucket.DEADLINE_VARIABLE, "1")
    assert "the object store does not serve requests (no answer" in said(f"s3://{BUCKET}/x")


def test_a_node_whose_own_disk_is_full_writes_straight_to_the_store(place: Place, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs mounts")
    try:
        url = url_of(place)
        checkpointer = Checkpointer(url, local=str(small))
        checkpointer.save(1, {"x": np.arange(1 << 20)}).wait()
        found = Checkpointer(url).restore()
        assert found is not None
        assert np.array_equal(found[1]["x"], np.arange(1 << 20))
    finally:
        subprocess.run(["umount", str(small)], check=True)
        shutil.rmtree(small, ignore_errors=True)


def test_harm_is_found(place: Place, server: str) -> None:
    place.save(1, keep_last=9)
    place.save(2, keep_last=9)
    key = next(key for key in keys_of(server, place) if key.startswith("data/0000000002") and key.endswith(".h5"))
    full, client = f"{'/'.join(place.directory.parts[3:])}/{key}", client_of(server)
    content = client.get_object(Bucket=BUCKET, Key=full)["Body"].read()
    at = len(content) - PART * WORLD * 4
    client.put_object(Bucket=BUCKET, Key=full, Body=content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert place.restored() == 1
    client.put_object(Bucket=BUCKET, Key=full, Body=content[:-5])
    assert checkpoint_index.committed_steps(place.directory) == [1]
    assert "node-0.h5: missing, or not as large" in checkpoint_index.damaged_steps(place.directory)[2]
    client.delete_object(Bucket=BUCKET, Key=full)
    assert place.restored() == 1


def test_a_torn_answer_is_asked_for_again(place: Place, proxy: Proxy) -> None:
    place.save(1)
    torn = []

    def after(asked: Asked, answer: Answer) -> Answer:
        if asked.method == "GET" and asked.path.endswith(".h5") and len(torn) < 3:
            torn.append(asked.path)
            return 206, {**answer[1], "X-Cut": "yes"}, answer[2][: len(answer[2]) // 2]
        return answer

    proxy.after = after
    assert place.restored() == 1
    assert len(torn) == 3


def test_a_save_asks_little_of_the_store(place: Place, proxy: Proxy) -> None:
    """Each request takes the way to the store and back: what is known is not asked for again."""
    place.save(1, keep_last=9)
    place.save(2, keep_last=9)
    proxy.seen.clear()
    assert isinstance(place.save(3, keep_last=9), Committed)
    of_steps = [asked for asked in proxy.seen if re.search("/step-0+[12]$|/data/0+[12]-", asked.path)]
    assert len(proxy.seen) - len(of_steps) <= 16
    assert len(of_steps) <= 4 * 2
    proxy.seen.clear()
    assert isinstance(place.save(4, keep_last=3), Committed)
    assert len(proxy.seen) <= 16 + 4 * 3 + 7, "to remove a step takes seven"
