"""A log of a device's commands, from which a state that cannot be dumped is rebuilt: by doing them again.

A command is **queued** when it is in the log, before the device gets it; **done** once the device says so; **retired**
when no state that can be asked for needs it. It names the buffers that it reads and writes, so the log knows which
commands a state depends on. What is needed no more is dropped: commands on dead buffers, contents that were written
over, and all before a **capture**, which holds the contents of the buffers themselves.

A **position** is the number of the last command before it. The last few that were marked stay within reach. A log is
not for several threads at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from resilio_hpc.ckpt.devices.log_entries import Argument, Capture, Captured, DeviceCommand, Entry, Keeps, Marked

MOST_MARKS = 8
MOST_COMMANDS, MOST_BYTES = 20_000, 64 << 20
_SLACK = 256
"""Commands between two looks at what can be dropped, at least."""


class CommandState(Enum):
    """How far a command has come."""

    QUEUED = "queued"
    DONE = "done"
    RETIRED = "retired"


class CommandLog:
    """The log of one device."""

    def __init__(
        self,
        keeper: Keeps | None = None,
        entries: Iterable[Entry] = (),
        most_commands: int = MOST_COMMANDS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Begin; ``entries``: of an earlier process, in their order."""
        self._keeper: Keeps | None = None
        self._bounds = most_commands, most_bytes
        self._captures = [Capture(0)]
        self._commands: list[DeviceCommand] = []
        self._marks: deque[Marked] = deque(maxlen=MOST_MARKS)
        self.live: dict[int, tuple[Argument, ...]] = {}
        """Buffers, with what it takes to allocate them."""
        self.position = 0
        self._done = 0
        self._look_at = _SLACK
        self._since = 0, 0  # commands since the last capture, and their bytes
        for entry in entries:
            self._take(entry)
        self._done = self._whole_from = self.position  # each position from there on is within reach
        self._keeper = keeper

    def _take(self, entry: Entry) -> None:
        if isinstance(entry, DeviceCommand) and entry.number <= self.position:
            self.record_result(entry.number, entry.result or b"")
        elif isinstance(entry, DeviceCommand):
            self._commands.append(entry)
            self.position = entry.number
            self._since = self._since[0] + 1, self._since[1] + entry.size_bytes
            self._follow(entry)
        elif isinstance(entry, Marked):
            self._marks.append(entry)
        else:
            self._captures.append(entry)
            self.position = max(self.position, entry.position)
            self.live |= {one.buffer: one.about for one in entry.buffers}

    def _follow(self, command: DeviceCommand) -> None:
        for buffer in command.allocates:
            self.live[buffer] = command.arguments
        for buffer in command.frees:
            self.live.pop(buffer, None)

    # -- the life of a command -------------------------------------------------------------------------------------

    def append(
        self,
        name: str,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        arguments: Sequence[Argument] = (),
        data: bytes = b"",
        allocates: Sequence[int] = (),
        frees: Sequence[int] = (),
        draws: bool = False,
    ) -> DeviceCommand:
        """Queue a command. One that allocates has what it takes to do so as its arguments."""
        command = DeviceCommand(
            self.position + 1, name, tuple(reads), tuple(writes), tuple(arguments), data,
            tuple(allocates), tuple(frees), draws,
        )  # fmt: skip
        self._take(command)
        if self._keeper is not None:
            self._keeper.append(command)
        if len(self._commands) >= self._look_at:
            self._retire()
        return command

    def done(self, number: int) -> None:
        """Take note that the device has done all commands up to this one."""
        self._done = max(self._done, number)

    def record_result(self, number: int, result: bytes) -> None:
        """Record what a command that draws has written."""
        for at in range(len(self._commands) - 1, -1, -1):
            if self._commands[at].number == number:
                self._commands[at] = msgspec.structs.replace(self._commands[at], result=result)
                if self._keeper is not None:
                    self._keeper.append(self._commands[at])
                return

    def state_of(self, number: int) -> CommandState:
        """Return how far a command has come. Raises ValueError where there was none of this number."""
        if not 0 < number <= self.position:
            raise ValueError(f"no command has the number {number}")
        if number > self._done:
            return CommandState.QUEUED
        known = any(command.number == number for command in self._commands)
        return CommandState.DONE if known else CommandState.RETIRED

    # -- positions -------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """Keep the present position within reach, and return it."""
        marked = Marked(self.position, tuple(self.live))
        if not self._marks or self._marks[-1] != marked:
            self._marks.append(marked)
            if self._keeper is not None:
                self._keeper.append(marked)
        return self.position

    def reaches(self, position: int) -> bool:
        """Return whether the state at a position can be rebuilt: one that was marked, or a recent one."""
        return self._whole_from <= position <= self.position or any(one.position == position for one in self._marks)

    def until(self, position: int) -> tuple[Capture, list[DeviceCommand]]:
        """Return what rebuilds the state at a position: a capture, and the commands after it, in order."""
        capture = max((one for one in self._captures if one.position <= position), key=lambda one: one.position)
        return capture, [one for one in self._commands if capture.position < one.number <= position]

    def cut(self, position: int) -> None:
        """Drop all that came after a position."""
        capture, commands = self.until(position)
        self._captures = [one for one in self._captures if one.position <= position]
        self._commands = [one for one in self._commands if one.number <= position]
        self._marks = deque((one for one in self._marks if one.position <= position), MOST_MARKS)
        self.live = {one.buffer: one.about for one in capture.buffers}
        for command in commands:
            self._follow(command)
        self.position, self._done = position, min(self._done, position)
        self._whole_from = min(self._whole_from, position)
        self._count()
        self._rewrite()

    # -- bounds ----------------------------------------------------------------------------------------------------

    @property
    def why_capture(self) -> str:
        """Return why the log can only be kept small by a capture; "" where it is small."""
        most_commands, most_bytes = self._bounds
        if self._since[0] < most_commands and self._since[1] < most_bytes:
            return ""
        self._retire()
        count, size = self._since
        if count < most_commands // 2 and size < most_bytes // 2:
            return ""
        return f"{count} commands of {size} bytes are needed to rebuild the device's state"

    def capture(self, buffers: Iterable[tuple[int, bytes]]) -> None:
        """Take the contents of all live buffers, at the present position; what only they need is dropped."""
        found = tuple(Captured(buffer, self.live[buffer], data) for buffer, data in buffers)
        if {one.buffer for one in found} != self.live.keys():
            raise ValueError("a capture has the contents of all live buffers")
        self._captures.append(Capture(self.position, found))
        self._retire()

    @property
    def size_bytes(self) -> int:
        """Return about how much memory the log takes."""
        return sum(one.size_bytes for one in self._captures) + sum(one.size_bytes for one in self._commands)

    def __len__(self) -> int:
        """Return the number of commands that are not retired."""
        return len(self._commands)

    def _retire(self) -> None:
        """Drop what no position within reach depends on."""
        oldest = min((one.position for one in self._marks), default=self.position)
        base, _ = self.until(oldest)
        self._captures = [one for one in self._captures if one.position >= base.position]
        self._commands = [one for one in self._commands if one.number > base.position]
        self._commands = self._needed()
        self._whole_from = max(self._whole_from, self._done)
        self._count()
        self._rewrite()

    def _count(self) -> None:
        _, since = self.until(self.position)
        self._since = len(since), sum(one.size_bytes for one in since)
        self._look_at = 2 * len(self._commands) + _SLACK

    def _needed(self) -> list[DeviceCommand]:
        """Return the commands that live buffers, now and at the marks, depend on: one pass, from the last to the first.

        Commands that are not done are all kept: a device that ends tells by them which one it had begun.
        """
        wanted, touched, work = set(self.live), set(self.live), set[int]()
        for entry in reversed(self.entries()):
            if isinstance(entry, Marked):
                wanted.update(entry.live)
                touched.update(entry.live)
            elif isinstance(entry, Capture):
                wanted = set()
                touched.update(one.buffer for one in entry.buffers)
            elif entry.number > self._done:  # all that led to it stays: it may be the first that is not done
                work.add(entry.number)
                wanted.update(entry.reads, entry.writes, entry.frees)
                touched.update(entry.reads, entry.writes, entry.frees)
            elif not wanted.isdisjoint(entry.writes):
                work.add(entry.number)
                wanted.difference_update(entry.writes)
                wanted.update(entry.reads)
                touched.update(entry.reads, entry.writes)
        return [
            one for one in self._commands
            if one.number in work or not touched.isdisjoint(one.allocates) or not touched.isdisjoint(one.frees)
        ]  # fmt: skip

    def _rewrite(self) -> None:
        if self._keeper is not None:
            self._keeper.replace(self.entries())

    def entries(self) -> list[Entry]:
        """Return all that a later process needs, in order: captures and marks behind the commands that they follow."""
        found: list[tuple[int, int, Entry]] = [(one.number, 0, one) for one in self._commands]
        found += [(one.position, 1, one) for one in self._captures if one.position]
        found += [(one.position, 2, one) for one in self._marks]
        return [entry for _, _, entry in sorted(found, key=lambda one: one[:2])]
