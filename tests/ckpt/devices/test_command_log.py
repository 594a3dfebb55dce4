"""The log of commands against a model of a device: every position within reach is rebuilt as it was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from resilio_hpc.ckpt.devices.command_log import CommandLog, CommandState
from resilio_hpc.ckpt.devices.log_entries import Capture, DeviceCommand, LogFile, read_entries


class Model:
    """A device whose buffers are numbers."""

    def __init__(self, capture: Capture | None = None) -> None:
        self.buffers = {} if capture is None else {one.buffer: int(one.data) for one in capture.buffers}

    def do(self, command: DeviceCommand) -> None:
        self.buffers |= dict.fromkeys(command.allocates, 0)
        value = sum(self.buffers[buffer] for buffer in command.reads)
        if command.name == "change":
            for buffer in command.writes:
                self.buffers[buffer] = (31 * value + int(command.arguments[0])) % 1_000_003
        for buffer in command.frees:
            del self.buffers[buffer]


def rebuilt(log: CommandLog, position: int) -> dict[int, int]:
    capture, commands = log.until(position)
    model = Model(capture)
    for command in commands:
        model.do(command)
    return model.buffers


class Program:
    """Draws commands, and knows the state after each."""

    def __init__(self, seed: int, log: CommandLog) -> None:
        self.choice, self.log, self.model, self.number = random.Random(seed), log, Model(), 0
        self.states: dict[int, dict[int, int]] = {0: {}}

    def step(self) -> None:
        live, choice = sorted(self.model.buffers), self.choice
        what = choice.random()
        if not live or what < 0.15:
            self.number += 1
            command = self.log.append("allocate", (), (self.number,), (4,), allocates=(self.number,))
        elif what < 0.25 and len(live) > 3:
            command = self.log.append("free", frees=(choice.choice(live),))
        else:
            reads = choice.sample(live, min(len(live), choice.randrange(3)))
            command = self.log.append("change", reads, (choice.choice(live),), (choice.randrange(1000),))
        self.model.do(command)
        self.states[self.log.position] = dict(self.model.buffers)
        if choice.random() < 0.9:
            self.log.done(self.log.position - choice.randrange(4))
        if choice.random() < 0.05:
            self.log.mark()
        if choice.random() < 0.01:
            self.log.done(self.log.position)
            self.log.capture([(buffer, str(value).encode()) for buffer, value in self.model.buffers.items()])

    def check(self, log: CommandLog) -> None:
        reached = [position for position in self.states if log.reaches(position)]
        assert log.position in reached
        for position in reached:
            left = rebuilt(log, position)
            wanted = self.states[position]
            assert {buffer: left[buffer] for buffer in wanted} == wanted, position


@pytest.mark.parametrize("seed", range(12))
def test_every_position_within_reach_is_rebuilt_as_it_was(seed: int, tmp_path: Path) -> None:
    log = CommandLog(LogFile(tmp_path / "log"))
    program = Program(seed, log)
    for number in range(1500):
        program.step()
        if number % 97 == 0:
            program.check(log)
    program.check(CommandLog(None, read_entries(tmp_path / "log")))
    if log.reaches(position := log.position - 1):
        log.cut(position)
        assert set(log.live) >= set(program.states[position])
        program.check(log)


def test_the_log_of_commands_on_dead_buffers_stays_small_without_a_capture() -> None:
    log = CommandLog(most_commands=1000)
    log.append("allocate", (), (1,), (4,), allocates=(1,))
    for number in range(2, 10_002):
        log.append("allocate", (), (number,), (4,), allocates=(number,))
        log.append("change", (1,), (number,), (number,))
        log.append("free", frees=(number,))
        log.done(log.position)
        assert not log.why_capture
        assert len(log) < 1000


def test_a_log_that_all_is_needed_of_says_that_a_capture_keeps_it_small() -> None:
    log, most = CommandLog(most_commands=1000), 0
    log.append("allocate", (), (1,), (4,), allocates=(1,))
    captures = 0
    for number in range(10_000):
        log.append("change", (1,), (1,), (number,))
        log.done(log.position)
        if "commands of" in log.why_capture:
            log.capture([(1, b"1")])
            captures += 1
        log.mark()
        most = max(most, len(log))
    assert 5 <= captures <= 25
    assert most <= 2100, "what is before the capture stays only for the positions that were marked"


def test_the_life_of_a_command() -> None:
    log = CommandLog()
    first = log.append("allocate", (), (1,), (4,), allocates=(1,))
    second = log.append("change", (), (1,), (5,))
    log.done(first.number)
    assert [log.state_of(one.number) for one in (first, second)] == [CommandState.DONE, CommandState.QUEUED]
    log.done(second.number)
    log.capture([(1, b"5")])
    assert log.state_of(first.number) is CommandState.RETIRED
    with pytest.raises(ValueError, match="number 7"):
        log.state_of(7)


def test_an_entry_that_was_not_finished_ends_the_file(tmp_path: Path) -> None:
    log = CommandLog(LogFile(tmp_path / "log"))
    for _ in range(5):
        log.append("allocate", arguments=(4,))
    whole = (tmp_path / "log").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "log").write_bytes(whole[:size])
        found = read_entries(tmp_path / "log")
        assert len(found) <= 4
        assert CommandLog(None, found).position == len(found)
    (tmp_path / "log").write_bytes(whole[:40] + b"\xff" + whole[41:])
    assert len(read_entries(tmp_path / "log")) <= 2


def test_what_a_command_draws_is_known_to_a_later_process(tmp_path: Path) -> None:
    log = CommandLog(LogFile(tmp_path / "log"))
    drawn = log.append("normal", (), (1,), draws=True)
    log.append("change", (1,), (1,), (5,))
    log.record_result(drawn.number, b"drawn")
    (found, _) = CommandLog(None, read_entries(tmp_path / "log")).until(2)[1]
    assert found.result == b"drawn"


def test_without_room_for_the_file_the_log_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = CommandLog(LogFile(tmp_path / "gone" / "log"))
    for _ in range(3):
        log.append("allocate", arguments=(4,))
    assert log.position == 3
    assert capfd.readouterr().err.count("a killed rank's device cannot be rebuilt") == 1
