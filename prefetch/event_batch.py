"""Events as columns: what the heat takes in by the thousand, without an object per event.

A native scanner reads the envelopes. It is sound, not complete: what it calls ready, `decode`
accepts with the same values; whatever it is not sure of (escapes inside names, odd numbers, deep
nesting, every refusal) goes through `decode`, so that there is one language and one set of error
messages. Property tests hold the two to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from stoker.kernels._core import EventBatch, EventScanner
from stoker.prefetch.events import (
    CHUNK_ID_LENGTH_MAX,
    CHUNK_IDS_MAX,
    CHUNKS_MIN,
    CONTENT_TYPES,
    DOCUMENT_DELETED,
    EVENT_BYTES_MAX,
    EVENT_TYPES,
    ID_LENGTH_MAX,
    NAME_LENGTH_MAX,
    QUERY_LENGTH_MAX,
    RESULT_USED,
    SEARCH_PERFORMED,
    SOURCE_LENGTH_MAX,
    Event,
    EventError,
    decode,
)

# A row's kind is the place of its type in `EVENT_TYPES`: those that count accesses come first.
KIND_SEARCH: Final = EVENT_TYPES.index(SEARCH_PERFORMED)
KIND_RESULT: Final = EVENT_TYPES.index(RESULT_USED)
KIND_DELETED: Final = EVENT_TYPES.index(DOCUMENT_DELETED)
ACCESS_KINDS_END: Final = 2
assert {KIND_SEARCH, KIND_RESULT} == set(range(ACCESS_KINDS_END))

# What `EventBatch.states` holds for a row that counts.
ROW_READY: Final = 1

_KINDS: Final = {name: kind for kind, name in enumerate(EVENT_TYPES)}


def decode_batch(
    payloads: Sequence[bytes | None], *, bytes_max: int = EVENT_BYTES_MAX
) -> tuple[EventBatch, list[tuple[int, EventError]]]:
    """Decode and check many envelopes at once.

    Args:
        payloads: Each the structured-mode JSON of one event; None (a deleted record) is no event.
        bytes_max: Longest payload taken.

    Returns:
        The batch, a row per payload in order, and (row, reason) of each that is refused; those
        rows, and those of None, are out.
    """
    listed = payloads if isinstance(payloads, list) else list(payloads)
    batch = _scanner(bytes_max).scan(listed)
    refused = []
    for row in batch.undecided():
        payload = listed[row]
        assert payload is not None
        try:
            event = decode(payload, bytes_max=bytes_max)
        except EventError as error:
            batch.drop(row)
            refused.append((row, error))
            continue
        batch.put(
            row,
            kind=_KINDS[event.type],
            time_s=event.time_s,
            id=event.id,
            tenant=event.tenant,
            session=event.session,
            keys=event.chunk_ids,
        )
    return batch, refused


def batch_of(events: Sequence[Event]) -> EventBatch:
    """Turn decoded events into a batch, a row each."""
    batch = EventBatch()
    for event in events:
        batch.append(
            kind=_KINDS[event.type],
            time_s=event.time_s,
            id=event.id,
            tenant=event.tenant,
            session=event.session,
            keys=event.chunk_ids,
        )
    return batch


@functools.lru_cache(maxsize=8)
def _scanner(bytes_max: int) -> EventScanner:
    return EventScanner(
        types=EVENT_TYPES,
        keys_min=[CHUNKS_MIN[name] for name in EVENT_TYPES],
        content_types=CONTENT_TYPES,
        payload_bytes_max=bytes_max,
        id_max=ID_LENGTH_MAX,
        source_max=SOURCE_LENGTH_MAX,
        name_max=NAME_LENGTH_MAX,
        key_max=CHUNK_ID_LENGTH_MAX,
        query_max=QUERY_LENGTH_MAX,
        keys_max=CHUNK_IDS_MAX,
    )
