"""The checker's side of a prober: a process that may hang or crash, is bounded in every phase, and gets replaced."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from resilio_hpc.core.json_fields import parse_object, printable
from resilio_hpc.diagnose import interpreter
from resilio_hpc.diagnose.messages import (
    Blocks,
    Entered,
    Failed,
    FromNode,
    Get,
    Given,
    Measured,
    Order,
    Phase,
    ProbeFault,
    Put,
    Seconds,
)
from resilio_hpc.diagnose.policy import PairPolicy

_LAST_WORDS_BYTES = 4000
_MOST_UNREAD = 1 << 20
_DEATH_S = 5.0
_EXTRA_S = 5.0  # for a process group to notice its own limit first, and report it
_PHASES: frozenset[Phase] = frozenset({"computing", "joining", "communicating"})


@dataclass(frozen=True)
class PhaseLimits:
    """Seconds in each phase."""

    starting: float
    computing: float
    joining: float
    communicating: float

    @classmethod
    def of(cls, policy: PairPolicy) -> PhaseLimits:
        """Return the limits: while one computes, the other may be waiting for it to join."""
        talk = policy.collective_s + _EXTRA_S
        return cls(policy.start_s, policy.compute_s, policy.compute_s + talk, talk)


class ProbeProcess:
    """One prober after the other.

    ``deadline``: monotonic; call ``read`` when ``fileno`` is readable, and at the deadline.
    """

    def __init__(self, policy: PairPolicy, threads: int, argv: Sequence[str] = ()) -> None:
        self._limits = PhaseLimits.of(policy)
        text = msgspec.json.encode(policy).decode()
        self._argv = (*(argv or interpreter.command("prober")), str(os.getpid()), str(threads), text)
        self._process: subprocess.Popen[bytes] | None = None
        self._order: Order | None = None
        self._phase: Phase = "starting"
        self._buffer = b""
        self._said = bytearray()
        self._known = Failed(0, "starting", "failed", "")  # the progress of its order so far
        self._undead = False  # one hangs in the kernel
        self.why_not = ""  # none is left, and none will be started
        self.ready = False
        self.deadline = float("inf")

    def fileno(self) -> int | None:
        """Return the descriptor to poll."""
        return self._process.stdout.fileno() if self._process is not None and self._process.stdout else None

    def start(self) -> None:
        """Start a new process, which imports torch."""
        self.kill()
        if self._undead:
            return
        self.why_not = ""
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, env=_environment(os.environ),
            )  # fmt: skip
        except OSError as error:
            self.why_not = f"cannot start {self._argv[0]}: {error.strerror}"
            return
        assert self._process.stdout and self._process.stderr
        for pipe in (self._process.stdout, self._process.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._buffer, self._said = b"", bytearray()
        self._enter("starting", self._limits.starting)

    def try_again(self) -> None:
        """Allow another start: the cause of the last failure may be over."""
        if self.why_not:
            self.start()

    def begin(self, order: Order) -> None:
        """Send an order. The prober is ready."""
        self._order, self._known = order, Failed(order.round, "computing", "failed", "")
        self.ready = False
        self._said.clear()
        self._enter("computing", self._limits.computing)
        self._tell(order=order.round, rank=order.rank, paired=bool(order.partner))

    def give(self, given: Given) -> None:
        """Send a value for which the process group waits."""
        if self._order is not None and given.round == self._order.round:
            self._tell(key=given.key, value=base64.b64encode(given.value).decode())

    def drop(self, round_number: int) -> None:
        """Give an order up."""
        if self._order is not None and self._order.round == round_number:
            self._order = None
            self._end_child()

    def read(self) -> list[FromNode]:
        """Return its progress, or how it ended."""
        self._listen_to_errors()
        try:
            data = os.read(self.fileno() or -1, 1 << 16) if self._process is not None else b""
        except BlockingIOError:
            return self._overdue()
        except OSError:
            data = b""
        if not data or len(self._buffer) > _MOST_UNREAD:
            return self._ended()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        found: list[FromNode] = []
        for line in lines:
            found += self._understood(parse_object(line) or {})
        return found

    def _understood(self, heard: dict[str, Any]) -> list[FromNode]:
        if "ready" in heard or "ended" in heard:
            found = self._crashed(heard["ended"]) if "ended" in heard and self._order is not None else []
            self.ready, self.deadline = True, float("inf")
            return found
        order = self._order
        if order is None:
            return []
        try:
            if "put" in heard:
                return [Put(order.round, str(heard["put"]), base64.b64decode(heard["value"]))]
            if "want" in heard:
                return [Get(order.round, str(heard["want"]))]
            if (phase := heard.get("phase")) in _PHASES:
                self._enter(phase, getattr(self._limits, phase))
                self._remember(heard)
                return [Entered(order.round, phase)]
            self._remember(heard)
            if "measured" in heard:
                self._order = None
                self._enter(self._phase, _DEATH_S)
                return [_measured(order, heard)]
            if "failed" in heard:
                return self._fail(msgspec.convert(heard["failed"], ProbeFault), str(heard["detail"]))
        except (KeyError, ValueError, msgspec.ValidationError) as error:
            return self._fail("crashed", f"what it said is unreadable: {error}")
        return []

    def _remember(self, heard: dict[str, Any]) -> None:
        if "compute" in heard:
            self._known = msgspec.structs.replace(
                self._known,
                compute=msgspec.convert(heard["compute"], Blocks),
                device=str(heard["device"])[:200],
                waited=msgspec.convert(heard["waited"], Seconds),
            )

    def _overdue(self) -> list[FromNode]:
        if time.monotonic() < self.deadline:
            return []
        if self._order is not None:
            return self._fail("hung", f"{self._phase} for more than {getattr(self._limits, self._phase):g} s")
        if self._phase == "starting":
            self.why_not = f"it was not ready within {self._limits.starting:g} s"
            self.kill()
        else:
            self.start()  # the child of an order that is over does not end, and its parent waits for it
        return []

    def _crashed(self, code: int) -> list[FromNode]:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = bytes(self._said).decode(errors="replace").strip().splitlines()[-1:] or [""]
        return self._fail("crashed", f"{how}{': ' if last[0] else ''}{printable(last[0], 300)}")

    def _ended(self) -> list[FromNode]:
        """Return how the prober ended, after all its children are gone."""
        self._listen_to_errors()
        was_ready = self.ready
        code = self.kill()
        if self._order is not None:
            found = self._crashed(code or 0)
            self.start()
            return found
        last = bytes(self._said).decode(errors="replace").strip().splitlines()[-1:] or [""]
        self.why_not = printable(f"exit code {code}: {last[0]}", 500)
        if was_ready:
            self.start()
        return []

    def _fail(self, fault: ProbeFault, detail: str) -> list[FromNode]:
        failed = msgspec.structs.replace(self._known, phase=self._phase, fault=fault, detail=printable(detail, 500))
        self._order = None
        self._end_child()
        return [failed]

    def _end_child(self) -> None:
        self._enter(self._phase, _DEATH_S)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def _enter(self, phase: Phase, limit_s: float) -> None:
        self._phase = phase
        self.deadline = time.monotonic() + limit_s

    def _tell(self, **fields: Any) -> None:
        assert self._process is not None and self._process.stdin
        with contextlib.suppress(OSError):  # it is dead: ``read`` tells
            os.write(self._process.stdin.fileno(), msgspec.json.encode(fields) + b"\n")

    def _listen_to_errors(self) -> None:
        if self._process is None or self._process.stderr is None:
            return
        with contextlib.suppress(OSError):
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self._said = (self._said + data)[-_LAST_WORDS_BYTES:]

    def kill(self) -> int | None:
        """Kill it. Return its exit code; None where not even SIGKILL ends it: then no other one is started."""
        process, self._process = self._process, None
        self.ready, self.deadline = False, float("inf")
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        code: int | None = None
        try:
            code = process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            self._undead, self.why_not = True, f"process {process.pid} hangs in the kernel: SIGKILL does not end it"
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return its environment, without NCCL's watchdog threads, which would end the process or query the store."""
    own = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "PYTHONUNBUFFERED": "1"}
    return {**environment, **own}


def _measured(order: Order, heard: dict[str, Any]) -> Measured:
    known = {name: heard[name] for name in Measured.__struct_fields__ if name in heard}
    return msgspec.convert({"type": "measured", **known, "round": order.round}, Measured)
