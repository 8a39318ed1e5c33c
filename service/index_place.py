"""Whether the index that a server opened still lies where it was opened.

Whoever puts a rebuilt index into the place of one that is served leaves the server on the old
files: it answers some searches from those, and refuses the others, and writes. It does not open
the other one by itself, since what surrounds an index belongs to it (the model, the dimensions,
earlier answers, the state folder), and would be cold: it says so, and a restart warms the new one
before traffic comes back. Looked at by a thread: a folder may lie on a device that hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from stoker.service.rounds import Rounds, is_fault

log = structlog.get_logger(__name__)

REPLACED: Final = "index-replaced"
_EVERY_S: Final = 1.0  # One look is one call of the system; balancers ask about as often.


class IndexPlace:
    """Looks again and again, and says at once when that changes. Safe from any thread."""

    def __init__(self, in_place: Callable[[], bool]) -> None:
        """Set up; nothing runs before `start`.

        Args:
            in_place: One look; may block. What it raises leaves all as the last look found it.
        """
        self._in_place = in_place
        self._replaced = False
        self._rounds = Rounds(
            self.look, name="index place", every_s=_EVERY_S, failed=self._not_looked
        )

    @property
    def waits_for(self) -> tuple[str, ...]:
        """What `/readyz` waits for, by the last look: nothing, or that the index is back."""
        return (REPLACED,) if self._replaced else ()

    def start(self) -> None:
        """Begin."""
        self._rounds.start()

    def stop(self, timeout_s: float) -> bool:
        """Look no more; tells whether the last look ended in time."""
        return self._rounds.stop(timeout_s)

    def look(self) -> None:
        """Look once."""
        replaced = not self._in_place()
        if replaced and not self._replaced:
            log.error(
                "service.index_replaced",
                reason="the index that was opened no longer lies at its path",
                action="restart this server to serve what lies there now, or move it back",
            )
        elif self._replaced and not replaced:
            log.info("service.index_back")
        self._replaced = replaced

    @staticmethod
    def _not_looked(error: Exception, again: bool) -> None:
        if not again:
            log.error("service.index_not_looked", reason=str(error), exc_info=is_fault(error))
