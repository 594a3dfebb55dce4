"""``resilio logs [RUN]``: the ranks' output, as the run directory keeps it, and the first failing rank's error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.cli.ckpt.change import count
from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal, trusted_files
from resilio_hpc.core.errors import UsageError, os_error_text
from resilio_hpc.core.json_fields import printable

if TYPE_CHECKING:
    from resilio_hpc.report.rank_logs import RankLog

POLL_S = 0.3
FEW = 8  # ranks that are shown without being named
MOST_FOLLOWED = 256
TAIL = 20  # lines of each rank, where several are shown
PIECE_BYTES = 1 << 16
_EXAMPLES = """examples:
  resilio logs                             the last lines of each rank, in the newest round of the newest run here
  resilio logs 4712 --rank 3               all that rank 3 wrote in the newest round
  resilio logs 4712 --rank 0-7 -n 5 --round 2
  resilio logs 4712 --first-error          rank, node, exit code, traceback and time of what failed first
  resilio logs 4712 --follow --rank 0      as it is written, over restarts, until the job has a verdict

exit codes: 0; 1 nothing is there: no output, or no rank has failed; 2 a mistake in the command, or no such run
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0; 1 where nothing is there; 2 without a run."""
    parser = Parser(
        prog="resilio logs",
        description="The ranks' output, from the run directory alone: works during the run and long after it.\n"
        f"Without --rank and --node: all ranks, or, of more than {FEW}, the first that failed, or else the lowest.",
        epilog=_EXAMPLES,
    )
    run_argument.add(parser, optional=True)
    parser.add_argument("--rank", type=_ranks, metavar="N", help="only these ranks: 3, or 0-7,12")
    parser.add_argument("--node", metavar="NAME", help="only the ranks of this node")
    parser.add_argument("--round", type=int, metavar="N", help="of this round (default: the newest)")
    parser.add_argument(
        "-n", "--lines", type=count, metavar="N",
        help=f"the last lines of each rank (default: {TAIL}; all lines of a single rank)",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--follow", action="store_true", help="go on as lines come, until the job has a verdict")
    form.add_argument("--first-error", action="store_true", help="the error of the rank that failed first")
    parser.add_argument("--json", action="store_true", help="with --first-error: for programs")
    options = parser.parse_args(argv)
    if options.json and not options.first_error:
        parser.error("--json goes with --first-error: output of programs has no fields")
    if options.first_error and (options.rank or options.node or options.lines):
        parser.error("--first-error finds the rank by itself: it goes with --round and --json alone")
    path = run_argument.directory_of(options)
    if options.first_error:
        return _show_first_error(path, options.round, options.json)
    return _follow(path, options) if options.follow else _show(path, options)


def _ranks(text: str) -> list[range]:
    """Return the ranks of ``3`` or ``0-7,12``."""
    found: list[range] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise argparse.ArgumentTypeError(f"{printable(repr(text), 60)} is no list of ranks: 3, or 0-7,12")
        low, high = int(first), int(last or first)
        if low > high:
            raise argparse.ArgumentTypeError(f"{printable(repr(text), 60)}: {low} is more than {high}")
        found.append(range(low, high + 1))
    return found


# -- the first error ---------------------------------------------------------------------------------------------------


def _show_first_error(path: Path, number: int | None, as_json: bool) -> int:
    from resilio_hpc.report.chain.first_error import error_object, error_text, read_first_error

    error = read_first_error(path, number)
    if error is None:
        where = f" in round {number}" if number is not None else ""
        more = "" if number is not None else "; resilio why says what else broke"
        print(f"resilio: no rank has failed{where}{more}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(error_object(path, error), indent=1), file=terminal.raw(sys.stdout), flush=True)
    else:
        print("\n".join(error_text(error)), flush=True)
    return 0


# -- which files -------------------------------------------------------------------------------------------------------


def _chosen(path: Path, number: int, options: argparse.Namespace) -> tuple[list[RankLog], int]:
    """Return the files of a round that the options name, and of how many more ranks there are some."""
    from resilio_hpc.report.chain.first_error import read_first_error
    from resilio_hpc.report.rank_logs import log_directory, logs_of

    every = logs_of(log_directory(path), number)
    found = [log for log in every if _has_rank(log, options.rank) and _is_on(log, options.node)]
    if options.rank is not None or options.node is not None:
        if every and not found:
            raise UsageError(_no_such(every, options))
        return found, 0
    ranks = sorted({log.rank for log in found})
    if len(ranks) <= FEW:
        return found, 0
    error = read_first_error(path, number)
    one = error.rank if error is not None and error.rank in ranks else ranks[0]
    return [log for log in found if log.rank == one], len(ranks) - 1


def _has_rank(log: RankLog, wanted: Sequence[range] | None) -> bool:
    return wanted is None or any(log.rank in some for some in wanted)


def _is_on(log: RankLog, node: str | None) -> bool:
    return node is None or node in (log.node, log.node.partition(".")[0])


def _no_such(every: Sequence[RankLog], options: argparse.Namespace) -> str:
    ranks = sorted({log.rank for log in every})
    nodes = sorted({log.node for log in every})
    shown = ", ".join(printable(node, 60) for node in nodes[:5])
    more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    what = f"--node {printable(options.node, 60)}" if options.node is not None else "--rank"
    has = f"it has ranks {ranks[0]} to {ranks[-1]} on {shown}{more}"
    return f"{what}: round {every[0].round} has no output of it; {has}"


def _round(path: Path, wanted: int | None) -> int | None:
    from resilio_hpc.report.rank_logs import log_directory, rounds

    directory = log_directory(path)
    known = rounds(directory)
    if wanted is None or wanted in known:
        return wanted if wanted is not None else (known[-1] if known else None)
    if not known:
        return None
    raise UsageError(f"--round {wanted}: there is no output of it; the rounds are {known[0]} to {known[-1]}")


# -- the output --------------------------------------------------------------------------------------------------------


def _show(path: Path, options: argparse.Namespace) -> int:
    number = _round(path, options.round)
    if number is None:
        print("resilio: no rank has written anything yet", file=sys.stderr)
        return 1
    logs, others = _chosen(path, number, options)
    several = len({log.rank for log in logs}) > 1
    lines = options.lines or (TAIL if several or others else None)
    for log in logs:
        if several or len(logs) > 1 or others:
            _print_head(log)
        for line in _lines_of(log.path, lines):
            _write(line)
    sys.stdout.flush()
    if others:
        print(f"resilio: {others} more ranks have output in round {number}: name them with --rank", file=sys.stderr)
    return 0 if logs else 1


def _print_head(log: RankLog) -> None:
    stream = ", standard error" if log.stream == "err" else ""
    print(f"== rank {log.rank} on {printable(log.node, 255)}, round {log.round}{stream}")


def _lines_of(path: Path, most: int | None) -> Iterator[bytes]:
    """Yield the last lines of a file, or all of them, piece by piece: a file may be larger than memory."""
    from resilio_hpc.launch.workers.output.log_tail import Lines
    from resilio_hpc.report.rank_logs import last_lines

    try:
        if most is not None:
            yield from last_lines(path, most)
            return
        lines = Lines()
        with open(trusted_files.open_file(path), "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield from lines.feed(piece)
        yield from lines.end()
    except OSError as error:
        print(f"resilio: {os_error_text(error, str(path))}", file=sys.stderr)


def _write(line: bytes, head: str = "") -> None:
    """Write one line: colours stay on a terminal, and end with the line."""
    from resilio_hpc.launch.workers.output.log_tail import printable as harmless

    text = harmless(line).decode(errors="replace")
    if "\x1b" in text and not sys.stdout.isatty():
        text = terminal.plain(text)
    out = terminal.raw(sys.stdout)
    out.write(f"{head}{text}{chr(27) + '[0m' if chr(27) in text else ''}\n")


# -- following ---------------------------------------------------------------------------------------------------------


def _follow(path: Path, options: argparse.Namespace) -> int:
    from resilio_hpc.report.overview import RunReader, is_closed

    reader = RunReader(path)
    if options.round is not None:
        _round(path, options.round)  # a mistake is said at once
    tails: dict[Path, _Tail] = {}
    shown: int | None = None
    while True:
        over = is_closed(reader.overview(time.time()))
        number = _round(path, options.round)
        if number is not None:
            if number != shown:  # the ranks of the round before are read to their ends
                _print_new(tails)
                tails = {}
                print(f"== round {number}", flush=True)
            for log in _followed(path, number, options):
                if log.path not in tails:
                    tails[log.path] = _Tail(log, (options.lines or TAIL) if shown is None else None)
            shown = number
        more = _print_new(tails)
        if over and not more:
            for tail in tails.values():
                tail.end()
            return 0
        time.sleep(0.0 if more else POLL_S)


def _followed(path: Path, number: int, options: argparse.Namespace) -> list[RankLog]:
    try:
        logs, _ = _chosen(path, number, options)
    except UsageError:
        return []  # these ranks may write later, or have no place in this round
    if len(logs) > MOST_FOLLOWED:
        raise UsageError(f"--follow: {len(logs)} files are too many: name {MOST_FOLLOWED} ranks at most with --rank")
    return logs


def _print_new(tails: dict[Path, _Tail]) -> bool:
    more = [tail.read() for tail in tails.values()]
    sys.stdout.flush()
    return any(more)


class _Tail:
    """One file, as it grows. ``last``: begin with so many last lines; None: with the first."""

    def __init__(self, log: RankLog, last: int | None) -> None:
        from resilio_hpc.launch.workers.output.log_tail import Lines

        self._head = f"[rank {log.rank}] "
        self._log, self._lines, self._at = log, Lines(), 0
        if last is not None:
            self._begin(last)

    def _begin(self, last: int) -> None:
        from resilio_hpc.report.rank_logs import last_lines

        try:
            size = self._log.path.stat().st_size
            self._at = max(0, size - sum(len(line) + 1 for line in last_lines(self._log.path, last)))
        except OSError:
            return

    def read(self) -> bool:
        """Write one piece of what is new. Return whether there may be more."""
        try:
            with open(trusted_files.open_file(self._log.path), "rb") as file:
                file.seek(self._at)
                piece = file.read(PIECE_BYTES)
        except OSError:  # removed, or a file system that does not answer now
            return False
        self._at += len(piece)
        for line in self._lines.feed(piece):
            _write(line, self._head)
        return bool(piece)

    def end(self) -> None:
        """Write the last line, if it has no end."""
        for line in self._lines.end():
            _write(line, self._head)
        sys.stdout.flush()
