"""The calls to libfabric, over its providers that need no hardware: what is refused, and ends that come at any time."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from resilio_hpc.native import _memory
from tests.support.ckpt.fabric_pair import HOST, software
from tests.support.environments import scrubbed
from tests.support.requirements import need_fabric
from tests.support.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from resilio_hpc.native._fabric import Endpoint

SIZE = 8 << 20
KEY = 0x1234_5678_9ABC


@pytest.fixture(params=[0, 1], ids=["TCP", "sockets"])
def provider(request: pytest.FixtureRequest) -> str:
    need_fabric(providers=request.param + 1)
    return software()[request.param]


@pytest.fixture
def two(provider: str) -> Iterator[tuple[Endpoint, Endpoint]]:
    from resilio_hpc.native import _fabric

    made = _fabric.Endpoint(provider, HOST), _fabric.Endpoint(provider, HOST)
    yield made
    for one in made:
        one.close()


def test_a_closed_endpoint_does_nothing_more(two: tuple[Endpoint, Endpoint]) -> None:
    one, other = two
    memory = bytearray(100)
    number, _, _ = one.register(memory, True, KEY)
    one.close()
    one.close()
    one.release(number)  # it was, with it
    memory.append(0)  # no one holds the buffer any more
    for act in (
        one.address, lambda: one.progress(1.0), lambda: one.register(memory, True, KEY), lambda: one.peer(b"x" * 16),
        lambda: one.read(0, 0, 0, 1, 0, 0),
    ):  # fmt: skip
        with pytest.raises(OSError, match="the endpoint is closed: Operation canceled"):
            act()
    assert other.progress(0.0) == 0


def test_close_ends_what_another_thread_waits_for(two: tuple[Endpoint, Endpoint]) -> None:
    one, _ = two
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(one.progress(PATIENCE_S)))
    thread.start()
    time.sleep(0.05)
    one.close()
    thread.join(PATIENCE_S / 2)
    assert found == [0]


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_reads_under_way_end_with_their_endpoint(two: tuple[Endpoint, Endpoint], provider: str, how: str) -> None:
    from resilio_hpc.native import _fabric

    one, readers = two[0], [_fabric.Endpoint(provider, HOST)]
    source, into = bytearray(SIZE), bytearray(SIZE)
    _, key, base = one.register(source, True, KEY)
    number, _, _ = readers[0].register(into, False, KEY + 1)
    peer = readers[0].peer(one.address())

    def begun() -> bool:
        one.progress(0.001)
        readers[0].progress(0.001)  # it connects first
        return readers[0].read(peer, number, 0, SIZE, base, key)

    until(begun, "a read")
    if how == "closed":
        readers[0].close()
    readers.clear()
    gc.collect()
    seen = bytes(into)
    source[:] = b"\xff" * SIZE
    for _ in range(20):
        one.progress(0.005)
    assert into == seen


def test_what_does_not_fit_is_refused(two: tuple[Endpoint, Endpoint]) -> None:
    one, _ = two
    number, _, _ = one.register(bytearray(100), False, KEY)
    fixed, _, _ = one.register(bytes(100), True, KEY + 1)
    for where, offset, size in ((number, 0, 101), (number, 100, 1), (number, -1, 1), (number, 1, -1), (fixed, 0, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            one.read(0, where, offset, size, 0, 0)
    for where in (-1, 7, 5000):
        with pytest.raises(ValueError, match="no such region"):
            one.read(0, where, 0, 1, 0, 0)
        with pytest.raises(ValueError, match="no such region"):
            one.release(where)
    for address in (b"", one.address()[:-1], one.address() + b"x"):
        with pytest.raises(OSError, match="fi_av_insert: Invalid argument"):
            one.peer(address)


def test_the_same_key_twice_is_refused_in_libfabrics_words(two: tuple[Endpoint, Endpoint]) -> None:
    one, _ = two
    memory = bytearray(100)
    number, key, _ = one.register(memory, True, KEY)
    if key != KEY:
        pytest.skip("the provider makes keys")
    with pytest.raises(OSError, match="fi_mr_reg: "):
        one.register(memory, True, KEY)
    one.release(number)
    one.release(one.register(memory, True, KEY)[0])


def test_more_regions_than_there_is_room_for_are_refused(two: tuple[Endpoint, Endpoint]) -> None:
    one, _ = two
    memory = bytearray(100)
    for number in range(4096):
        one.register(memory, True, KEY + number)
    with pytest.raises(OSError, match="too many regions: Cannot allocate memory"):
        one.register(memory, True, 1)


def test_a_provider_that_is_not_here_is_named() -> None:
    need_fabric()
    from resilio_hpc.native import _fabric

    with pytest.raises(OSError, match="fi_getinfo: No data available: no such"):
        _fabric.Endpoint("no such", None)


@pytest.mark.parametrize("what", ["no library", "another library"])
def test_a_library_that_cannot_be_used_is_an_error_in_the_loaders_words(tmp_path: Path, what: str) -> None:
    need_fabric()
    fake = tmp_path / "libfabric.so.1"
    fake.write_bytes(b"?" if what == "no library" else Path(_memory.__file__).read_bytes())
    code = "import resilio_hpc.native._fabric as fabric\ntry: fabric.providers()\nexcept OSError as error: print(error)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=scrubbed(LD_LIBRARY_PATH=tmp_path), capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.stdout.startswith(f"[Errno 38] {fake}: "), ran.stderr
    assert ("file too short" if what == "no library" else "undefined symbol: fi_") in ran.stdout
