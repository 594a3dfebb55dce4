"""The process that samples a node: everything that it reads may hang in the kernel, and then only it waits.

The agent sends a request for each sample. Samples go to the run directory, the endpoint and the textfile; the answer
says only what the agent has to act on. ``launch/agent/node_metrics`` is the agent's side. ``python -m
resilio_hpc.metrics.sampler``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from resilio_hpc.core import bounded, helper_process
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.events.memory_text import memory_words
from resilio_hpc.metrics import latest, textfile
from resilio_hpc.metrics.counters import error_counters
from resilio_hpc.metrics.gpus import GpuSource, throttled
from resilio_hpc.metrics.host import HostSource
from resilio_hpc.metrics.memory_watch import MemoryWatch, uses_of
from resilio_hpc.metrics.messages import Sampled, SampleRequest, Setup
from resilio_hpc.metrics.network import NetworkSource
from resilio_hpc.metrics.ranks import RankSource, largest
from resilio_hpc.metrics.schema import PARTS
from resilio_hpc.metrics.sheet import Sheet
from resilio_hpc.metrics.sources import Sources
from resilio_hpc.metrics.storage import StorageSource
from resilio_hpc.prolog_epilog.base.node import NodeView

if TYPE_CHECKING:
    from resilio_hpc.metrics.exposition import Endpoint

LONGEST_TEXT = 200  # of a Heartbeat's


class Sampler:
    """Takes samples of one node, and hands them on."""

    def __init__(self, setup: Setup, node: NodeView | None = None) -> None:
        """Take ``node``: where the GPUs are, if not here."""
        self._setup = setup
        self._look = SampleRequest(0)
        self._ranks = RankSource()
        self._gpus = GpuSource(node or NodeView())
        host = HostSource()
        places = {"run_dir": Path(setup.run_path), "local": Path(setup.local_dir), "shm": Path("/dev/shm")}
        self._sources = Sources({
            "host": lambda: host.read(self._look.ranks[0].pid if self._look.ranks else "self"),
            **StorageSource(places).reads(),
            "network": NetworkSource().read,
            "gpus": self._gpus.read,
            "ranks": lambda: self._ranks.read(self._look.ranks),
        })  # fmt: skip
        self._watch = MemoryWatch()
        self._writing: Future[None] | None = None
        self._write_at = 0.0
        self._endpoint: Endpoint | None = None
        self._notes: list[str] = []
        self._told: set[str] = set()
        self._open()

    def _open(self) -> None:
        """Open what Prometheus reads. What cannot be opened is said, and leaves the rest."""
        setup = self._setup
        if setup.port is None and not setup.textfile:
            return
        if setup.textfile:
            textfile.remove_stale(setup.textfile)
        if setup.port is not None:
            from resilio_hpc.metrics import exposition  # imported here, since most runs need none of it

            try:
                self._endpoint = exposition.Endpoint(setup.address, setup.port, setup.token)
            except OSError as error:
                self._notes.append(f"no endpoint at {setup.address}:{setup.port}: {error.strerror or error}")

    def sample(self, look: SampleRequest) -> Sampled:
        """Take one sample, hand it on, and return the answer."""
        self._look = look
        now = time.time()
        sheet = self._sources.read()
        for name, value in look.run.items():
            if name in PARTS["run"]:
                sheet.put(name, value)
        news = self._watch.look(
            uses_of(sheet, self._ranks.limits, self._setup.gpu_headroom_bytes), largest(sheet), time.monotonic()
        )
        self._watch.put(sheet)
        sheet.put("sample_timestamp_seconds", now)
        sheet.put("sample_interval_seconds", self._setup.interval_s)
        sheet.put("sampler_cpu_seconds_total", time.process_time())
        self._hand_on(sheet, now)
        worst = self._watch.worst
        memory = memory_words(Fields(msgspec.structs.asdict(worst)))[:LONGEST_TEXT] if worst else ""
        return Sampled(
            look.number, worst.level if worst else 0, memory,
            tuple(news), self._new_notes(), self._endpoint.url if self._endpoint else "",
            error_counters(sheet) if look.when else None, *throttled(sheet),
        )  # fmt: skip

    def _hand_on(self, sheet: Sheet, now: float) -> None:
        setup = self._setup
        if self._endpoint is not None or setup.textfile:
            from resilio_hpc.metrics import exposition

            text = exposition.exposition(sheet, setup.run_id, setup.node)
            if self._endpoint is not None:
                self._endpoint.text = text
            if setup.textfile:
                try:
                    textfile.write(textfile.path_of(setup.textfile, setup.run_id, setup.node), text)
                except OSError as error:
                    self._notes.append(f"{setup.textfile}: {error.strerror or error}")
        if now < self._write_at or (self._writing is not None and not self._writing.done()):
            return
        failed = self._writing.exception() if self._writing is not None else None
        if failed is not None:
            self._notes.append(f"samples do not reach the run directory: {failed}")
        self._write_at = now + latest.every_s(setup.interval_s, setup.nodes) - setup.interval_s / 2
        url = self._endpoint.url if self._endpoint else ""
        self._writing = bounded.begin(lambda: latest.write(Path(setup.run_path), setup.node, sheet, now, url))

    def _new_notes(self) -> tuple[str, ...]:
        found = [*self._notes, *self._sources.notes, *([f"GPUs: {self._gpus.trouble}"] if self._gpus.trouble else [])]
        self._notes.clear()
        new = [text[:300] for text in dict.fromkeys(found) if text not in self._told][: max(0, 100 - len(self._told))]
        self._told.update(new)
        return tuple(new)

    def close(self) -> None:
        """Remove what would be stale."""
        if self._setup.textfile:
            textfile.path_of(self._setup.textfile, self._setup.run_id, self._setup.node).unlink(missing_ok=True)


def serve(lines: Callable[[], bytes], answer: Callable[[bytes], object]) -> None:
    """Sample for each request, until the requests end."""
    sampler = Sampler(msgspec.json.decode(lines(), type=Setup))
    while line := lines():
        answer(encode_line(sampler.sample(msgspec.json.decode(line, type=SampleRequest))))
    sampler.close()


def main() -> None:
    """Serve the agent."""
    answers = helper_process.begin("sampler")
    if answers is None:
        return
    serve(sys.stdin.buffer.readline, answers.write)
    os._exit(0)  # threads that hang in the kernel do not hold it up


if __name__ == "__main__":
    main()
