"""Access entropy per tenant and route, with the regime and the drift alarm that follow from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.prefetch.entropy import AccessEntropy
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.prefetch.regime import DriftAlarm, Regime, regime_for
from stoker.prefetch.snapshot import pack, unpack

_KIND = "access entropy 1"

StreamKey = tuple[str, str | None]
"""(tenant, route); route None is the tenant as a whole."""


@dataclass
class _Stream:
    entropy: AccessEntropy
    alarm: DriftAlarm
    requests: int = 0


class EntropyStreams:
    """Entropy of what is retrieved, per tenant and per route of it. One thread at a time.

    Invariant: at most ``streams_max`` streams; the one that was silent longest goes first.
    """

    def __init__(self, *, decay: float = 0.9992, streams_max: int = 1024) -> None:
        self._decay = decay
        self._streams_max = streams_max
        self._streams: OrderedDict[StreamKey, _Stream] = OrderedDict()

    def apply(self, events: Sequence[Event]) -> None:
        """Count the retrieved chunks of search events; other events say nothing about demand."""
        for event in events:
            if event.type != SEARCH_PERFORMED or not event.chunk_ids:
                continue
            self.count(event.tenant, event.route, event.chunk_ids)

    def count(self, tenant: str, route: str | None, chunk_ids: Sequence[str]) -> None:
        """Count the chunks that one request retrieved."""
        for name in (None,) if route is None else (None, route):
            stream = self._stream((tenant, name))
            stream.requests += 1
            for chunk in chunk_ids:
                stream.entropy.add(chunk)

    def _stream(self, key: StreamKey) -> _Stream:
        stream = self._streams.get(key)
        if stream is None:
            stream = _Stream(AccessEntropy(decay=self._decay), DriftAlarm())
            self._streams[key] = stream
            if len(self._streams) > self._streams_max:
                self._streams.popitem(last=False)
        else:
            self._streams.move_to_end(key)
        return stream

    def bits(self, tenant: str, route: str | None = None) -> float | None:
        """Return the entropy in bits; None where nothing was retrieved yet."""
        stream = self._streams.get((tenant, route))
        return None if stream is None else stream.entropy.bits

    def regime(self, tenant: str, route: str | None = None) -> Regime | None:
        """Return how to cache this stream; None where nothing was retrieved yet."""
        bits = self.bits(tenant, route)
        return None if bits is None else regime_for(bits)

    def all_bits(self) -> dict[StreamKey, float]:
        """Return the entropy of every stream, in bits."""
        return {key: stream.entropy.bits for key, stream in self._streams.items()}

    def close_window(self) -> dict[StreamKey, float]:
        """End a window of requests for the drift alarms.

        Returns:
            Stream -> factor for the weights of what is hot now; only streams that drifted.
        """
        drifted: dict[StreamKey, float] = {}
        for key, stream in self._streams.items():
            factor = stream.alarm.observe(stream.entropy.bits, stream.requests)
            stream.requests = 0
            if factor != 1.0:
                drifted[key] = factor
        return drifted

    def to_snapshot(self) -> bytes:
        """Return the whole state; equal state gives equal bytes."""
        rows: list[dict[str, Any]] = [
            {
                "tenant": tenant,
                "route": route,
                "requests": stream.requests,
                "before": stream.alarm._before,
                "entropy": stream.entropy.to_state(),
            }
            for (tenant, route), stream in self._streams.items()
        ]
        return pack(_KIND, {"decay": self._decay, "streams": rows}, {})

    @staticmethod
    def from_snapshot(data: bytes, *, streams_max: int = 1024) -> EntropyStreams:
        """Return what `to_snapshot` saved; continues bit for bit. Raises SnapshotCorrupt."""
        values, _ = unpack(_KIND, data)
        restored = EntropyStreams(decay=values["decay"], streams_max=streams_max)
        for row in values["streams"]:
            alarm = DriftAlarm(_before=row["before"])
            restored._streams[row["tenant"], row["route"]] = _Stream(
                AccessEntropy.from_state(row["entropy"]), alarm, row["requests"]
            )
        return restored
