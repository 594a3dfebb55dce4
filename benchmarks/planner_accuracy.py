"""How well the planner predicts published measurements, beside two peers: cold, calibrated, and choosing among layouts.

usage: planner_accuracy.py DATA [--seeds 20] [--rows 8] [--fit efficiency.toml] [--no-calibration]

DATA holds score.py, FILE.csv with one measured layout per row, and pred_*.csv of the peers. Cold: a file is predicted
with parameters fitted to all other sources. Kept aside: rows of seen_later.csv take part in no fit, and are scored
source by source with the shipped parameters. Calibrated: cold, then fitted to a few rows, which are not scored.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from planner_fit import fit_files
from resilio_hpc.autoparallel.base.efficiency import NAMES, Efficiency, shipped
from resilio_hpc.autoparallel.measure.calibrate import calibrate
from resilio_hpc.autoparallel.measure.predict import predict, predict_rows, read
from resilio_hpc.autoparallel.measure.rows import Case

Rows = list[dict[str, str]]
PEERS = {
    "calculon": ("pred_calculon.csv", "calculon_s"),
    "llm-analysis": ("pred_llm_analysis.csv", "llm_analysis_s_fe0.5"),
}


@dataclass(frozen=True)
class File:
    """One table: its rows, and the measured rows that can be predicted (indices into rows)."""

    name: str
    rows: Rows
    sources: frozenset[str]
    cases: list[Case]
    index: list[int]
    times: NDArray[np.float64]
    whole: NDArray[np.bool_]
    """Which of the cases state their whole layout."""
    timed: bool
    """False where the source itself says that its times are no measure of anything."""


ASIDE = "seen_later.csv"


def scorer(data: Path) -> ModuleType:
    """Return the module score.py that lies beside the tables."""
    spec = importlib.util.spec_from_file_location("score", data / "score.py")
    assert spec is not None and spec.loader is not None
    score = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(score)
    return score


def load(data: Path, score: ModuleType) -> list[File]:
    """Read all tables but the one that is kept aside."""
    files = []
    for path in sorted(data.glob("*.csv")):
        if path.name == ASIDE:
            continue
        with path.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        if not rows or not {"iter_time_s", "tp", "status"} <= rows[0].keys():
            continue
        understood = read(rows)
        pairs = [
            (case, number)
            for case, number in zip(understood.cases, understood.index, strict=True)
            if rows[number]["status"] == "ok"
            and score.number(rows[number]["iter_time_s"])
            and "INCONSISTENT" not in rows[number]["notes"]
        ]
        times = np.array([float(rows[number]["iter_time_s"]) for _, number in pairs])
        untimed = sum("not time" in row["notes"] for row in rows) > len(rows) / 2
        sources = frozenset(re.split(r"[,:(]", row["source"])[0].strip() for row in rows)
        whole = np.array([score.complete(rows[number]) for _, number in pairs], dtype=bool)
        cases, index = [c for c, _ in pairs], [i for _, i in pairs]
        files.append(File(path.name, rows, sources, cases, index, times, whole, not untimed))
    return files


def fitted(files: list[File]) -> Efficiency:
    """Parameters fitted to the rows of these files that state their whole layout, where times mean something."""
    return fit_files(
        [([file.cases[i] for i in np.flatnonzero(file.whole)], file.times[file.whole]) for file in files if file.timed]
    )


def others(files: list[File], left_out: File) -> list[File]:
    """Files that share no source with this one."""
    return [file for file in files if not file.sources & left_out.sources]


def written(rows: Rows, folder: Path, name: str) -> str:
    path = folder / name
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def line(label: str, scored: dict[str, float], keys: tuple[str, ...]) -> None:
    cells = [f"{key} {scored[key]:8.2f}" if key in scored else f"{key}        -" for key in keys]
    print(f"  {label:<42}" + "  ".join(cells), flush=True)


def peer_rows(file: File, data: Path, peer: str) -> Rows:
    """Return the file's rows with the times that a peer predicts for them."""
    name, column = PEERS[peer]
    with (data / name).open(newline="") as stream:
        known = {row["row_id"]: row[column] for row in csv.DictReader(stream)}
    return [{**row, "pred_iter_time_s": known.get(row["id"], "")} for row in file.rows]


COLD = ("complete_rows", "complete_mean%", "strict_mean%", "mean%", "p90%", "bias%", "scaled_mean%")
CHOICE = ("groups", "regret_mean%", "within5%", "spearman")
MEMORY = ("memory_mean%", "balanced_accuracy%")


def cold(files: list[File], data: Path, out: Path, score: ModuleType, keys: tuple[str, ...]) -> dict[str, Efficiency]:
    """Print every file beside the peers, and return the parameters that each file was predicted with."""
    used, means, inside, choices = {}, [], [], []
    for file in files:
        known = fitted(others(files, file))
        used[file.name] = known
        rows = predict_rows(file.rows, known)
        scored = score.score(written(rows, out, file.name))
        line(file.name, scored, keys)
        for peer in PEERS:
            line(f"    {peer}", score.score(written(peer_rows(file, data, peer), out, f"{peer}-{file.name}")), keys)
        if "groups" in scored:
            choices.append(scored)
        if file.timed and scored.get("complete_rows"):
            means.append(scored["complete_mean%"])
            bands = [
                float(rows[n]["pred_iter_low_s"]) <= float(rows[n]["iter_time_s"]) <= float(rows[n]["pred_iter_high_s"])
                for n in file.index
            ]
            inside.append(statistics.fmean(bands))
    print(f"  mean over the {len(means)} timed files: {statistics.fmean(means):.2f} %")
    groups = sum(one["groups"] for one in choices)
    mean = {key: sum(one[key] * one["groups"] for one in choices) / groups for key in CHOICE[1:]}
    line(f"choice over {groups} sweeps", mean, CHOICE[1:])
    print(f"  band covers: {statistics.fmean(inside) * 100:.1f} % ({', '.join(f'{x * 100:.0f}' for x in inside)})")
    return used


def calibration(
    files: list[File], used: dict[str, Efficiency], seeds: int, rows: int, out: Path, score: ModuleType
) -> None:
    """Print, per file, after calibration with a few rows and without these: error, choice and band, over seeds."""
    for file in files:
        found: list[dict[str, float]] = []
        if len(file.cases) < 2 * rows or not file.timed:
            continue
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(file.cases))
            seen, rest = order[:rows], order[rows:]
            known, nearby = calibrate(used[file.name], [file.cases[i] for i in seen], file.times[seen])
            told = predict([file.cases[i] for i in rest], known, calibrated=True, nearby=nearby)
            ratio = told.cost.iteration / file.times[rest]
            predicted = [
                {**file.rows[file.index[i]], "pred_iter_time_s": repr(float(time))}
                for i, time in zip(rest, told.cost.iteration, strict=True)
            ]
            scored = score.score(written(predicted, out, f"calibrated-{file.name}"))
            inside = np.abs(np.log(ratio)) <= told.half_width
            found.append({**scored, "band%": float(inside.mean()) * 100})
        keys = ("mean%", "p90%", "regret_mean%", "within5%", "spearman", "band%")
        medians = {key: statistics.median(one[key] for one in found) for key in keys if key in found[0]}
        line(file.name, medians, keys)


def aside(data: Path, out: Path, score: ModuleType) -> None:
    """Print, for each source of the rows kept aside, errors of time and memory with the shipped parameters."""
    path = data / ASIDE
    if not path.exists():
        return
    with path.open(newline="") as stream:
        rows = predict_rows(list(csv.DictReader(stream)), shipped())
    means = []
    for source in dict.fromkeys(row["id"].rpartition("-")[0] for row in rows):
        own = [row for row in rows if row["id"].rpartition("-")[0] == source]
        scored = score.score(written(own, out, f"{source}.csv"))
        line(source, scored, ("rows", "predicted", "mean%", "bias%", "p90%", "memory_mean%"))
        if "mean%" in scored:
            means.append(scored["mean%"])
    print(f"  mean over {len(means)} sources: {statistics.fmean(means):.2f} %, the worst {max(means):.2f} %")


def toml_with(text: str, found: Efficiency) -> str:
    """efficiency.toml with the fitted values."""
    for name in NAMES:
        text = re.sub(rf"(\[{name}\]\nvalue = )\S+", rf"\g<1>{getattr(found, name):.4g}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--fit", type=Path, help="fit to all files and write the values into this efficiency.toml")
    parser.add_argument("--out", type=Path, default=Path("planner-accuracy-out"))
    parser.add_argument("--no-calibration", action="store_true")
    asked = parser.parse_args()
    score = scorer(asked.data)
    asked.out.mkdir(exist_ok=True)
    files = load(asked.data, score)
    if asked.fit:
        found = fitted(files)
        asked.fit.write_text(toml_with(asked.fit.read_text(), found))
        return 0
    print("cold (no row of the source was fitted), with the choice among layouts and memory")
    used = cold(files, asked.data, asked.out, score, COLD + CHOICE + MEMORY)
    if not asked.no_calibration:
        print(f"calibrated with {asked.rows} rows, median of {asked.seeds} seeds")
        calibration(files, used, asked.seeds, asked.rows, asked.out, score)
    print("kept aside (in no fit), shipped parameters")
    aside(asked.data, asked.out, score)
    print("shipped parameters (fitted to these files)")
    for file in files:
        line(file.name, score.score(written(predict_rows(file.rows, shipped()), asked.out, file.name)), COLD + CHOICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
