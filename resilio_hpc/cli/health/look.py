"""``resilio health list | explain | why``: the table of checks, and the state of a node."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

import msgspec

from resilio_hpc.cli.health import run
from resilio_hpc.core.errors import CommandError, SlurmError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.prolog_epilog.base import table as tables
from resilio_hpc.prolog_epilog.base.check import REASON_PREFIX, Check, NodeVerdict
from resilio_hpc.prolog_epilog.run.cached_verdict import NoVerdict, VerdictCache
from resilio_hpc.slurm.client import this_node
from resilio_hpc.slurm.client.runner import run_here
from resilio_hpc.slurm.client.slurm_errors import refused
from resilio_hpc.slurm.drain.drain import slurms_own
from resilio_hpc.slurm.drain.reason import BY_HAND, is_disowned, read_reason
from resilio_hpc.slurm.node_faults.from_slurm import DRAINED_FOR_FAULTS

_TTL_S = 900.0
_SLURM_S = 10.0


def list_(options: argparse.Namespace) -> int:
    """Print all checks."""
    checks = list(tables.load(options.site).checks.values())
    if options.json:
        print(json.dumps([msgspec.to_builtins(check) for check in checks], indent=1))
        return 0
    for check in checks:
        when = ",".join(check.contexts) if check.enabled else "off"
        print(f"{check.id:<26}{check.on_fail:<7}{when:<22}{check.summary}")
    return 0


def explain(options: argparse.Namespace) -> int:
    """Print one check: what it reads, its limits, and the action of a finding."""
    check = tables.load(options.site).check(options.check)
    print(json.dumps(msgspec.to_builtins(check), indent=1) if options.json else _explained(check))
    return 0


def _explained(check: Check) -> str:
    rows = {
        "a pass means": check.summary,
        "runs": ", ".join(check.contexts) + f" (every {check.every_s:g} s)" if check.enabled else "never: switched off",
        "within": f"{check.budget_s:g} s; without an answer by then: {check.on_timeout}",
        "when it fails": f"{check.on_fail} ({check.severity})",
        "a failure means": check.reason,
        "Slurm's reason": f"{REASON_PREFIX}{check.id}: …",
        "reads": check.source,
        "where this is from": check.origin,
    }
    lines = [f"  {name:<20}{text}" for name, text in rows.items()]
    limits = [f"  limits.{name} = {json.dumps(value)}" for name, value in check.limits.items()]
    change = f"Change it in {tables.SITE}, under [{check.id}]." if limits else ""
    return "\n".join([check.id, *lines, *limits, *([change] if change else [])])


def why(options: argparse.Namespace) -> int:
    """Print what Slurm says of the node, and, on this node, the cached verdict."""
    here = this_node.name_or_host()
    node = options.node or here
    if node.startswith("-") or not node.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise UsageError(f"{node!r} is not the name of a node")
    state, reason, trouble = _asked(node)
    verdict, none = _cached(options) if node == here else (None, f"its verdict is kept there: run this on {node}")
    ours = read_reason(reason) is not None
    if options.json:
        said = None if verdict is None else json.loads(run.as_json(verdict))
        whole = {"node": node, "state": state, "reason": reason, "ours": ours, "slurm": trouble, "verdict": said}
        print(json.dumps({**whole, "no_verdict": none}, indent=1))
        return 0
    why_drained = f", reason: {printable(reason, 600)}" if reason else ""
    print(f"{node}: {f'Slurm says {state}' if state else trouble}{why_drained}")
    for line in _whose(node, reason, tables.load(options.site).checks):
        print(f"  {line}")
    print(run.text_of(verdict) if verdict else f"  {none}")
    return 0


def _whose(node: str, reason: str, checks: Mapping[str, Check]) -> list[str]:
    """Return the owner of a reason, and who ends the drain. Pure."""
    ours = read_reason(reason)
    row = slurms_own(reason)
    if ours is not None:
        return [f"ours: {_what(one.check, node, checks)}" for one in ours]
    if not reason:
        return []
    if is_disowned(reason):
        return [f"ours no more: look at the node, then scontrol update NodeName={node} State=RESUME"]
    if row is not None and row.replaceable:
        return ["Slurm's own: it ends when the node answers again"]
    if row is not None and row.offer:
        return [f"Slurm's own: when those processes have ended, resilio undrain --kill-task-failed {node}"]
    if row is not None:
        return [f"Slurm's own: when its cause is gone, scontrol update NodeName={node} State=RESUME"]
    return ["not ours: its author resumes the node"]


def _what(check: str, node: str, checks: Mapping[str, Check]) -> str:
    if check in checks:
        return f"{checks[check].reason} (resilio health explain {check})"
    if check == DRAINED_FOR_FAULTS:
        return f"faults that are remembered (resilio nodes list --system {node})"
    return f"{'by hand' if check == BY_HAND else check} (resilio undrain {node} ends it)"


def _asked(node: str) -> tuple[str, str, str]:
    """Return (state, reason, "" or why Slurm could not be asked)."""
    try:
        text = run_here(["sinfo", "-ah", "-N", "-n", node, "-O", "StateComplete:|,Reason:|"], _SLURM_S).stdout
    except CommandError as error:
        trouble: SlurmError = refused(error)
        return "", "", f"Slurm cannot be asked: {trouble}"
    state, _, rest = (text.splitlines() or [""])[0].partition("|")
    reason = rest.rstrip("|").strip()
    return state.upper(), "" if reason in ("none", "None") else reason, "" if state else f"Slurm knows no node {node}"


def _cached(options: argparse.Namespace) -> tuple[NodeVerdict | None, str]:
    health_run = run.health_run_of(options)
    try:
        return VerdictCache(options.directory).read(health_run.now_s(), _TTL_S, health_run.boot()), ""
    except NoVerdict as error:
        return None, str(error)
