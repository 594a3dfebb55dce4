"""An object store for the tests in this folder: see ``tests.support.ckpt.object_server``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt.store.mounts import store_of
from tests.support.ckpt.object_looks import BUCKET, forget
from tests.support.ckpt.object_server import ACCESS, SECRET, Proxy, client_of, object_server, proxy_of
from tests.support.ckpt.stores import Place


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with object_server(tmp_path_factory.mktemp("ceph")) as url:
        client_of(url).create_bucket(Bucket=BUCKET)
        yield url


@pytest.fixture(scope="session")
def front(server: str) -> Iterator[Proxy]:
    with proxy_of(server) as found:
        yield found


@pytest.fixture
def proxy(front: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What this process, and its children, take for the store. Savers live on, so it has one address for all tests."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    forget()
    yield front
    front.reset()
    forget()


@pytest.fixture
def place(proxy: Proxy, tmp_path: Path) -> Place:
    directory = Path(f"/s3:/{BUCKET}", os.urandom(4).hex(), "run")
    return Place(directory, store_of(directory), tmp_path)
