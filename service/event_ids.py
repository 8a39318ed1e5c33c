"""The ids of the events that came lately, so that one that comes again counts once.

Offsets protect against reading a record twice; ids against an event that is in the log twice,
because it was sent again: by a client or publisher that had no answer, by a spool after a broker
was away, by a person who replays an hour. The copies may lie in other partitions and come hours
apart.

Kept is a 64-bit fingerprint per id, by tenant and under a secret seed, within bytes and an age by
the log's time. Of n that are held a new id is taken for one of them with probability n / 2^64, and
its event lost: 1.8e-13 at three million. What is to be expected of that is added up.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError
from stoker.kernels._core import EventBatch, IdWindow
from stoker.prefetch.snapshot import pack, unpack

ID_BYTES_MIN: Final = 28  # of one id
_KIND: Final = "event ids 1"
_FINGERPRINTS: Final = 2.0**64


@dataclasses.dataclass(frozen=True)
class IdsKept:
    """What is kept.

    Attributes:
        count: Ids.
        bytes_used: Bytes that they take.
        span_s: How far back they reach, by the log's time.
    """

    count: int = 0
    bytes_used: int = 0
    span_s: float = 0.0


NO_IDS: Final = IdsKept()


def ids_bytes(seen: object, *, named_s: float) -> bytes:
    """Return a snapshot's ids as bytes, also where it is from before and has their names.

    Args:
        seen: See `EventIds.restore`.
        named_s: Likewise.

    Raises:
        CorruptError: it has neither.
    """
    if isinstance(seen, bytes):
        return seen
    ids = EventIds(bytes_max=64 << 20, age_s_max=1.0)
    ids.restore(seen, named_s=named_s)
    return ids.to_bytes()


class EventIds:
    """Remembers event ids per tenant. One thread at a time; `kept` may be read by others."""

    def __init__(self, *, bytes_max: int, age_s_max: float, seed: int | None = None) -> None:
        """Remember none yet.

        Args:
            bytes_max: Bytes that ids may take, 20 each; 0 remembers none at all.
            age_s_max: Age by the log's time at which an id may go; the newest 65,536 stay.
            seed: Of the fingerprints; None draws one that nobody outside can know.
        """
        drawn = int.from_bytes(os.urandom(8)) if seed is None else seed
        self._window = IdWindow(drawn)
        self._bytes_max = bytes_max
        self._age_s_max = age_s_max
        self.false_expected = 0.0

    def pass_rows(self, batch: EventBatch, arrived_s: NDArray[np.float64]) -> int:
        """Put out the rows of a batch whose id came before; returns how many.

        Args:
            arrived_s: When the log took each row, Unix seconds, float64, shape (rows,).
        """
        if not self._bytes_max:
            return 0
        rows = batch.ready_count
        out = self._window.pass_rows(
            batch, arrived_s, bytes_max=self._bytes_max, age_s_max=self._age_s_max
        )
        self.false_expected += rows * (len(self._window) / _FINGERPRINTS)
        return out

    def add(self, tenant: str, event_id: str, arrived_s: float) -> bool:
        """Remember one id; False where it came before."""
        if not self._bytes_max:
            return True
        self.false_expected += len(self._window) / _FINGERPRINTS
        return self._window.add(
            tenant, event_id, arrived_s, bytes_max=self._bytes_max, age_s_max=self._age_s_max
        )

    def kept(self) -> IdsKept:
        """Return how many ids are kept, and of how long."""
        window = self._window
        return IdsKept(len(window), window.bytes_used, window.span_s)

    def to_bytes(self) -> bytes:
        """Return all that is kept; equal state gives equal bytes."""
        marks = self._window.marks()
        arrays = {
            "fingerprints": self._window.fingerprints(),
            "times_s": np.array([time_s for time_s, _ in marks], dtype=np.float64),
            "counts": np.array([count for _, count in marks], dtype=np.int64),
        }
        return pack(_KIND, {"seed": str(self._window.seed)}, arrays)

    def restore(self, saved: object, *, named_s: float = 0.0) -> None:
        """Become what `to_bytes` gave, or stay without ids where none are to be remembered.

        Args:
            saved: Those bytes, or what snapshots held before: [tenant, id] pairs.
            named_s: When such pairs were saved, Unix seconds: none of them came later, and it is
                all that is known of their times.

        Raises:
            CorruptError: it is neither.
        """
        try:
            if not isinstance(saved, bytes):
                if not isinstance(saved, list):
                    raise TypeError(f"a list of pairs was expected, not {type(saved).__name__}")
                names = [(str(tenant), str(event_id)) for tenant, event_id in saved]
                _check_times(np.array([named_s]))
                for tenant, event_id in names:
                    self.add(tenant, event_id, named_s)
                return
            values, arrays = unpack(_KIND, saved)
            window = IdWindow(int(values["seed"]))
            _check_times(arrays["times_s"])
            window.load(arrays["fingerprints"], arrays["times_s"], arrays["counts"])
        except (LookupError, TypeError, ValueError) as error:
            raise CorruptError(f"event ids do not fit together: {error!r}") from error
        if self._bytes_max:
            self._window = window


def _check_times(times_s: NDArray[np.float64]) -> None:
    """Refuse times that no log has: after an endless one each id would begin a mark of its own."""
    if not np.isfinite(times_s).all():
        raise ValueError("a time is not finite")
