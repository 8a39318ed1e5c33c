"""Follow the KV events of a vLLM engine: msgpack over ZeroMQ, with gaps filled by replay.

A PUB socket sends ``(topic, sequence, batch)``, the sequence as 8 bytes, big end first; a ROUTER
sends batches again from a number on and ends with -1. Written against vLLM 0.32; the array form of
events that earlier versions sent is read as well. Needs ``stoker[engines]``.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from stoker.errors import InputError, UnavailableError
from stoker.kvcache.engine_view import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    EngineView,
)

log = structlog.get_logger(__name__)

_END = -1
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
           "lora_name")  # fmt: skip
_REMOVED = ("block_hashes", "medium")


def decode_batch(payload: bytes) -> list[EngineEvent]:
    """Read one batch: ``[time, events, rank]``, an event a map with ``type`` or an array.

    Raises:
        InputError: it is not such a batch; event types that are not known are left out.
        UnavailableError: msgpack is not installed.
    """
    msgpack = need_package("msgpack", extra="engines")
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
        raw = batch[1]
        return [event for event in map(_event_of, raw) if event is not None]
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise InputError(f"expected a batch of KV events, found {error!r}") from error


def _event_of(raw: Mapping[str, Any] | Sequence[Any]) -> EngineEvent | None:
    if isinstance(raw, Mapping):
        kind, fields = raw["type"], dict(raw)
    else:
        kind = raw[0]
        names = _STORED if kind == "BlockStored" else _REMOVED
        fields = dict(zip(names, raw[1:], strict=False))
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind == "BlockRemoved":
        return BlockRemoved(tuple(fields["block_hashes"]), fields.get("medium") or "")
    if kind == "BlockStored":
        lora = fields.get("lora_name") or fields.get("lora_id")
        return BlockStored(
            block_hashes=tuple(fields["block_hashes"]),
            parent_block_hash=fields["parent_block_hash"],
            token_ids=tuple(int(token) for token in fields["token_ids"]),
            block_size=int(fields["block_size"]),
            medium=fields.get("medium") or "",
            lora_name="" if lora is None else str(lora),
        )
    return None


class KvEventFollower:
    """Keeps an `EngineView` up to date from one engine's events, in a thread of its own.

    At least once: a batch may be applied twice, never out of order. A gap is asked for again; where
    the engine has it no more, or has started anew, the view is emptied and rebuilt from what comes.

    Args:
        endpoint: Of the PUB socket.
        replay_endpoint: Of the ROUTER; empty where the engine has none.
        topic: Prefix of the topics to follow.
        replay_timeout_s: How long a replay may pause between two batches.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        replay_timeout_s: float = 2.0,
    ) -> None:
        self._zmq = need_package("zmq", extra="engines")
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_ms = int(replay_timeout_s * 1000)
        self._lock = threading.Lock()
        self._view = EngineView()
        self._next: int | None = None  # the sequence number expected
        self._batches = self._gaps = self._losses = self._refused = 0
        self._stop = threading.Event()
        self._changed = threading.Condition(self._lock)
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.SUB)
        self._socket.setsockopt(self._zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def matched(self, token_ids: Sequence[int], *, lora_name: str = "") -> int:
        """Return how many leading tokens the engine holds, as far as is known."""
        with self._lock:
            return self._view.matched(token_ids, lora_name=lora_name)

    def counts(self) -> dict[str, int]:
        """Return blocks held, and batches, gaps, losses and refused batches so far."""
        with self._lock:
            return {
                "blocks": len(self._view), "batches": self._batches, "gaps": self._gaps,
                "losses": self._losses, "refused": self._refused,
            }  # fmt: skip

    def wait_for(self, batches: int, *, timeout_s: float) -> bool:
        """Wait until that many batches were taken in all; tells whether they were."""
        with self._changed:
            return self._changed.wait_for(lambda: self._batches >= batches, timeout_s)

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        while not self._stop.is_set():
            if not poller.poll(100):
                continue
            frames = self._socket.recv_multipart()
            if len(frames) < 2:
                continue
            self._take(int.from_bytes(frames[-2], "big", signed=True), frames[-1])

    def _take(self, sequence: int, payload: bytes) -> None:
        expected = self._next
        if expected is None or sequence < expected:
            # First contact, or an engine that began to count anew: what was before is not known.
            self._lose() if expected is not None else None
            expected = 0
        if sequence > expected:
            with self._lock:
                self._gaps += 1
            found, complete = self._replay(expected, sequence)
            if not complete:
                self._lose()
            for batch in found:
                self._apply(batch)
        self._apply(payload)
        self._next = sequence + 1

    def _lose(self) -> None:
        with self._lock:
            self._losses += 1
            self._view.clear()
        log.warning("service.kv_events_lost")

    def _apply(self, payload: bytes) -> None:
        try:
            events = decode_batch(payload)
        except InputError as error:
            log.warning("service.kv_events_refused", reason=str(error))
            with self._changed:
                self._refused += 1
                self._batches += 1
                self._view.clear()  # it may have been a removal
                self._changed.notify_all()
            return
        with self._changed:
            for event in events:
                self._view.apply(event)
            self._batches += 1
            self._changed.notify_all()

    def _replay(self, start: int, stop: int) -> tuple[list[bytes], bool]:
        """Ask for the batches from ``start`` to before ``stop``; tells whether all came."""
        if not self._replay_endpoint:
            return [], False
        socket = self._context.socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.LINGER, 0)
        found: dict[int, bytes] = {}
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            while socket.poll(self._replay_timeout_ms) and not self._stop.is_set():
                frames = socket.recv_multipart()
                if len(frames) < 2:
                    continue
                sequence = int.from_bytes(frames[-2], "big", signed=True)
                if sequence == _END:
                    break
                if start <= sequence < stop:
                    found[sequence] = frames[-1]
        finally:
            socket.close()
        # What comes before a gap that stays is of no use: the view starts empty after it.
        usable = []
        for sequence in range(stop - 1, start - 1, -1):
            if sequence not in found:
                break
            usable.append(found[sequence])
        return usable[::-1], len(usable) == stop - start


def need_package(name: str, *, extra: str) -> Any:
    """Import a package of an extra.

    Raises:
        UnavailableError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(
            f"expected the package {name}, found none: install stoker[{extra}]"
        ) from error
