"""``resilio diagnose WHAT …``: why something failed, in a paragraph, from logs, a run or a job of Slurm."""

from __future__ import annotations

import contextlib
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
from resilio_hpc.diagnose.cascade.in_ledger import last_origin
from resilio_hpc.diagnose.cascade.verdict import CascadeVerdict
from resilio_hpc.diagnose.causes import cases, log_files
from resilio_hpc.diagnose.causes.judge import LikelyCause, LogStream, judge
from resilio_hpc.diagnose.causes.pattern_table import CauseClass, shipped
from resilio_hpc.diagnose.hangs import flight_recorder
from resilio_hpc.diagnose.hangs.blame import HangBlame, HangKind, blame, names_of
from resilio_hpc.diagnose.hangs.flight_recorder import RecordedRank
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
_HANG_TODO = {
    HangKind.ABSENT: "look at that rank: its stack (py-spy dump), its node, its data",
    HangKind.MISMATCH: "mend the program: all ranks must make the same calls, with the same sizes",
    HangKind.DEADLOCK: "mend the program: all ranks must enter the communicators in the same order",
    HangKind.STUCK: "look at the network (resilio check-nodes) and the GPUs of these ranks (resilio health run)",
    HangKind.LAGGING: "look at the ranks that did not complete: their GPUs, their links",
    HangKind.NONE: "look at the programs' own stacks (py-spy dump): the ranks do not wait for each other",
}
_EXAMPLES = """examples:
  resilio diagnose slurm-4711.out               a log, of any program
  resilio diagnose slurm-4711.out dmesg-n3.txt  with the kernel's log of a node beside it
  resilio diagnose 4711                         a job that Slurm still knows, or a run's
  resilio diagnose resilio-runs/4711            a run's directory, or any folder of logs
  resilio diagnose /tmp/nccl_trace_rank_*       who holds up a hang: dumps of PyTorch's flight recorder
  resilio diagnose --cases cases.jsonl --out causes.jsonl     for programs; each line has id and lines[].text
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 where a cause is named, 1 where it is unknown, 2 for a mistake."""
    parser = Parser(
        prog="resilio diagnose",
        description="Why something failed: the line that names the cause, whose fault it is, and how sure that is. "
        f"The end of a file, or of a folder's files, is read: {log_files.MOST_BYTES >> 20} MiB, "
        f"{log_files.MOST_LINES} lines.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help="a log file, a folder of logs or of flight recorder dumps, a run, or a job's number",
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
        dumps, streams, origin = bounded.in_time(partial(_gather, options.what), READ_S)
    except TimeoutError as error:
        raise UsageError(f"the logs cannot be read: {error.strerror}") from None
    hang = blame([dump.calls for dump in dumps], flight_recorder.members_of(dumps)) if dumps else None
    cause = judge(streams) if streams or hang is None else None
    _show(cause, hang, origin, streams, options.json)
    found = hang is not None and hang.kind is not HangKind.NONE
    return 0 if found or (cause is not None and cause.label is not CauseClass.UNKNOWN) else 1


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


def _gather(what: Sequence[str]) -> tuple[list[RecordedRank], list[LogStream], CascadeVerdict | None]:
    dumps: list[RecordedRank] = []
    origin: CascadeVerdict | None = None
    streams: list[LogStream] = []
    for word in what:
        path = Path(word)
        if path.is_dir():
            if (path / "run.json").exists():
                streams += _of_run(path)
                origin = last_origin(read_ledger(path / "ledger")) or origin
                continue
            found = list(_dumps_in(path))
            dumps += found
            streams += _of_folder(path, required=not found)
        elif _is_dump(path):
            dumps.append(flight_recorder.read(path))
        elif path.exists():
            streams.append(log_files.read(path))
        else:
            streams += _of_name(word)
            with contextlib.suppress(UsageError):  # a job that is no run of ours
                origin = last_origin(read_ledger(run_names.run_path(word) / "ledger")) or origin
    return dumps, streams, origin


def _dumps_in(folder: Path) -> Iterator[RecordedRank]:
    """Yield the dumps below a folder; other pickles are passed over, with a line on standard error."""
    for path in sorted(folder.rglob("*")):
        if _is_dump(path):
            try:
                yield flight_recorder.read(path)
            except UsageError as error:
                print(f"resilio: passed over: {error}", file=sys.stderr)


def _is_dump(path: Path) -> bool:
    return path.is_file() and flight_recorder.is_dump(path)


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


def _of_folder(folder: Path, required: bool) -> Iterator[LogStream]:
    paths = sorted(path for pattern in _LOGS for path in folder.rglob(pattern) if path.is_file())
    if not paths and required:
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


def _show(
    cause: LikelyCause | None, hang: HangBlame | None, origin: CascadeVerdict | None, streams: Sequence[LogStream],
    as_json: bool,
) -> None:  # fmt: skip
    if as_json:
        print(json.dumps({"v": 1, **_cause_fields(cause, streams), **_hang_fields(hang), **_origin_fields(origin)}))
        return
    for line in [*_hang_lines(hang), *_cause_lines(cause, streams), *_origin_lines(origin)]:
        for piece in terminal.wrapped(line, terminal.columns(WIDTH)):
            terminal.show(piece)


def _origin_fields(origin: CascadeVerdict | None) -> dict[str, object]:
    if origin is None:
        return {}
    return {"origin": {name: getattr(origin, name) for name in ("node", "rank", "primary", "confidence", "evidence")}}


def _origin_lines(origin: CascadeVerdict | None) -> Iterator[str]:
    """Yield which rank or node failed first, and took the others with it."""
    if origin is not None:
        sure = f"{origin.confidence:.0%} sure" if origin.primary else "no primary cause"
        yield f"first to fail ({sure}): {printable(origin.evidence, 600)}"


def _hang_fields(hang: HangBlame | None) -> dict[str, object]:
    if hang is None:
        return {}
    fields: dict[str, object] = {"kind": hang.kind.value, "ranks": hang.ranks, "waiting": hang.waiting}
    call = hang.call
    return {"hang": {**fields, "call": None if call is None else msgspec.to_builtins(call), "says": hang.evidence}}


def _hang_lines(hang: HangBlame | None) -> Iterator[str]:
    if hang is None:
        return
    yield f"{'hang' if hang.kind is not HangKind.NONE else 'no hang'}: {printable(hang.evidence, 600)}"
    if hang.waiting:
        yield f"  {names_of(hang.waiting)} {'waits' if len(hang.waiting) == 1 else 'wait'} in a call"
    yield f"to do: {_HANG_TODO[hang.kind]}"


def _cause_fields(cause: LikelyCause | None, streams: Sequence[LogStream]) -> dict[str, object]:
    if cause is None:
        return {}
    root = cause.root
    return {
        "label": cause.label.value, "confidence": cause.confidence, "says": cause.evidence,
        "where": "" if root is None else streams[root.stream].place(root.index),
        "line": "" if root is None else printable(root.statement, 400), "overcome": cause.overcome,
        "todo": shipped().todo[cause.label], "others": cause.others,
    }  # fmt: skip


def _cause_lines(cause: LikelyCause | None, streams: Sequence[LogStream]) -> Iterator[str]:
    if cause is None:
        return
    sure = f"{cause.confidence:.0%} sure" if cause.label is not CauseClass.UNKNOWN else "the lines do not decide"
    yield f"{cause.label.value}: {cause.evidence} ({sure})"
    if cause.root is not None:
        place = streams[cause.root.stream].place(cause.root.index)
        yield f"  {printable(place, 200)}: {printable(cause.root.statement, 400)}"
    if cause.overcome:
        yield "  Progress followed that line, so it may not be why the work ended."
    for says, count in list(cause.others.items())[:3]:
        yield f"  beside it, {count} {'line' if count == 1 else 'lines'}: {says}"
    lines = sum(len(stream.lines) for stream in streams)
    yield f"  {lines} lines of {len(streams)} {'log' if len(streams) == 1 else 'logs'} were read"
    yield f"to do: {shipped().todo[cause.label]}"
