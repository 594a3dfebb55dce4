"""``resilio diagnose WHAT …``: why something failed, in a paragraph, from logs, a run or a job of Slurm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import bounded, terminal
from resilio_hpc.core.errors import UsageError, os_error_text
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.diagnose.causes import cases, log_files
from resilio_hpc.diagnose.causes.judge import LikelyCause, LogStream, judge
from resilio_hpc.diagnose.causes.pattern_table import CauseClass, shipped
from resilio_hpc.events.event_text import words
from resilio_hpc.slurm.chain.chain import is_job
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.runs import run_names

READ_S = 120.0
MOST_FILES = 512
WIDTH = 100  # a file or a pipe has no width
_LOGS = ("*.log", "*.out", "*.err", "*.txt")
_FAULTS = {
    "rank_failed",
    "node_lost",
    "device_evicted",
    "local_failed",
    "persist_failed",
    "launch_failed",
    "store_died",
}
_PROGRESS = {"committed", "recovered", "first_step"}
_EXAMPLES = """examples:
  resilio diagnose slurm-4711.out               a log, of any program
  resilio diagnose slurm-4711.out dmesg-n3.txt  with the kernel's log of a node beside it
  resilio diagnose 4711                         a job that Slurm still knows, or a run's
  resilio diagnose resilio-runs/4711            a run's directory, or any folder of logs
  resilio diagnose --cases cases.jsonl --out causes.jsonl     for programs; each line has id and lines[].text
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 where a cause is named, 1 where it is unknown, 2 for a mistake."""
    parser = Parser(
        prog="resilio diagnose",
        description="Why something failed: the line that names the cause, whose fault it is, and how sure that is. "
        f"The ends of the files are read ({log_files.MOST_BYTES >> 20} MiB or {log_files.MOST_LINES} lines in all).",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help="a log file, a folder of logs, a run, or a job's number"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--cases", type=Path, metavar="IN.jsonl", help="judge each line of this file")
    parser.add_argument("--out", type=Path, metavar="OUT.jsonl", help="where the answers to --cases go (default: here)")
    options = parser.parse_args(argv)
    if options.cases is not None:
        if options.what or options.json:
            parser.error("--cases goes alone")
        return _judge_cases(options.cases, options.out)
    if options.out is not None:
        parser.error("--out goes with --cases")
    if not options.what:
        parser.error("name a log, a run or a job")
    try:
        streams = bounded.in_time(partial(_gather, options.what), READ_S)
    except TimeoutError as error:
        raise UsageError(f"the logs cannot be read: {error.strerror}") from None
    cause = judge(streams)
    _show(cause, streams, options.json)
    return 1 if cause.label is CauseClass.UNKNOWN else 0


def _judge_cases(source: Path, target: Path | None) -> int:
    try:
        with source.open("rb") as lines:
            answers = [msgspec.json.encode(answer).decode() for answer in cases.judged(lines, str(source))]
        text = "".join(f"{answer}\n" for answer in answers)
        if target is None:
            sys.stdout.write(text)
        else:
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(os_error_text(error, str(error.filename or source))) from None
    return 0


def _gather(what: Sequence[str]) -> list[LogStream]:
    return [stream for word in what for stream in _streams_of(word)]


def _streams_of(word: str) -> Iterator[LogStream]:
    path = Path(word)
    if path.is_dir():
        yield from _of_run(path) if (path / "run.json").exists() else _of_folder(path)
    elif path.exists():
        yield log_files.read(path)
    else:
        yield from _of_name(word)


def _of_name(word: str) -> Iterator[LogStream]:
    fields = commands.job_fields(word) if is_job(word) else {}
    try:
        yield from _of_run(run_names.run_path(word))
    except UsageError:
        if not fields:
            raise
    if fields:
        state = [f"{name}={fields[name]}" for name in ("JobState", "Reason", "ExitCode") if fields.get(name)]
        yield LogStream(f"Slurm's state of job {word}", [" ".join(state)])
        for path in dict.fromkeys(fields.get(name, "") for name in ("StdErr", "StdOut")):
            if path and Path(path).is_file():
                yield log_files.read(Path(path))


def _of_folder(folder: Path) -> Iterator[LogStream]:
    paths = sorted(path for pattern in _LOGS for path in folder.rglob(pattern) if path.is_file())
    if not paths:
        raise UsageError(f"{printable(str(folder), 200)} has no logs ({', '.join(_LOGS)})")
    if len(paths) > MOST_FILES:
        raise UsageError(
            f"{printable(str(folder), 200)} has {len(paths)} logs: name those of some ranks, {MOST_FILES} at most"
        )
    for path in paths:
        yield log_files.read(path, share=len(paths))


def _of_run(directory: Path) -> Iterator[LogStream]:
    """Yield what the ledger says of failures and of progress, then the ranks' output of the last round."""
    if not (directory / "run.json").exists():
        raise UsageError(f"{printable(str(directory), 200)} is no run's directory, and has no logs")
    lines: list[str] = []
    progress: set[int] = set()
    for event in read_ledger(directory / "ledger"):
        if event.kind in _PROGRESS:
            progress.add(len(lines))
        if event.kind in _FAULTS | _PROGRESS:
            lines.append(words(event.kind, event.fields))
        if event.kind == "rank_failed":
            lines += str(event.fields.get("traceback") or "").strip().splitlines()[-1:]
    yield LogStream("ledger", lines, progress=frozenset(progress))
    rounds = [path for path in (directory / "logs").glob("*") if path.name.isdecimal()]
    if rounds:
        newest = max(rounds, key=lambda path: int(path.name))
        logs = sorted(newest.rglob("*.log"))[:MOST_FILES]
        for path in logs:
            yield log_files.read(path, str(path.relative_to(directory)), len(logs))


def _show(cause: LikelyCause, streams: Sequence[LogStream], as_json: bool) -> None:
    place = "" if cause.root is None else streams[cause.root.stream].place(cause.root.index)
    statement = "" if cause.root is None else printable(cause.root.statement, 400)
    todo = shipped().todo[cause.label]
    if as_json:
        print(
            json.dumps(
                {
                    "v": 1, "label": cause.label.value, "confidence": cause.confidence, "says": cause.evidence,
                    "where": place, "line": statement, "overcome": cause.overcome, "todo": todo, "others": cause.others,
                }
            )
        )  # fmt: skip
        return
    for line in _paragraph(cause, place, statement, todo, sum(len(stream.lines) for stream in streams), len(streams)):
        terminal.show(line)


def _paragraph(cause: LikelyCause, place: str, statement: str, todo: str, lines: int, files: int) -> Iterator[str]:
    width = terminal.columns(WIDTH)
    sure = f"{cause.confidence:.0%} sure" if cause.label is not CauseClass.UNKNOWN else "the lines do not decide"
    yield from terminal.wrapped(f"{cause.label.value}: {cause.evidence} ({sure})", width)
    if place:
        yield from terminal.wrapped(f"  {printable(place, 200)}: {statement}", width)
    if cause.overcome:
        yield from terminal.wrapped("  Progress followed that line, so it may not be why the work ended.", width)
    for says, count in list(cause.others.items())[:3]:
        yield from terminal.wrapped(f"  beside it, {count} {'line' if count == 1 else 'lines'}: {says}", width)
    yield from terminal.wrapped(f"  {lines} lines of {files} {'log' if files == 1 else 'logs'} were read", width)
    yield from terminal.wrapped(f"to do: {todo}", width)
