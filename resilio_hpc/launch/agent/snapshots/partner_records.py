"""The agent's side of its partner's boundary records, which its replicator takes (``replication.boundary_records``)."""

from __future__ import annotations

from collections.abc import Callable

from resilio_hpc.ckpt.replication.messages import Follow, MakeLost, Request
from resilio_hpc.launch.protocol.message_parts import Partner


class RecordsFollowed:
    """Whose records are taken, and the order to make copies of them."""

    def __init__(self, say: Callable[[Request], None]) -> None:
        """``say``: sends a request to the replicator, if it runs."""
        self._say = say
        self._partner: Partner | None = None
        self._world_size = 0
        self._number = 0
        self._then: Callable[[], None] | None = None

    def follow(self, partner: Partner, world_size: int) -> None:
        """Take the records of the partner's ranks from now on."""
        self._partner, self._world_size = partner, world_size
        self.say_again()

    def say_again(self) -> None:
        """Tell a replicator that may be new."""
        if (partner := self._partner) is not None:
            ranks = range(partner.first_rank, partner.first_rank + partner.ranks)
            self._say(Follow(partner.endpoint, list(ranks)))

    def ask(self, step: int, then: Callable[[], None]) -> bool:
        """Have copies of a step made; ``then`` is called with the answer. False: there is no partner."""
        if self._partner is None:
            return False
        self._number += 1
        self._then = then
        self._say(MakeLost(self._number, step, self._world_size))
        return True

    def answered(self, number: int) -> None:
        """Take note of an answer."""
        if number == self._number and self._then is not None:
            then, self._then = self._then, None
            then()
