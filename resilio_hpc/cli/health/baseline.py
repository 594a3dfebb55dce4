"""``resilio health baseline``: learn, show, and compare with other nodes what is normal on a node."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilio_hpc.cli.health.run import change_memory, health_run_of
from resilio_hpc.core.errors import HealthError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.prolog_epilog.base.check import Check, Result
from resilio_hpc.prolog_epilog.run import baseline as baselines
from resilio_hpc.prolog_epilog.run.baseline import Baseline, Values
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from resilio_hpc.prolog_epilog.run.health_run import HealthRun
from resilio_hpc.prolog_epilog.run.runner import RunMemory
from resilio_hpc.slurm.client.hostlist import compress


def baseline(options: argparse.Namespace) -> int:
    """Run the command. Exit code 0; 1 where something could not be read, and so was not learned."""
    if options.compare is not None:
        return _compare(options.compare, options.json)
    health_run = health_run_of(options)
    directory = health_run.baseline_directory
    assert directory is not None  # the shipped table has it
    cache = VerdictCache(options.directory)
    if options.forget:
        return _forget(health_run, cache, directory)
    checks = _chosen(options.checks, health_run)
    before = baselines.read(directory, health_run.name)
    results, learned = health_run.learn(checks)
    kept = {} if before is None else {name: values for name, values in before.checks.items() if name not in learned}
    now = Baseline(node=health_run.name, unix_s=health_run.unix_time(), checks={**kept, **learned})
    path = None
    if not options.dry_run:
        path = baselines.write(directory, now)
        change_memory(health_run, cache, lambda memory: _begin(memory, now.checks, list(learned), health_run.now_s()))
    missing = [one for one in results if one.status in ("unknown", "timeout")]
    print(_as_json(now, missing) if options.json else _as_text(now, before, checks, missing, path))
    return 1 if missing else 0


def _chosen(names: Sequence[str], health_run: HealthRun) -> list[Check]:
    """Return the checks of these names. Raises UsageError for a check that compares nothing."""
    compare = [name for name, probe in health_run.probes.items() if probe.normal is not None]
    for name in names:
        if health_run.table.check(name).id not in compare:
            raise UsageError(f"{name} compares with no baseline: those that do are {', '.join(compare)}")
    chosen = [health_run.table.check(name) for name in names or compare]
    return [check for check in chosen if check.enabled]


def _begin(memory: RunMemory, values: Values, checks: Sequence[str], now_s: float) -> None:
    for check in checks:
        memory.clear(check, now_s)
    memory.normal = values


def _forget(health_run: HealthRun, cache: VerdictCache, directory: Path) -> int:
    def forget(memory: RunMemory) -> None:
        memory.normal = {}

    path = directory / f"{health_run.name}.json"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise HealthError(f"cannot remove {path}: {error.strerror}") from error
    change_memory(health_run, cache, forget)
    print(f"{health_run.name}: no baseline any more")
    return 0


def _as_text(
    now: Baseline, before: Baseline | None, checks: Sequence[Check], missing: Sequence[Result], path: Path | None
) -> str:
    lines = []
    for check in checks:
        values = now.checks.get(check.id)
        said = "nothing of the kind is here" if not values else baselines.summary(values)
        lines.append(f"{check.id:<16}{printable(said, 300)}")
    lines += [f"not learned: {one.check}: {printable(one.note, 200)}" for one in missing]
    if before is not None:
        changed = baselines.differences(before.checks, now.checks)
        lines += [f"changes: {one}" for one in changed] or ["the same as before"]
    lines.append(f"{now.node}: normal from now on, in {path}" if path else f"{now.node}: nothing was written")
    return "\n".join(lines)


def _as_json(now: Baseline, missing: Sequence[Result]) -> str:
    return json.dumps({**msgspec.to_builtins(now), "not_learned": [one.check for one in missing]}, indent=1)


def _compare(directory: Path, as_json: bool) -> int:
    groups = baselines.alike(baselines.read_all(directory))
    if as_json:
        print(json.dumps([msgspec.to_builtins(group) for group in groups], indent=1))
        return 0
    if not groups:
        print(f"no baseline is in {directory}")
    for group in groups:
        names = compress(group.nodes)
        if not group.nearest:
            print(f"{names}: {len(group.nodes)} alike")
            continue
        print(f"{names}: {len(group.nodes)}, unlike {compress(group.nearest)} in {len(group.unlike)} values")
        for one in group.unlike[:8]:
            print(f"  {one.check} {one.device}: {baselines.spelled(one.now)}, there {baselines.spelled(one.before)}")
    return 0
