"""The pair check before a job's first round: nodes that it finds bad get no agent (DLR-3, NVX-4).

It is a process of its own with a time limit. Whatever happens to it, the run goes on, with all nodes if it gives no
result. Signals that come meanwhile are kept for the agents; one that ends the run ends the check first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core.json_fields import printable
from resilio_hpc.diagnose import CheckRequest, CheckResult, interpreter
from resilio_hpc.diagnose.policy import pair_policy
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.client.allocation import Allocation

BUDGET_S = 180.0
EXTRA_S = 30.0  # beyond its budget, to close its connections
POLICY_VARIABLE = "RESILIO_PAIR_POLICY"  # a file with a site's values in place of pair_policy.toml's
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class LeftOut:
    """Result of a check. ``nodes``: go on; ``left_out``: get no agent; ``kept``: slow, but needed all the same."""

    nodes: tuple[str, ...]
    left_out: tuple[str, ...]
    kept: tuple[str, ...]


def is_due(options: LaunchOptions, site: Site, link: int) -> bool:
    """Return whether this start is to be checked; "restart" checks a job that continues another one. Pure."""
    if site.mode is SiteMode.STEP or len(site.nodes) < 2:
        return False
    return options.check_nodes == "start" or (options.check_nodes == "restart" and (link > 1 or site.restarts > 0))


def leave_out(result: CheckResult, nodes: Sequence[str], most: int) -> LeftOut:
    """Return the nodes that are left out: all bad ones, and the slowest of the slow ones.

    Of these, as many as ``most`` training nodes can spare. Pure.
    """
    bad = set(result.bad)
    spared = max(0, len(nodes) - len(bad) - most)
    ratios = {one.node: max(one.compute_ratio or 0.0, one.collective_ratio or 0.0) for one in result.nodes}
    slow = sorted(result.slow, key=lambda node: -ratios[node])
    out = bad | set(slow[:spared])
    return LeftOut(
        tuple(node for node in nodes if node not in out), tuple(node for node in nodes if node in out),
        tuple(slow[spared:]),
    )  # fmt: skip


def request_of(site: Site, allocation: Allocation | None) -> CheckRequest:
    """Return the nodes of the site, in their order. Raises UsageError for an invalid policy file."""
    file = os.environ.get(POLICY_VARIABLE)
    policy = msgspec.structs.replace(pair_policy(Path(file) if file else None), budget_s=BUDGET_S)
    if site.mode is SiteMode.LOCAL or allocation is None:
        return CheckRequest(nodes=site.nodes, place="local", policy=policy)
    return CheckRequest(
        nodes=site.nodes, place="step", policy=policy, address=allocation.node, job=site.job,
        cpus=min(allocation.cpus_per_node, default=0),
    )  # fmt: skip


class NodeCheck:
    """One check, in a child. ``received``: signals that came meanwhile, for the caller to handle afterwards."""

    def __init__(self, request: CheckRequest, argv: Sequence[str] = (), extra_s: float = EXTRA_S) -> None:
        """Take the request; ``extra_s``: how much longer than its budget the child may run."""
        self._request = request
        self._argv = tuple(argv) or interpreter.command("check")
        self._extra_s = extra_s
        self.received: list[int] = []

    def run(self, handled: Sequence[str]) -> CheckResult | str:
        """Return the result, or why there is none. ``handled``: names of the signals that are kept for the agents."""
        numbers = {*_WARNINGS, *(signal.Signals[name] for name in handled)}
        with self._catching(numbers):
            return self._result()

    @contextlib.contextmanager
    def _catching(self, numbers: set[signal.Signals]) -> Iterator[None]:
        former = {number: signal.signal(number, lambda got, _: self.received.append(got)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _result(self) -> CheckResult | str:
        process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(msgspec.json.encode(self._request) + b"\n")
                process.stdin.close()
            until = time.monotonic() + self._request.policy.budget_s + self._extra_s
            said, answer, whole = self._listen(process, until)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()
        if not whole:
            return "a signal ended it" if self.received else "it took too long"
        try:
            return msgspec.json.decode(answer, type=CheckResult)
        except msgspec.MsgspecError:
            return printable(said.decode(errors="replace").strip().rpartition("\n")[2] or "it gave no answer", 300)

    def _listen(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes, bool]:
        """Return (its messages, its answer, whether it came to its end)."""
        assert process.stdout and process.stderr
        heard = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
        open_ends = set(heard)
        while open_ends and time.monotonic() < deadline and not set(self.received) - set(_WARNINGS):
            for end in select.select(list(open_ends), [], [], 0.2)[0]:
                data = os.read(end, 1 << 16)
                heard[end] += data
                if not data or len(heard[end]) > _MOST_BYTES:
                    open_ends.discard(end)
        answer, said = heard.values()
        return said, answer, not open_ends


def tell(result: CheckResult | str, left: LeftOut) -> None:
    """Print the result for the user."""
    if isinstance(result, str):
        say(f"pair check: no result ({result}): going on with all nodes")
        return
    named = {one.node: one for one in result.nodes if one.state in ("bad", "slow")}
    for node in (*left.left_out, *left.kept):
        done = "left out" if node in left.left_out else "kept, since it is needed"
        say(f"pair check: {node} is {named[node].state}: {printable(named[node].evidence, 200)}; {done}")
    if not named:
        say(f"pair check of {len(result.nodes)} nodes: {result.why or 'nothing was found'}")
