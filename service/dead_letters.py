"""Dead letters: what could not be taken as an event, with the reason and enough to mend it.

A letter is itself a CloudEvents envelope (`schemas/event-refused.json`). It carries the refused
bytes up to a bound, and always their length and SHA-256, so that a 5 MB record costs a few hundred
bytes here and can still be found where it lies: topic, partition and offset are in the letter.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

import orjson
import structlog

from stoker.prefetch.events import DEFAULT_SOURCE, EventError, format_time
from stoker.service.streams import (
    DEAD_LETTERS_TOPIC,
    EventLog,
    LogFull,
    LogUnavailable,
    Record,
    RecordTooLarge,
)

log = structlog.get_logger(__name__)

EVENT_REFUSED: Final = "stoker.event.refused.v1"


def dead_letter(
    payload: bytes,
    reason: EventError,
    *,
    time_s: float,
    origin: Record | None = None,
    payload_bytes_max: int,
) -> bytes:
    """Write one letter.

    Args:
        payload: The refused bytes.
        time_s: When they were refused, Unix seconds.
        origin: The record that held them; None where a publisher refused them before the log.
        payload_bytes_max: How many of the bytes the letter carries, from the front.
    """
    digest = hashlib.sha256(payload).hexdigest()
    data: dict[str, Any] = {
        "reason": str(reason),
        "field": reason.field,
        "expected": reason.expected,
        "found": reason.found,
        "payload_bytes": len(payload),
        "payload_sha256": digest,
        "payload_base64": base64.b64encode(payload[:payload_bytes_max]).decode(),
        "payload_complete": len(payload) <= payload_bytes_max,
    }
    if origin is None:
        letter_id = f"refused-{digest[:32]}"
    else:
        # The same record gets the same letter: reading it again after a crash adds no new one.
        letter_id = f"{origin.topic}-{origin.partition}-{origin.offset}"
        data["topic"] = origin.topic
        data["partition"] = origin.partition
        data["offset"] = origin.offset
        data["key_base64"] = base64.b64encode(origin.key[:payload_bytes_max]).decode()
    return orjson.dumps(
        {
            "specversion": "1.0",
            "id": letter_id,
            "source": DEFAULT_SOURCE,
            "type": EVENT_REFUSED,
            "time": format_time(time_s),
            "datacontenttype": "application/json",
            "data": data,
        }
    )


class DeadLetters:
    """Letters on their way to their topic. Owned by one thread.

    A letter is kept until the log has it; whoever commits offsets flushes first, so that no refused
    record is forgotten. While the log is away the letters wait, up to a bound.
    """

    def __init__(
        self,
        event_log: EventLog,
        *,
        topic: str = DEAD_LETTERS_TOPIC,
        payload_bytes_max: int = 64 << 10,
        pending_max: int = 1_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Write letters to `topic`, which must be there.

        Args:
            payload_bytes_max: How many of the refused bytes a letter carries.
            pending_max: Letters that may wait for the log; the oldest go beyond, counted in
                `dropped`, because a flood of bad records must not fill the memory.
        """
        self._log = event_log
        self._topic = topic
        self._payload_bytes_max = payload_bytes_max
        self._pending_max = pending_max
        self._clock = clock
        self._pending: list[tuple[bytes, bytes | None]] = []
        self._away = False
        self.written = 0
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Letters that the log does not have yet."""
        return len(self._pending)

    def put(self, payload: bytes, reason: EventError, *, origin: Record | None = None) -> None:
        """Keep a letter for the next flush; never blocks, and a log that is away is no error."""
        letter = dead_letter(
            payload,
            reason,
            time_s=self._clock(),
            origin=origin,
            payload_bytes_max=self._payload_bytes_max,
        )
        self._pending.append((b"" if origin is None else origin.key[:1024], letter))
        if len(self._pending) > self._pending_max:
            del self._pending[0]
            self.dropped += 1
            if self.dropped == 1:
                log.error("service.dead_letters_dropped", pending_max=self._pending_max)

    def flush(self) -> bool:
        """Write what waits; returns whether nothing waits any more."""
        if not self._pending:
            return True
        count = len(self._pending)
        try:
            self._log.append_batch(self._topic, self._pending)
        except (LogUnavailable, LogFull, RecordTooLarge) as error:
            if not self._away:
                log.warning("service.dead_letters_waiting", pending=count, reason=str(error))
            self._away = True
            return False
        self._pending.clear()
        self._away = False
        before, self.written = self.written, self.written + count
        if passes_milestone(before, self.written):
            log.warning("service.events_refused", topic=self._topic, total=self.written)
        return True


def passes_milestone(before: int, after: int) -> bool:
    """Tell whether a count reached 1, 10, 100, …: a flood makes few lines, and none is missed."""
    return after > 0 and len(str(after)) > (len(str(before)) if before else 0)
