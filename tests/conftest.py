"""For all tests: the order in which workers run them, what is recorded of them, and common fixtures."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from resilio_hpc.core.file_system import is_in_memory
from tests.support import durations, scheduling
from tests.support.part_results import PartResults

# A shell starts what runs in its background with SIGINT ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What an example may take says nothing on a machine that others use, too. The same examples every time: who changed
# nothing sees no failure. ``test_properties.py`` searches among others.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("RESILIO_TEST_EXAMPLES") or "same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of scripts/test.sh."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json at the end")
    parser.addoption("--part", default="", metavar="K/N", help="run the K-th of N parts of the selected tests")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the one process that sees all reports."""
    try:
        part = config.getoption("--part")
        if part:
            scheduling.part(part)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if hasattr(config, "workerinput"):
        return
    if config.getoption("--record-durations"):
        whole = not part and not config.option.keyword and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        config.pluginmanager.register(durations.Recorder(config.getoption("numprocesses", 0) or 0, whole))
    if part:
        config.pluginmanager.register(PartResults(part))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the part, and put the longest units first."""
    seconds = durations.seconds(durations.read())
    if config.getoption("--part"):
        tests = [item.nodeid for item in items]
        wanted = scheduling.of_part(tests, *scheduling.part(config.getoption("--part")))
        left_out = [item for item in items if scheduling.unit_of(item.nodeid) not in wanted]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if scheduling.unit_of(item.nodeid) in wanted]
    if hasattr(config, "workerinput"):
        items[:] = [items[number] for number in scheduling.in_order([item.nodeid for item in items], seconds)]


def pytest_collection_finish() -> None:
    """What was collected stays: the collector of cycles need not look at it again and again."""
    gc.freeze()


def pytest_xdist_make_scheduler(config: Any, log: Any) -> scheduling.UnitScheduling:
    """Give tests out by unit."""
    return scheduling.UnitScheduling(config, log)


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A directory whose files are not in memory, as those of tmp_path may be."""
    fd = os.open(tmp_path, os.O_RDONLY)
    in_memory = is_in_memory(fd)
    os.close(fd)
    if not in_memory:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix=".disk-", dir=Path(__file__).parent) as name:
        yield Path(name)
