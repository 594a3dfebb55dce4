"""The agent's end of the process that samples its node (``metrics/sampler``): memory levels, counters of errors.

All that is read may hang with a driver or a file system, so the agent never waits for it. A process that does not
answer is killed, and no other is started while that one hangs in the kernel.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import time
from collections.abc import Callable, Mapping

import msgspec

from resilio_hpc.core import bounded
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.process.child_link import ChildLink
from resilio_hpc.launch.workers import interception
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.metrics import counters, textfile
from resilio_hpc.metrics.access import token
from resilio_hpc.metrics.messages import AFTER, BEFORE, RankFacts, Sampled, SampleRequest, Setup

STUCK_S = 60.0
AGAIN_S = 30.0
MOST_DEATHS = 5
LAST_S = 1.0  # for the counters after the last round
GB = 10**9


class NodeMetrics:
    """Asks for samples, and records what they tell. ``level`` and ``memory``: the worst memory level of this node."""

    def __init__(
        self,
        node: NodeContext,
        core: NodeRanks,
        pids: Callable[[], Mapping[int, int]],
        run: Callable[[], dict[str, float]],
        clock: Callable[[], float] = time.monotonic,
        last_s: float = LAST_S,
    ) -> None:
        """Take ``pids``: the ranks' processes by local rank; ``run``: what the controller knows, where it is here."""
        self.level, self.memory = 0, ""
        self._node, self._core, self._pids, self._run = node, core, pids, run
        self._clock, self._last_s = clock, last_s
        self._interval_s = node.options.metrics.interval_s
        self._link = ChildLink("metrics.sampler", node.local_dir / "metrics.log", close_s=LAST_S)
        self._killed: subprocess.Popen[bytes] | None = None  # it may hang in the kernel
        self._deaths = 0
        self._due = float("-inf")
        self._number = 0
        self._asked: dict[int, tuple[float, str, int]] = {}  # look → when it was asked, of which moment, of which round
        self._round = -1  # whose counters before it were asked for
        self._before: dict[str, float] = {}
        self._endpoint = ""

    def fileno(self) -> int | None:
        """Return the descriptor to poll."""
        return self._link.fileno()

    def tick(self) -> None:
        """Ask for a sample when it is due, and at the begin and the end of a round's ranks."""
        if self._interval_s <= 0 or self._deaths > MOST_DEATHS:
            return
        now, local = self._clock(), self._core.local
        if self._asked and now - min(asked for asked, _, _ in self._asked.values()) > STUCK_S:
            self._lost(f"has not answered for {STUCK_S:g} s", now)
        if self._round >= 0 and (local is None or local.number != self._round):
            self._ask(now, AFTER)
            self._round = -1
        elif local is not None and local.number != self._round and len(self._pids()) == len(local.ranks):
            self._round = local.number
            self._ask(now, BEFORE)
        elif now >= self._due and (self._round >= 0 or self._link.fileno() is not None):
            self._ask(now)

    def _ask(self, now: float, when: str = "") -> None:
        if self._link.fileno() is None and not self._started(now):
            return
        if not self._link.takes or (self._asked and not when):
            return
        self._due = now + self._interval_s
        self._number += 1
        self._asked[self._number] = (now, when, self._round)
        self._link.write(encode_line(SampleRequest(self._number, self._ranks(), self._facts(), when)))

    def _started(self, now: float) -> bool:
        """Start the process, unless the one before died just now, or hangs in the kernel."""
        if self._killed is not None and self._killed.poll() is None:
            return False
        if self._deaths and now < self._due:
            return False
        options, node = self._node.options.metrics, self._node
        headroom = options.gpu_headroom_gb
        setup = Setup(
            node.name, node.run.run_id, str(node.run.path), str(node.local_dir), self._interval_s,
            len(node.settings.expected), options.port, options.address,
            token(node.run.secret) if options.asks_for_token else "", options.textfile,
            None if headroom is None else round(headroom * GB),
        )  # fmt: skip
        try:
            self._link.start()
        except OSError as error:
            self._lost(f"cannot be started: {error.strerror}", now)
            return False
        self._link.write(encode_line(setup))
        return True

    def _ranks(self) -> tuple[RankFacts, ...]:
        local, pids = self._core.local, self._pids()
        if local is None:
            return ()
        return tuple(
            RankFacts(
                rank.rank, pids[number], str(interception.ring_file(self._node.arena_dir, local.number, number)),
                rank.step, rank.step_time,
            )
            for number, rank in local.ranks.items() if number in pids
        )  # fmt: skip

    def _facts(self) -> dict[str, float]:
        return {"run_round": self._core.highest_round, **self._run()}

    # -- answers -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Take the answers that have arrived."""
        lines = self._link.read()
        if lines is None:
            self._lost("died", self._clock())
            return
        for line in lines:
            try:
                self._take(msgspec.json.decode(line, type=Sampled))
            except msgspec.MsgspecError:  # half a line, of one that was killed
                continue

    def _take(self, said: Sampled) -> None:
        node = self._node
        _, when, number = self._asked.pop(said.number, (0.0, "", -1))
        self.level, self.memory = said.level, said.memory
        self._core.times.gpus(said.gpus_throttled, said.throttle_reasons)
        for news in said.news:
            node.record("memory_warning" if news.level else "memory_eased", **msgspec.structs.asdict(news))
        for note in said.notes:
            node.record("metrics_unclear", reason=note)
        if said.endpoint and said.endpoint != self._endpoint:
            self._endpoint = said.endpoint
            node.record("metrics_endpoint", url=said.endpoint)
        if when and said.counters is not None:
            self._keep(when, number, said.counters)

    def _keep(self, when: str, number: int, found: Mapping[str, float]) -> None:
        """Record the counters of errors before and after a round: when one looks later, they are gone."""
        fields = {"round": number, "when": when, "values": counters.bounded(found)}
        if when == BEFORE:
            self._before = dict(found)
        else:
            fields["grown"] = counters.bounded(counters.grown(self._before, found))
        self._node.record("counters", **fields)

    def _lost(self, why: str, now: float) -> None:
        """Take note that the process is gone; kill it if it is not."""
        node = self._node
        self._killed = self._link.abandon() or self._killed
        self._asked.clear()
        self._deaths += 1
        self._due = now + AGAIN_S
        self.level, self.memory = 0, ""
        self._core.times.gpus(0, 0)
        fields = {"why": why, "again": self._deaths <= MOST_DEATHS}
        node.record("sampler_died", **fields)
        if self._deaths > MOST_DEATHS:
            node.say(words("sampler_died", {"node": node.name, **fields}))

    def close(self) -> None:
        """Take the last counters, if they come at once, and end the process."""
        if self._link.fileno() is not None:
            if self._round >= 0:
                self._ask(self._clock(), AFTER)
                self._round = -1
            deadline = time.monotonic() + self._last_s
            while self._asked and (left := deadline - time.monotonic()) > 0 and (fd := self._link.fileno()) is not None:
                if select.select([fd], [], [], left)[0]:
                    self.serve()
            self._link.close()
        written = self._node.options.metrics.textfile
        if written:  # the process may have been killed
            path = textfile.path_of(written, self._node.run.run_id, self._node.name)
            with contextlib.suppress(OSError):
                bounded.in_time(lambda: path.unlink(missing_ok=True), LAST_S)
