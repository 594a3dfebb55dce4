"""Gathers the evidence against this node's GPUs, in a process of its own.

Files, the kernel's log and above all NVML may hang where a GPU is broken. So each stage prints what it found on its own
line, and the reader kills this process when its time is up, and uses what was printed until then. It runs as the user
of the job: what only root may read is left out and named. ``python -m resilio_hpc.launch.gpus.device_evidence``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from resilio_hpc.core import process_title
from resilio_hpc.core.errors import HealthError, ResilioError
from resilio_hpc.launch.gpus.device_look import Said
from resilio_hpc.launch.gpus.devices import visible_devices
from resilio_hpc.launch.gpus.eviction import DeviceEvidence, Identity, identities_of_slurm
from resilio_hpc.launch.process import process_tree
from resilio_hpc.prolog_epilog.base import table as tables
from resilio_hpc.prolog_epilog.base.check import Absent, Check, Fault, Former, NodeVerdict, Thresholds, Value
from resilio_hpc.prolog_epilog.base.node import NodeView, boot_id, uptime_s
from resilio_hpc.prolog_epilog.checks import gpu_readings, kernel_log, registry, xid, xid_events
from resilio_hpc.prolog_epilog.run.baseline import Values, read
from resilio_hpc.prolog_epilog.run.cached_verdict import DIRECTORY, NoVerdict, VerdictCache
from resilio_hpc.prolog_epilog.run.health_run import node_name

DIRECTORY_VARIABLE = "RESILIO_HEALTH_DIRECTORY"
TTL_S = 900.0  # like the prolog's
XID = "gpu-xid"
NOTHING: Mapping[str, Mapping[str, Value]] = MappingProxyType({})


def of_verdict(verdict: NodeVerdict) -> tuple[DeviceEvidence, ...]:
    """Return what root's verdict says of single GPUs; nothing while a storm of drains makes it doubtful. Pure.

    Pure.
    """
    if verdict.withheld:
        return ()
    return tuple(
        DeviceEvidence("verdict", one.check, one.evidence, one.device, one.index)
        for one in verdict.findings
        if one.action in ("evict", "fail", "drain") and one.check.startswith("gpu-") and (one.index >= 0 or one.device)
    )


def of_faults(check: Check, faults: Iterable[Fault]) -> tuple[DeviceEvidence, ...]:
    """Return what a check of this process found about single GPUs. Pure."""
    return tuple(
        DeviceEvidence("checks", check.id, one.evidence, one.device, one.index)
        for one in faults
        if (one.on_fail or check.on_fail) in ("evict", "drain") and (one.index >= 0 or one.device)
    )


def from_verdict(cache: VerdictCache) -> Said:
    """Return the verdict of the node's health daemon, where one exists that may be trusted."""
    verdict = cache.read(uptime_s(), TTL_S, boot_id())
    return Said("verdict", of_verdict(verdict), note=verdict.withheld and f"not acted on: {verdict.withheld}")


def from_kernel_log(node: NodeView, check: Check, since_s: float) -> Said:
    """Return Xids since this job came to the node. Whether earlier ones were repaired is root's to know."""
    former = Former(None, uptime_s(node.root), since_s)
    faults, _ = xid.judge(kernel_log.fetch(node), Thresholds(check.limits), former)
    return Said("kernel log", of_faults(check, faults))


def from_nvml(
    node: NodeView,
    checks: Iterable[Check],
    slurm: Iterable[Identity],
    normal: Mapping[str, Mapping[str, Value]] = NOTHING,
) -> Said:
    """Return what NVML says of the GPUs that this process may see; and which they are.

    ``normal``: the node's baseline.
    """
    reading = gpu_readings.fetch(node)
    found: list[DeviceEvidence] = []
    for check in checks:
        try:
            former = Former(None, 0.0, normal=normal.get(check.id))
            faults, _ = registry.PROBES[check.id].remembers(reading, Thresholds(check.limits), former)
            found += of_faults(check, faults)
        except Absent:
            continue
    gpus = tuple(
        Identity(order, gpu.slurm_index, gpu.uuid, xid_events.address(gpu.bus_id) if gpu.bus_id else "", gpu.instances)
        for order, gpu in enumerate(reading.gpus)
    )
    return Said("NVML", tuple(found), gpus or tuple(slurm), reading.trouble)


def identities(node: NodeView, environment: Mapping[str, str]) -> Said:
    """Return which GPUs this job has, as far as Slurm and the driver's files tell."""
    entries = visible_devices(environment).entries
    numbers = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS", "")
    known = {index: (uuid, bus) for bus, (uuid, index) in kernel_log.driver_gpus(node.files).items()}
    told = identities_of_slurm(entries, numbers)
    if not told and all(entry.isdecimal() for entry in entries):
        told = tuple(Identity(int(entry), int(entry)) for entry in entries)
    whole = tuple(Identity(one.ordinal, one.index, *known.get(one.index, ("", ""))) for one in told)
    others = tuple(
        Identity(-1, index, uuid, bus) for index, (uuid, bus) in known.items() if index not in {x.index for x in told}
    )
    return Said("identities", identities=whole + others)


def device_checks(table: tables.Table) -> list[Check]:
    """Return the NVML checks that run before ranks start and concern single GPUs."""
    return [
        check for check in table.checks.values()
        if check.enabled and check.source == "gpus" and "start" in check.contexts and check.on_fail == "evict"
    ]  # fmt: skip


def gather(since_s: float, environment: Mapping[str, str], say: Callable[[Said], None]) -> None:
    """Run all stages, the fastest first."""

    def stage(name: str, look: Callable[[], Said]) -> Said:
        try:
            said = look()
        except Absent:
            said = Said(name)
        except (ResilioError, OSError, ValueError) as error:
            said = Said(name, note=str(error))
        say(said)
        return said

    directory = Path(environment.get(DIRECTORY_VARIABLE) or DIRECTORY)
    stage("verdict", lambda: _verdict_if_any(directory))
    try:
        table = tables.load()
    except ResilioError as error:
        say(Said("checks", note=str(error)))
        return
    node = NodeView(settings=table.settings)
    known = stage("identities", lambda: identities(node, environment))
    xids = table.check(XID)
    if xids.enabled:
        stage("kernel log", lambda: from_kernel_log(node, xids, since_s))
    stage("NVML", lambda: from_nvml(node, device_checks(table), known.identities, _baseline(table)))


def _baseline(table: tables.Table) -> Values:
    """Read the baseline; an untrusted one counts as none. If the read hangs, this process is killed."""
    try:
        found = read(Path(table.settings["baseline"].text("directory")), node_name(os.environ))
    except HealthError:
        return {}
    return {} if found is None else found.checks


def _verdict_if_any(directory: Path) -> Said:
    try:
        return from_verdict(VerdictCache(directory))
    except NoVerdict as error:
        return Said("verdict", note="" if not directory.exists() else str(error))


def main() -> None:
    """Print one line of JSON for each stage."""

    def say(said: Said) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
        sys.stdout.flush()

    process_title.show("device_evidence")
    process_tree.die_with_parent(os.getppid())
    gather(float(sys.argv[1]), os.environ, say)


if __name__ == "__main__":
    main()
