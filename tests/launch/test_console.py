"""The ranks' output on the console: real files, real pipes, a clock that the test moves."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.output_options import OutputOptions
from resilio_hpc.launch.config.streams import Std
from resilio_hpc.launch.rundir.log_spool import HOLE_BYTES, KEPT_BYTES, Drain
from resilio_hpc.launch.workers.output.console import Console, RankLogs
from resilio_hpc.launch.workers.output.log_tail import MAX_LINE_BYTES, PROGRESS_EVERY_S
from resilio_hpc.launch.workers.output.shown_streams import shown


def options(**changes: object) -> LaunchOptions:
    return LaunchOptions(script="x.py", kind="script", run_dir="/tmp", output=OutputOptions(**changes))  # type: ignore[arg-type]


class Screen:
    """Two files in place of the console, the logs of some ranks, and the console that is tested."""

    def __init__(self, directory: Path, launch: LaunchOptions, ranks: int = 2) -> None:
        self.directory = directory
        self.now = 100.0
        self._paths = (directory / "console.out", directory / "console.err")
        self._fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in self._paths]
        self.console = Console(launch, *self._fds, clock=lambda: self.now)
        self.ranks = ranks
        self.watch(0)

    def log(self, rank: int, stream: str = "out", round: int = 0) -> Path:
        return self.directory / f"round{round}.rank{rank}.{stream}"

    def watch(self, round: int) -> None:
        logs = [
            RankLogs(rank, rank, self.log(rank, "out", round), self.log(rank, "err", round))
            for rank in range(self.ranks)
        ]
        self.console.watch(logs, self.ranks, self.directory)

    def write(self, rank: int, data: bytes, stream: str = "out", round: int = 0) -> None:
        with open(self.log(rank, stream, round), "ab") as file:
            file.write(data)

    def out(self) -> str:
        self.console.poll()
        return self._paths[0].read_text()

    def err(self) -> str:
        self.console.poll()
        return self._paths[1].read_text()

    def end(self) -> None:
        self.console.close()
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(tmp_path, options())
    yield screen
    screen.end()


def test_lines_of_all_ranks_are_shown_with_their_rank(screen: Screen) -> None:
    assert screen.out() == ""  # the files do not exist yet
    screen.write(0, b"hello\n")
    screen.write(1, b"hallo\n")
    screen.write(1, b"warning\n", "err")
    assert screen.out() == "[rank 0] hello\n[rank 1] hallo\n"
    assert screen.err() == "[rank 1] warning\n"


def test_a_single_rank_needs_no_prefix(tmp_path: Path) -> None:
    screen = Screen(tmp_path, options(), ranks=1)
    screen.write(0, b"hello\n")
    assert screen.out() == "hello\n"
    screen.end()


def test_a_line_is_shown_when_it_is_whole(screen: Screen) -> None:
    screen.write(0, b"step 1")
    assert screen.out() == ""
    screen.write(0, b"0\nstep 2")
    assert screen.out() == "[rank 0] step 10\n"
    screen.console.close()
    assert screen.out() == "[rank 0] step 10\n[rank 0] step 2\n"


def test_a_huge_line_comes_in_pieces_and_a_burst_comes_whole(screen: Screen) -> None:
    screen.write(0, b"x" * (MAX_LINE_BYTES * 3 + 5) + b"\n")
    screen.write(1, b"y\n" * 200_000)
    screen.console.close()
    lines = screen.out().splitlines()
    assert [len(line) - len("[rank 0] ") for line in lines if "x" in line] == [MAX_LINE_BYTES] * 3 + [5]
    assert lines.count("[rank 1] y") == 200_000


def test_garbage_cannot_garble_the_terminal_but_colours_stay(screen: Screen) -> None:
    screen.write(0, b"\xff\xfe\x00\x1b]0;title\x07 \x1b[31mred\x1b[0m \xc3\xbc\ttab\r\n")
    assert screen.out() == "[rank 0] \ufffd\ufffd??]0;title? \x1b[31mred\x1b[0m ü\ttab\n"


def test_a_progress_bar_is_shown_now_and_then_and_in_its_last_state(screen: Screen) -> None:
    screen.write(0, b"\r 1%\r 2%\r 3%", "err")
    assert screen.err() == "[rank 0]  2%\n"
    screen.write(0, b"\r 4%\r 5%", "err")
    assert screen.err() == "[rank 0]  2%\n"
    screen.now += PROGRESS_EVERY_S
    assert screen.err() == "[rank 0]  2%\n[rank 0]  4%\n"
    screen.write(0, b"\r99%\r100%\n", "err")
    assert screen.err().endswith("[rank 0]  4%\n[rank 0] 100%\n")


def test_the_last_lines_of_a_round_come_before_or_with_the_next(screen: Screen) -> None:
    screen.write(0, b"Traceback\n" * 30_000)
    screen.watch(1)
    screen.write(0, b"again\n", round=1)
    screen.console.close()
    assert screen.out().count("Traceback") == 30_000
    assert screen.out().count("again") == 1


def test_a_stuck_console_neither_blocks_nor_loses_a_line(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    console = Console(options(), writer, writer)
    log = tmp_path / "out"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(100_000)))
    console.watch([RankLogs(0, 0, log, tmp_path / "err")], 1, tmp_path)
    for _ in range(50):  # nobody reads: every call must come back
        console.poll()
    seen = b""
    while not seen.endswith(b"line 99999\n"):
        seen += os.read(reader, 1 << 16)
        console.poll()
    assert seen.count(b"\n") == 100_000
    console.close()
    os.close(reader)
    os.close(writer)


def test_a_console_whose_reader_is_gone_is_given_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    console = Console(options(), writer, writer)
    log = tmp_path / "out"
    log.write_bytes(b"x\n")
    console.watch([RankLogs(0, 0, log, tmp_path / "err")], 1, tmp_path)
    console.poll()
    log.write_bytes(b"x\n" * 200_000)
    console.close()
    os.close(writer)


@pytest.mark.parametrize(
    ("changes", "rank0", "rank1"),
    [
        ({}, (True, True), (True, True)),
        ({"redirects": "3"}, (False, False), (False, False)),
        ({"redirects": "1"}, (False, True), (False, True)),
        ({"redirects": "0:3"}, (False, False), (True, True)),
        ({"redirects": "3", "tee": "0:1"}, (True, False), (False, False)),
        ({"local_ranks_filter": (1,)}, (False, False), (True, True)),
        ({"local_ranks_filter": (1,), "tee": "3"}, (False, False), (True, True)),
    ],
)
def test_which_streams_are_shown(
    changes: dict[str, object], rank0: tuple[bool, bool], rank1: tuple[bool, bool]
) -> None:
    for rank, expected in ((0, rank0), (1, rank1)):
        got = tuple(shown(options(**changes), rank, rank, 2, stream).on_console for stream in (Std.OUT, Std.ERR))
        assert got == expected


def test_prefixes_are_torchruns_where_its_flags_are_used() -> None:
    assert shown(options(tee="3"), 1, 5, 8, Std.OUT).prefix == b"[default1]:"
    template = options(log_line_prefix_template="${role_name}-${rank}/${local_rank} ${other}> ")
    assert shown(template, 1, 5, 8, Std.OUT).prefix == b"default-5/1 ${other}> "


def test_lines_with_a_word_are_duplicated(tmp_path: Path) -> None:
    screen = Screen(tmp_path, options(duplicate_stdout_filters=("loss", "NaN"), redirects="3"))
    screen.write(0, b"loss 1\nother\n")
    screen.write(1, b"is NaN\n")
    screen.write(1, b"loss on stderr\n", "err")
    assert screen.out() == screen.err() == ""
    assert (tmp_path / "filtered_stdout.log").read_text() == "[rank 0] loss 1\n[rank 1] is NaN\n"
    assert not (tmp_path / "filtered_stderr.log").exists()
    screen.end()


def test_with_tee_only_teed_streams_are_duplicated(tmp_path: Path) -> None:
    screen = Screen(tmp_path, options(duplicate_stdout_filters=("loss",), tee="1:1"))
    screen.write(0, b"loss 1\n")
    screen.write(1, b"loss 2\n")
    assert screen.out() == "[rank 0] loss 1\n[default1]:loss 2\n"
    assert (tmp_path / "filtered_stdout.log").read_text() == "[default1]:loss 2\n"
    screen.end()


def test_of_what_is_too_much_the_last_lines_are_shown_and_how_much_is_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "spool/logs/0/n1"
    directory.mkdir(parents=True)
    log = directory / "0.log"
    log.write_bytes((b"x" * 999 + b"\n") * 40_000 + b"last")
    calls = itertools.count()
    with (tmp_path / "shown").open("wb") as shown:
        console = Console(options(), shown.fileno(), shown.fileno(), clock=lambda: next(calls) / 1000)
        console.watch([RankLogs(0, 0, log, log)], 1, directory)
        console.close(wait_s=0.3)
    lines = (tmp_path / "shown").read_bytes().split(b"\n")
    (told,) = [line for line in lines if b"left out" in line]
    assert told.endswith(
        b"bytes are left out here: %s has them" % str(options().logs_directory / "0/n1/0.log").encode()
    )
    assert lines[-2:] == [b"last", b""]
    left_out = int(told.split()[1])
    whole = sum(len(line) + 1 for line in lines if line.startswith(b"x")) + len(b"last")
    assert abs(left_out + whole - log.stat().st_size) <= 1000  # a line may be cut


def test_a_console_that_is_behind_says_what_of_a_long_log_the_spool_no_longer_has(tmp_path: Path) -> None:
    directory = tmp_path / "spool/logs/0/n1"
    directory.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    log, err = directory / "0.log", tmp_path / "err"
    log.write_bytes(b"first\n" + b"x" * (HOLE_BYTES + KEPT_BYTES) + b"\nlast\n")
    Drain(tmp_path / "spool", tmp_path / "run").run()
    with (tmp_path / "shown").open("wb") as shown:
        console = Console(options(), shown.fileno(), shown.fileno())
        console.watch([RankLogs(0, 0, log, err)], 1, directory)
        console.close(wait_s=60)
    first, *_, last, end = (tmp_path / "shown").read_bytes().split(b"\n")
    assert first == b"[resilio] %d bytes are left out here: the rank's log has them" % HOLE_BYTES
    assert (last, end) == (b"last", b"")
    assert b"\0" not in (tmp_path / "shown").read_bytes()


def test_a_rank_may_write_zeros(screen: Screen) -> None:
    screen.write(0, b"\0\0zeros\n")
    assert screen.out() == "[rank 0] ??zeros\n"
