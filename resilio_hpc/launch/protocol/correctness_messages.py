"""Messages to the controller about whether results are right: replicas' digests, verdicts on steps."""

from __future__ import annotations

from typing import Annotated

import msgspec

from resilio_hpc.core.judgement import Judgement
from resilio_hpc.launch.protocol.message_parts import Count, Node, Struct

MOST_PARTS = 4096
Label = Annotated[str, msgspec.Meta(max_length=96)]


class EqualReplicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks of one node and one group of replicas whose digests are equal. ``replicas``: ranks of the whole group.

    ``mark``: of the digested tensors' names, types, and sizes. ``digests``: 8 bytes for each part. ``labels``: for each
    part the names of its tensors, in the first message of a round.
    """

    group: Label
    replicas: Count
    mark: Count
    digests: Annotated[bytes, msgspec.Meta(max_length=8 * MOST_PARTS)]
    ranks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 << 12)]
    labels: Annotated[tuple[Label, ...], msgspec.Meta(max_length=MOST_PARTS)] = ()


class ReplicasDigested(Struct, frozen=True):
    """Digests of a sweep that ended with ``step``. Part number ``first`` was digested first, of ``parts``."""

    node: Node
    epoch: Count
    round: Count
    step: Count
    first: Count
    parts: Count
    found: Annotated[tuple[EqualReplicas, ...], msgspec.Meta(max_length=1 << 12)]


class ResultJudged(Struct, frozen=True):
    """What the ranks found of a step's result; ``rank`` tells it for all of them."""

    node: Node
    epoch: Count
    round: Count
    rank: Count
    judgement: Judgement
