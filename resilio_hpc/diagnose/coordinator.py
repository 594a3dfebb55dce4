"""The coordinator of a pair check: hears the checkers, begins the rounds, and decides who is bad or slow.

One thread around a poll loop. It listens with CURVE under a secret that is made for this check alone. Every wait is
bounded: for nodes to start, for a round, for the whole check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import zmq

from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.diagnose.messages import FROM_NODE, TO_NODE, Alive, Bye, CoordinatorAlive, Entered, FromNode, ToNode
from resilio_hpc.diagnose.observations import Fault, Pair, Round
from resilio_hpc.diagnose.policy import PairPolicy
from resilio_hpc.diagnose.result import CheckResult
from resilio_hpc.diagnose.round_state import Letters, PairingRound
from resilio_hpc.diagnose.verdict import judge, pairs_of_next_round

BEAT_S = 2.0
POLL_S = 0.1
_FAREWELL_S = 0.3  # for the last messages to leave

Progress = Callable[[str], None]


class Starter(Protocol):
    """Starts a checker on each node."""

    def start(self, secret: bytes, port: int) -> None:
        """Start the checkers, without waiting for any node."""

    def missing(self, heard: Sequence[str]) -> Mapping[str, str]:
        """Return nodes whose checker will not come, or has ended, and why. ``heard``: those that came. Called often."""

    def close(self) -> None:
        """End the checkers that are left."""


class CheckCoordinator:
    """One check. ``host``: where to listen. ``clock``: seconds that only go forward."""

    def __init__(
        self,
        nodes: Sequence[str],
        policy: PairPolicy,
        starter: Starter,
        host: str,
        progress: Progress,
        *,
        clock: Callable[[], float] = time.monotonic,
        farewell_s: float = _FAREWELL_S,
    ) -> None:
        self._clock, self._farewell_s = clock, farewell_s
        self._nodes = tuple(nodes)
        self._policy = policy
        self._starter = starter
        self._progress = progress
        self._secret = wire.new_secret()
        keys = wire.Keys.derive(self._secret)
        self._counters = wire.Counters()
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = wire.Gatekeeper(self._context, keys, self._counters)
        self._socket, self.port = wire.listen_anywhere(self._context, keys, host)
        self._callers: dict[str, bytes] = {}
        self._heard_at: dict[str, float] = {}
        self._ready: set[str] = set()
        self._unable: dict[str, str] = {}
        self._gone: Mapping[str, str] = {}
        self._beat_at = float("-inf")
        self._round: PairingRound | None = None
        self._rounds = 0
        self._began = self._clock()

    def run(self) -> CheckResult:
        """Run the whole check, within its budget and a little more; return the result."""
        try:
            self.begin()
            return self.examine()
        finally:
            self.part()

    def begin(self) -> None:
        """Start the checkers and wait until all are here, or are known not to come, or ``start_s`` is over."""
        self._starter.start(self._secret, self.port)
        self._wait_for_nodes(self._began + min(self._policy.budget_s, self._policy.start_s))

    def wait_until(self, due: Callable[[], bool]) -> None:
        """Keep the checkers waiting; the budget counts from the end of the wait."""
        while not due():
            self._turn()
        self._began = self._clock()

    def examine(self) -> CheckResult:
        """Run all rounds; return the result. May be called again."""
        end = self._began + self._policy.budget_s
        history: list[Round] = []
        pairs = pairs_of_next_round(self._nodes, history, self._policy)
        while pairs and self._clock() < end:
            history.append(self._run_round(pairs, end))
            pairs = pairs_of_next_round(self._nodes, history, self._policy)
        return judge(self._nodes, history, self._policy, self._clock() - self._began, late=bool(pairs))

    def _wait_for_nodes(self, end: float) -> None:
        self._progress(f"starting on {len(self._nodes)} nodes")
        settled = -1
        while self._clock() < end:
            self._turn()
            now = len(self._ready | self._unable.keys() | self._gone.keys())
            if now != settled:
                settled = now
                self._progress(f"{len(self._ready)} of {len(self._nodes)} nodes are ready")
            if settled >= len(self._nodes):
                return

    def _run_round(self, pairs: Sequence[Pair], end: float) -> Round:
        self._rounds += 1
        number = self._rounds
        self._round = state = PairingRound(number, pairs)
        count = len(state.open_nodes)
        self._progress(f"round {number}: {count} nodes")
        self._send(state.orders())
        policy = self._policy
        limit = self._clock() + policy.start_s + 2 * policy.compute_s + 2 * policy.collective_s + policy.silence_s
        while not state.over and self._clock() < end:
            self._turn()
            now = self._clock()
            for node in state.open_nodes:
                fault, why = self._lost(node, now)
                if fault is not None:
                    self._send(state.gone(node, fault, why, now))
                elif now > limit:
                    self._send(state.gone(node, "silent", "it never answered its order", now))
            self._send(state.tick(now))
            if len(state.open_nodes) != count:
                count = len(state.open_nodes)
                self._progress(f"round {number}: {count} nodes left" if count else f"round {number} is over")
        self._round = None
        return state.observations()

    def _lost(self, node: str, now: float) -> tuple[Fault | None, str]:
        if node not in self._heard_at:
            return "absent", self._gone.get(node, f"no sign of it within {self._policy.start_s:g} s")
        if node in self._gone:
            return "silent", self._gone[node]
        silence = now - self._heard_at[node]
        if silence > self._policy.silence_s:
            return "silent", f"nothing was heard of it for {self._policy.silence_s:g} s"
        return None, ""

    # -- messages ----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._gate.socket, zmq.POLLIN)
        poller.poll(int(POLL_S * 1000))
        self._gate.serve()
        for frames in wire.receive_all(self._socket):
            node = frames[0].partition(b"/")[0].decode(errors="replace")
            if node not in self._nodes or len(frames) != 2:
                self._counters.dropped += 1
                continue
            try:
                message = FROM_NODE.decode(frames[1])
            except WireError:
                self._counters.dropped += 1
                continue
            self._heard(node, frames[0], message)
        self._gone = self._starter.missing(tuple(self._heard_at))
        if self._clock() >= self._beat_at + BEAT_S:
            self._beat_at = self._clock()
            self._send([(node, CoordinatorAlive()) for node in self._callers])

    def _heard(self, node: str, caller: bytes, message: FromNode) -> None:
        self._callers[node] = caller
        self._heard_at[node] = self._clock()
        if isinstance(message, Alive):
            (self._ready.add if message.ready else self._ready.discard)(node)
            self._unable.pop(node, None)
            if message.unable:
                self._unable[node] = message.unable
        elif self._round is not None:
            self._send(self._round.heard(node, message, self._clock()))
            if not isinstance(message, Entered):
                self._send(self._round.tick(self._clock()))

    def _send(self, letters: Letters) -> None:
        for node, message in letters:
            self._send_one(node, message)

    def _send_one(self, node: str, message: ToNode) -> None:
        if node in self._callers:
            wire.send(self._socket, [self._callers[node], TO_NODE.encode(message)])

    def part(self) -> None:
        """Tell all nodes to end, and close the sockets."""
        self._send([(node, Bye()) for node in self._callers])
        time.sleep(self._farewell_s if self._callers else 0)
        self._socket.close()
        self._gate.socket.close()
        self._context.destroy(linger=0)
        self._starter.close()
