"""Bound the bytes of request bodies that a server holds at once.

A body is checked, parsed and waits for a thread before its work is done; each alone is bounded by
`service.body_bytes_max`, and many together would still be more than the memory there is. So bodies
of one kind of request share a budget. A request whose body does not fit is refused at once, before
anything of it was done, and the others go on: what fills the budget always moves.

Bytes count as they arrive: a slow client holds what it has sent, not what it has announced. What
is announced and cannot fit now is refused before it is sent.
"""

from __future__ import annotations

import structlog

from stoker.service.problems import BodiesFull

log = structlog.get_logger(__name__)


class BodyBudget:
    """The bytes that bodies of one kind of request may take together.

    Invariant: 0 <= ``held_bytes`` <= ``bytes_max``. Used from one event loop.
    """

    def __init__(self, name: str, *, bytes_max: int) -> None:
        self.name = name
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._refusing = False

    def hold(self, announced_bytes: int) -> BodyHold:
        """Begin to take a body in; give it back by `BodyHold.release`.

        Args:
            announced_bytes: As its Content-Length; 0 where it does not say.

        Raises:
            BodiesFull: so much does not fit now.
        """
        self._check(announced_bytes)
        return BodyHold(self)

    def _check(self, more_bytes: int) -> None:
        if self.held_bytes + more_bytes <= self.bytes_max:
            return
        if not self._refusing:  # once until there is room again: a line per refusal is a flood
            self._refusing = True
            log.warning(
                "service.bodies_refused",
                lane=self.name,
                held_bytes=self.held_bytes,
                bytes_max=self.bytes_max,
            )
        raise BodiesFull(
            f"bodies of {self.held_bytes} bytes are being worked on, {more_bytes} more do not fit: "
            f"the limit is {self.bytes_max} bytes together (service.bodies_bytes_max)",
            where="body",
        )

    def _take(self, count: int) -> None:
        self._check(count)
        self.held_bytes += count

    def _give(self, count: int) -> None:
        self.held_bytes -= count
        if self.held_bytes <= self.bytes_max // 2:
            self._refusing = False


class BodyHold:
    """The bytes of one body."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count bytes that have arrived. Raises BodiesFull where they do not fit."""
        self._budget._take(count)
        self._bytes += count

    def release(self) -> None:
        """Give all of it back; a second call does nothing."""
        count, self._bytes = self._bytes, 0
        self._budget._give(count)
