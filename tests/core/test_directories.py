"""What a user names as a directory: what can never be one is refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import UsageError


@pytest.mark.parametrize("given", ["gs://bucket/run", Path("gs://bucket/run"), "file:///tmp/run", "hdfs://n:9000/x"])
def test_a_url_is_no_local_folder(given: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESILIO_LOCAL_CHECKPOINT_DIR", str(given))
    for make in (
        lambda: Checkpointer(given),
        lambda: Checkpointer("there"),
        lambda: ResilioWriter(given, 1),
        lambda: ResilioReader("there", local=given),
        lambda: ResilioReader("there", local="here").reset(given),
    ):
        with pytest.raises(UsageError, match="mount what is behind that URL, and give the path"):
            make()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["", "a\0b", os.fsdecode(b"caf\xe9"), b"bytes", 7])
def test_what_cannot_be_a_name_here_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="--run-dir is "):
        directory_path(given, "--run-dir")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["a", "a:/b", "./s3:/x", "ä b", Path("/x/y")])
def test_everything_else_is_taken(given: str | Path) -> None:
    assert directory_path(given, "x") == Path(given).absolute()
