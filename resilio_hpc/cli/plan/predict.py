"""``resilio plan predict``: time and memory of the layouts of a table, row by row."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.autoparallel.base.efficiency import Efficiency, read, shipped
from resilio_hpc.autoparallel.measure import nearby
from resilio_hpc.autoparallel.measure.nearby import Nearby
from resilio_hpc.autoparallel.measure.predict import COLUMNS, predict_rows
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

LARGEST_BYTES = 256 * 2**20
_HELP = """columns read (others are kept; an empty cell takes the default, which pred_note names):
  model layers hidden heads kv_heads ffn mlp vocab experts topk seq global_batch micro_batch gpu gpus_per_node
  interconnect num_gpus tp pp vpp dp cp ep etp head_layers replicas sequence_parallel recompute zero schedule offload
  precision attn_kernel framework
  Needed: layers, hidden, seq, gpu, and num_gpus or dp.

columns added:
  pred_iter_time_s      seconds of one iteration; pred_iter_low_s and pred_iter_high_s hold four measurements of five
  pred_memory_gb        peak memory of one GPU, of the kind that memory_kind names (default: GB allocated by PyTorch)
  pred_fits             1 if it fits into the GPU, CUDA's and NCCL's own memory included
  pred_tflops_per_gpu   model FLOPs of the whole job over time and GPUs
  pred_note             defaults that were taken; for a row without a prediction, why

examples:
  resilio plan predict --rows layouts.csv --out predicted.csv
  resilio plan predict --rows layouts.csv --json | jq '.[].pred_iter_time_s'
  resilio plan predict --rows layouts.csv --out predicted.csv --calibration calibration.toml
  resilio plan predict --rows layouts.csv --out predicted.csv --profile cluster.h5

exit codes:
  0  every row was predicted
  1  some rows were not; pred_note says why
  2  the table or the calibration could not be read
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the help."""
    parser = Parser(
        prog="resilio plan predict",
        description="Predict iteration time and memory of given parallel layouts. No GPU is needed.",
        epilog=_HELP,
    )
    parser.add_argument("--rows", required=True, type=Path, metavar="IN.csv", help="one layout per row")
    parser.add_argument(
        "--out", type=Path, metavar="OUT.csv", help="the same rows with the predictions (default: stdout)"
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE.toml", help="of this cluster, from resilio plan calibrate"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE.h5", help="measured: resilio plan profile-comm and resilio plan profile"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    columns, rows = table(file_text(options.rows))
    known, measured = calibration_of(options.calibration)
    calibrated = options.calibration is not None
    done = predict_rows(rows, known, calibrated, measured, profile_of(options.profile))
    _write(options, [*columns, *COLUMNS], done)
    missed = sum(not row["pred_iter_time_s"] for row in done)
    print(f"{len(done) - missed} of {len(done)} rows predicted", file=sys.stderr)
    return 1 if missed else 0


def profile_of(path: Path | None) -> Profile | None:
    """Read a profile. Raises UsageError for an invalid one."""
    if path is None:
        return None
    from resilio_hpc.autoparallel.measure.profile_file import read as read_profile

    return read_profile(path)


def file_text(path: Path) -> str:
    """Return a user's file; UsageError says what is wrong with it."""
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(data) > LARGEST_BYTES:
        raise UsageError(f"{path} holds more than {LARGEST_BYTES >> 20} MiB: split it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no UTF-8 text: byte {error.start}") from None


def table(text: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and rows of a CSV; UsageError for anything but a table of layouts."""
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="", restval="")
    try:
        columns = list(reader.fieldnames or ())
        rows = [{name: str(row[name]) for name in columns} for row in reader]
    except csv.Error as error:
        raise UsageError(f"no CSV: {error} in line {reader.line_num}") from None
    if "layers" not in columns or "hidden" not in columns:
        raise UsageError(
            "no table of layouts: its first line must name the columns layers, hidden, seq, gpu, num_gpus, …"
        )
    if len(set(columns)) < len(columns):
        raise UsageError("a column is named twice in the first line")
    return [name for name in columns if name not in COLUMNS], rows


def calibration_of(path: Path | None) -> tuple[Efficiency, Nearby | None]:
    """Return the shipped parameters, or those of a calibration and its measurements. Raises UsageError."""
    if path is None:
        return shipped(), None
    text = file_text(path)
    try:
        return read(text), nearby.read(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None


def _write(options: argparse.Namespace, columns: list[str], rows: list[dict[str, str]]) -> None:
    if options.json:
        print(json.dumps(rows, indent=1))
    if options.json and not options.out:
        return
    written(options.out, columns, rows)


def written(out: Path | None, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """Write a table as CSV; without ``out`` to standard output. Raises UsageError."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if out is None:
        sys.stdout.write(buffer.getvalue())
        return
    try:
        out.write_text(buffer.getvalue())
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}") from None
