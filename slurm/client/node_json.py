"""Nodes from JSON: ``sinfo --json`` of 22.05, ``scontrol show nodes --json`` from 23.02 on. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from resilio_hpc.slurm.client.answers import AnswerDecoder
from resilio_hpc.slurm.client.gres import parse_gres
from resilio_hpc.slurm.client.json_values import moment, text, texts, whole
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.states import node_state


class NodeRecord(msgspec.Struct):
    """The fields that are used, of whatever type."""

    reason: Any = None
    name: Any = None
    state: Any = None
    state_flags: Any = None
    partitions: Any = None
    cpus: Any = None
    alloc_cpus: Any = None
    real_memory: Any = None
    alloc_memory: Any = None
    gres: Any = None
    gres_used: Any = None
    features: Any = None
    active_features: Any = None
    weight: Any = None
    reason_set_by_user: Any = None
    reason_changed_at: Any = None
    comment: Any = None
    extra: Any = None
    address: Any = None
    version: Any = None
    slurmd_version: Any = None


_DECODER = AnswerDecoder("nodes", NodeRecord)


def parse_nodes(output: str) -> tuple[Node, ...]:
    """Return all nodes of an answer, each once. Raises Garbled and Unanswered; an odd field counts as not told."""
    found = {node.name: node for node in map(_node, reversed(_DECODER.records(output))) if node.name}
    return tuple(reversed(found.values()))


def _node(record: NodeRecord) -> Node:
    reason = text(record.reason)
    return Node(
        name=text(record.name),
        state=node_state((*texts(record.state), *texts(record.state_flags))),
        partitions=tuple(sorted(texts(record.partitions))),
        cpus=whole(record.cpus),
        cpus_allocated=whole(record.alloc_cpus),
        memory_mb=whole(record.real_memory),
        memory_allocated_mb=whole(record.alloc_memory),
        gres=parse_gres(text(record.gres)),
        gres_used=parse_gres(text(record.gres_used)),
        features=texts(record.features),
        active_features=texts(record.active_features),
        weight=whole(record.weight),
        reason=reason,
        reason_by=text(record.reason_set_by_user) if reason else "",
        reason_time=moment(record.reason_changed_at) if reason else None,
        comment=text(record.comment),
        extra=text(record.extra),
        address=text(record.address),
        version=text(record.version) or text(record.slurmd_version),
    )
