"""Which of a node's GPUs are evicted, and how many ranks the others allow (RES-10). Pure.

Evidence names a GPU by its UUID, its PCI address or Slurm's index; a job names it by an entry of CUDA_VISIBLE_DEVICES
or AMD's variables: a number, a UUID or the beginning of one, a MIG instance. ``Identity`` maps one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

Source = Literal["verdict", "checks", "ranks"]
"""Root's verdict on the node; checks that ran as this user; failures of ranks on the device."""

REPEATED = "rank-failures"
STRIKES = 2
"""So many rounds in which one rank of the node alone failed with an error of its device, and the device goes."""


class DeviceEvidence(msgspec.Struct, frozen=True):
    """Evidence against one GPU. ``device``: UUID or PCI address, or ""; ``index``: Slurm's, -1 where not known."""

    source: Source
    check: str
    text: str
    device: str = ""
    index: int = -1


class Identity(msgspec.Struct, frozen=True):
    """One GPU that this job can see. ``ordinal``: how CUDA numbers it by PCI address; ``index``: Slurm's number."""

    ordinal: int
    index: int = -1
    uuid: str = ""
    bus: str = ""
    instances: tuple[str, ...] = ()  # of MIG


class Evicted(msgspec.Struct, frozen=True):
    """A device that is evicted. ``entry``: as the job names it; ``device``: for people and for administrators."""

    entry: str
    device: str
    index: int
    check: str
    text: str
    source: Source


class Rules(Struct, frozen=True):
    """Rules of eviction.

    ``least``: with fewer devices the node takes no part; ``unit``: its ranks come in multiples of it.
    """

    least: int = 1
    unit: int = 1


def identities_of_slurm(entries: Sequence[str], gpus: str) -> tuple[Identity, ...]:
    """Return identities without the driver.

    SLURM_STEP_GPUS or SLURM_JOB_GPUS names the same GPUs, in the same order.
    """
    indices = [part.strip() for part in gpus.split(",")]
    if len(indices) != len(entries) or not all(part.isdecimal() for part in (*indices, *entries)):
        return ()
    return tuple(Identity(int(entry), int(index)) for entry, index in zip(entries, indices, strict=True))


def positions(evidence: DeviceEvidence, entries: Sequence[str], identities: Collection[Identity]) -> tuple[int, ...]:
    """Return the entries on the GPU that the evidence names.

    Several under MIG; none where the GPU is not this job's.
    """
    return tuple(at for at, entry in enumerate(entries) if _names(entry, evidence, identities))


def _names(entry: str, evidence: DeviceEvidence, identities: Collection[Identity]) -> bool:
    found = next((one for one in identities if _is(entry, one)), None)
    uuid = _uuid(entry)
    if found is None:
        return bool(uuid) and evidence.device.startswith(uuid)
    if evidence.device and evidence.device in (found.uuid, found.bus):
        return True
    known = found.uuid if evidence.device.startswith("GPU-") else found.bus
    return not (evidence.device and known) and evidence.index >= 0 and evidence.index == found.index


def _is(entry: str, identity: Identity) -> bool:
    if entry.isdecimal():
        return int(entry) == identity.ordinal
    uuid = _uuid(entry)
    return entry in identity.instances or (bool(uuid) and identity.uuid.startswith(uuid))


def _uuid(entry: str) -> str:
    """Return the GPU's UUID or its beginning; "" where the entry holds none (a MIG instance with its own UUID)."""
    if entry.startswith("MIG-GPU-"):
        return entry.removeprefix("MIG-").split("/")[0]
    return entry if entry.startswith("GPU-") else ""


def newly_evicted(
    found: Iterable[DeviceEvidence],
    entries: Sequence[str],
    identities: Collection[Identity],
    before: Collection[Evicted],
) -> tuple[Evicted, ...]:
    """Return the devices in use that the evidence evicts.

    Root's verdict is named before a check's, that before ranks' errors.
    """
    order: tuple[Source, ...] = ("verdict", "checks", "ranks")
    gone = {evicted.entry for evicted in before}
    new = []
    for evidence in sorted(found, key=lambda one: order.index(one.source)):
        for at in positions(evidence, entries, identities):
            if entries[at] not in gone:
                gone.add(entries[at])
                one = Evicted(entries[at], evidence.device, evidence.index, evidence.check, evidence.text,
                              evidence.source)  # fmt: skip
                new.append(one)
    return tuple(new)


def slots_left(slots: int, entries: Sequence[str], evicted: Collection[Evicted], rules: Rules) -> int:
    """Return how many of ``slots`` ranks the node's devices allow; 0: it takes no part.

    With fewer ranks than devices, ranks move to the good ones. Ranks that share an evicted device go with it.
    """
    if not evicted or not entries:
        return slots
    left = len(entries) - len({one.entry for one in evicted} & set(entries))
    if left < max(1, rules.least):
        return 0
    return min(slots, left * math.ceil(slots / len(entries))) // rules.unit * rules.unit


def visible_left(entries: Sequence[str], evicted: Collection[Evicted]) -> str:
    """Return the variable's value without the evicted devices."""
    gone = {one.entry for one in evicted}
    return ",".join(entry for entry in entries if entry not in gone)


def of_strikes(strikes: Strikes, entry: str, identities: Collection[Identity]) -> Evicted:
    """Return a device whose ranks failed too often."""
    who = next((one for one in identities if _is(entry, one)), Identity(-1))
    text = f"ranks on it failed in {len(strikes.counted[entry])} rounds: {strikes.texts[entry]}"
    return Evicted(entry, who.uuid or who.bus, who.index, REPEATED, text, "ranks")


def words(node: str, new: Sequence[Evicted], left: int, slots: int, rules: Rules, acts: bool) -> str:
    """Return one line for the user."""
    which = ", ".join(name(one) for one in new)
    verb = "are" if len(new) > 1 else "is"
    why = "; ".join(dict.fromkeys(f"{one.check}: {one.text.removeprefix(name(one) + ': ')}" for one in new))
    if left:
        then = f"{left} of {slots} ranks" if left < slots else f"all {slots} ranks"
        then += " go on with the others" if acts else " would go on with the others"
        if rules.unit > 1 and left < slots:
            then += f" (--device-unit {rules.unit})"
    else:
        limits = f"--min-devices {rules.least}" + (f", --device-unit {rules.unit}" if rules.unit > 1 else "")
        takes = "too few are left ({}): the node takes no part" if acts else "too few would be left ({})"
        then = takes.format(limits)
    return f"{node}: {which} {verb if acts else 'would be'} out of use ({why}); {then}"


def name(one: Evicted) -> str:
    """Return ``GPU 3 (GPU-aaaa…)``, for people."""
    who = one.device or one.entry
    if one.index >= 0:
        return f"GPU {one.index}" + (f" ({one.device})" if one.device else "")
    return f"GPU {who}" if not who.startswith(("GPU-", "MIG-")) else who


class Strikes(msgspec.Struct):
    """Counts failures of ranks that read like their device's: the rounds that count, by entry."""

    counted: dict[str, list[int]] = {}
    texts: dict[str, str] = {}

    def round_over(self, number: int, failed: dict[str, str]) -> bool:
        """Count a round in which ranks on these entries failed. Return whether anything was counted.

        Several devices at once count for none: a link or a program may have failed.
        """
        if len(failed) != 1:
            return False
        ((entry, text),) = failed.items()
        rounds = self.counted.setdefault(entry, [])
        if number in rounds:
            return False
        rounds.append(number)
        self.texts[entry] = text
        return True

    def evicts(self) -> list[str]:
        """Return entries with enough failures."""
        return [entry for entry, rounds in self.counted.items() if len(rounds) >= STRIKES]
