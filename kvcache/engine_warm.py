"""Tell an inference engine what to warm: heat, to token sequences, to prefetch calls.

Engines can load KV ahead of a request, but nobody tells them which. Calls here are leased, so that
an engine forgets what is no longer wanted; fenced, so that nothing of an older generation of
documents is kept warm; and limited in rate, since a prefetch takes bandwidth from requests.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NewType, Protocol

import structlog

from stoker.errors import InputError, StokerError

ContentKey = tuple[str, str]
Ticket = NewType("Ticket", str)

log = structlog.get_logger(__name__)


class PrefetchEngine(Protocol):
    """An engine that can be asked to load KV ahead; the caller's adapter speaks its protocol."""

    def prefetch(self, token_ids: Sequence[int], *, lease_s: float, generation: int) -> Ticket:
        """Ask for the KV of a sequence; returns at once. Asking again renews the lease."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Say that it is no longer wanted; unknown tickets are no error."""
        ...


@dataclasses.dataclass(frozen=True)
class EngineWarmOutcome:
    """What one round did, in sequences; the first six add up to the keys with heat.

    Attributes:
        sent: Newly asked for.
        renewed: Leases that ran low and were renewed.
        held: Leases that hold for a while yet.
        rate_limited: Put off: the rate or the number of leases is used up.
        unknown: Without tokens: the passage is not in any prompt template.
        failed: The engine did not take the call.
        released: Leases given back: cold now, or of another generation.
    """

    sent: int
    renewed: int
    held: int
    rate_limited: int
    unknown: int
    failed: int
    released: int


@dataclasses.dataclass(slots=True)
class _Lease:
    ticket: Ticket
    tokens: int
    ends_s: float


class EngineWarmer:
    """Keeps the hottest sequences leased in one engine. Not thread-safe; starts no thread.

    Invariants (`check`): never more leases than ``leases_max``; all of one generation; over any
    time the tokens asked for are at most the burst plus the rate times that time.

    Args:
        engine: The engine's adapter.
        tokens_per_s_max: Rate of prefetch; in tokens, since that is what takes bandwidth.
        tokens_burst: Tokens that may be asked for at once; a longer sequence is never sent.
        leases_max: Sequences kept warm.
        lease_s: How long the engine keeps one; renewed when a third is left.
        clock: Seconds, any origin.
    """

    def __init__(
        self,
        engine: PrefetchEngine,
        *,
        tokens_per_s_max: float = 20_000.0,
        tokens_burst: int = 65_536,
        leases_max: int = 256,
        lease_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(tokens_per_s_max, tokens_burst, leases_max, lease_s) <= 0:
            raise InputError(
                f"expected bounds above 0, found {tokens_per_s_max}, {tokens_burst}, "
                f"{leases_max}, {lease_s}"
            )
        self._engine = engine
        self._rate = tokens_per_s_max
        self._burst = tokens_burst
        self._leases_max = leases_max
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[ContentKey, _Lease] = {}
        self._generation: int | None = None
        self._allowance = float(tokens_burst)
        self._filled_s = clock()

    def warm(
        self,
        heat: Mapping[ContentKey, float],
        tokens_of: Callable[[ContentKey], Sequence[int] | None],
        *,
        generation: int,
    ) -> EngineWarmOutcome:
        """Bring the engine's leases to the hottest sequences; call it with every new plan.

        Args:
            heat: Weight per content key; those at or below 0 are not wanted.
            tokens_of: The token sequence of a key as prompts hold it, or None.
            generation: Of the documents; another one releases every lease of the last.
        """
        now = self._clock()
        self._allowance = min(
            float(self._burst), self._allowance + max(0.0, now - self._filled_s) * self._rate
        )
        self._filled_s = now
        released = 0
        if generation != self._generation:
            released += self._release(list(self._leases))
            self._generation = generation
        self._leases = {key: lease for key, lease in self._leases.items() if lease.ends_s > now}
        wanted = sorted(
            (key for key, weight in heat.items() if weight > 0 and not math.isnan(weight)),
            key=lambda key: (-heat[key], key),
        )
        hottest = set(wanted[: self._leases_max])
        released += self._release([key for key in self._leases if key not in hottest])
        sent = renewed = held = limited = unknown = failed = 0
        broken = False  # an engine that failed once is left alone until the next round
        for key in wanted:
            lease = self._leases.get(key)
            if lease is not None and lease.ends_s - now > self._lease_s / 3:
                held += 1
                continue
            if key not in hottest:
                limited += 1
                continue
            token_ids = tokens_of(key)
            if not token_ids:
                unknown += 1
                continue
            if len(token_ids) > self._allowance or broken:
                limited += not broken
                failed += broken
                continue
            try:
                ticket = self._engine.prefetch(
                    token_ids, lease_s=self._lease_s, generation=generation
                )
            except (StokerError, OSError) as error:
                log.warning("kvcache.prefetch_refused", reason=str(error))
                broken = True
                failed += 1
                continue
            self._allowance -= len(token_ids)
            self._leases[key] = _Lease(ticket, len(token_ids), now + self._lease_s)
            sent, renewed = sent + (lease is None), renewed + (lease is not None)
        return EngineWarmOutcome(sent, renewed, held, limited, unknown, failed, released)

    def _release(self, keys: Sequence[ContentKey]) -> int:
        for key in keys:
            lease = self._leases.pop(key)
            try:
                self._engine.release(lease.ticket)
            except (StokerError, OSError) as error:
                # The lease ends by itself; that is what it is for.
                log.warning("kvcache.prefetch_refused", reason=str(error))
        return len(keys)

    def close(self) -> None:
        """Give every lease back."""
        self._release(list(self._leases))

    def leased(self) -> set[ContentKey]:
        """Return the keys under lease."""
        return set(self._leases)

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self._leases) <= self._leases_max
        assert -1e-6 <= self._allowance <= self._burst
        for key, lease in self._leases.items():
            assert 0 < lease.tokens <= self._burst, key
