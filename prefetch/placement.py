"""Stoker's own placement policy: what stays, what goes, what is fetched ahead.

One object serves live traffic and simulation alike. Without sessions it is an arena of simple
policies; from the first access that names a session on, the session forecast competes too, and
while it acts, keys are fetched ahead between requests.

The order of calls: `access` for each key of a request, best first, then `close_request`. A caller
that knows no requests may leave the second out: a change of session or time closes the request
before it. A caller with many requests at once may renew the content after the last of them alone:
a renewal looks at all that is known. Everything is decided from the past alone; a key fetched ahead
at one time counts as a hit only for a later time, because a load cannot arrive in no time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from stoker.errors import ConfigError
from stoker.prefetch.arena import Arena, Switch
from stoker.prefetch.candidates import CANDIDATES
from stoker.prefetch.forecast import SessionForecast
from stoker.prefetch.forecast_cache import ForecastCache
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.shadow import PrefetchAccount
from stoker.prefetch.tiered import QLearning, TieredPlacement


class Decision(NamedTuple):
    """What one access led to.

    Attributes:
        hit: Whether the key was resident.
        admitted: Whether a miss made it resident (it may still be, when the request closes).
        evicted: The key that made room, or None.
        ahead: Keys to load ahead now, and for each the key that makes room or None: after a
            change of the acting policy, so that the content follows; and where this access has
            closed the request before it, what that led to.
    """

    hit: bool
    admitted: bool
    evicted: Hashable | None
    ahead: tuple[tuple[Hashable, Hashable | None], ...] = ()


class Move(NamedTuple):
    """A key to make resident when a request has ended.

    Attributes:
        key: The key.
        evicted: The key that makes room, or None.
        ahead: Whether it is fetched ahead; False when the request itself had just read it.
    """

    key: Hashable
    evicted: Hashable | None
    ahead: bool


class StokerPolicy:
    """Placement of equal-sized units (pages, blocks, passages) in one tier.

    Invariants: those of `Arena`; every key fetched ahead is accounted for exactly once.
    """

    def __init__(
        self,
        capacity: int,
        settings: PrefetchSettings | None = None,
        *,
        forecast_capacity_max: int = 250_000,
    ) -> None:
        """Start empty.

        Args:
            capacity: How many units fit; at least 1.
            settings: Its ``placement_`` settings; None means the defaults.
            forecast_capacity_max: Above this capacity the forecast does not compete: it looks at
                all it knows once per request.

        Raises:
            UnavailableError: ``placement_qlearning`` is set and torch is not installed.
        """
        config = settings or PrefetchSettings()
        if capacity < 1:
            raise ConfigError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._config = config
        self._forecast_capacity_max = forecast_capacity_max
        self._forecast: ForecastCache | None = None
        learned = (QLearning,) if config.placement_qlearning else ()
        self.arena = Arena(
            capacity,
            candidates=(*CANDIDATES, *learned),
            mini_capacity=config.placement_mini_capacity,
            switch_cost=config.placement_switch_cost,
            refetch_per_miss=config.placement_refetch_per_miss,
        )
        self.prefetch = PrefetchAccount()
        self._asked: dict[Hashable, None] = {}
        self._unrenewed: set[Hashable] = set()  # asked for since the content was renewed
        self._session: Hashable | None = None
        self._time_s = 0.0
        self._prefetch_enabled = True

    @property
    def prefetch_enabled(self) -> bool:
        """Whether anything is loaded that was not asked for; may be set at any time."""
        return self._prefetch_enabled

    @prefetch_enabled.setter
    def prefetch_enabled(self, enabled: bool) -> None:
        self._prefetch_enabled = enabled
        kept = self._config.placement_refetch_per_miss
        self.arena.refetch_per_miss = kept if enabled else 0

    @property
    def learned(self) -> TieredPlacement | None:
        """Q-learning's miniature cache, to save, restore and explain; None where it is off."""
        for candidate in self.arena.candidates:
            if isinstance(candidate, QLearning):
                return candidate.placement
        return None

    @property
    def active(self) -> str:
        """Name of the policy that acts now."""
        return self.arena.active

    @property
    def switches(self) -> list[Switch]:
        """Every change of the acting policy so far, with its evidence."""
        return self.arena.switches

    def __contains__(self, key: Hashable) -> bool:
        return key in self.arena.resident

    def __len__(self) -> int:
        return len(self.arena.resident)

    def access(
        self, key: Hashable, *, session: Hashable | None = None, time_s: float = 0.0
    ) -> Decision:
        """Take one access of a request.

        Args:
            key: The unit.
            session: Whose request it is; None where that is not known.
            time_s: Unix seconds of the request.
        """
        if session is None and self._forecast is None:
            # Without requests, the order of accesses is the only clock.
            return self._access(key, float(self.arena.accesses), repeated=False)
        closed: list[Move] = []
        if self._asked and (session != self._session or time_s != self._time_s):
            closed = self.close_request()
        if self._forecast is None and not self._start_forecast():
            return self._access(key, time_s, repeated=False)
        self._session, self._time_s = session, time_s
        repeated = key in self._asked
        self._asked[key] = None
        decision = self._access(key, time_s, repeated=repeated)
        if closed:
            before = tuple((move.key, move.evicted) for move in closed if move.ahead)
            decision = decision._replace(ahead=(*before, *decision.ahead))
        return decision

    def _access(self, key: Hashable, clock: float, *, repeated: bool) -> Decision:
        account, arena = self.prefetch, self.arena
        hit, admitted, evicted = arena.access(key)
        if account.pending:
            if evicted is not None:
                account.evicted(evicted)
            if hit:
                hit = account.hit(key, clock)
            else:
                account.missed(key)
        if not arena.refetched:
            return Decision(hit or repeated, admitted, evicted)
        ahead = tuple(arena.refetched)
        for brought, victim in ahead:
            account.evicted(victim)
            account.issued(brought, victim, clock)
        return Decision(hit or repeated, admitted, evicted, ahead)

    def _start_forecast(self) -> bool:
        """Let the forecast compete, if the cache is small enough for it and still cold enough."""
        if self.capacity > self._forecast_capacity_max:
            return False
        keys_max = max(65_536, 2 * self.capacity)
        self._forecast = ForecastCache(
            self.capacity,
            SessionForecast(keys_max=keys_max),
            swap_gain=self._config.placement_swap_gain,
            area_ratio=self._config.placement_area_ratio,
        )
        self.arena.enter(self._forecast)
        return True

    def close_request(self, *, renew: bool = True) -> list[Move]:
        """End the request: learn from it, renew the content, and say what to load.

        Loads marked ``ahead`` are to run at a priority under demand; the others hold bytes that
        the request has read already.

        Args:
            renew: False only lets the request's keys in, and leaves the rest for a later call, or
                for `renew`.
        """
        forecast, asked = self._forecast, self._asked
        if forecast is None or not asked:
            return []
        keys = list(asked)
        forecast.observe(keys, self._session, self._time_s)
        self._unrenewed.update(keys)
        self._asked = {}
        return self.renew() if renew else self._followed(*forecast.admit(keys))

    def renew(self) -> list[Move]:
        """Renew the content after requests that were closed without it; see `close_request`."""
        forecast = self._forecast
        if forecast is None or not self._unrenewed:
            return []
        moves = self._followed(*forecast.renew(swap=self._prefetch_enabled))
        self._unrenewed = set()
        forecast.area_scale = self.prefetch.area_scale()
        return moves

    def _followed(self, gone: list[Hashable], came: list[Hashable]) -> list[Move]:
        """Let the content follow what the forecast changed, if it acts."""
        if not self.arena.forecast_acts:
            return []
        account, asked, time_s = self.prefetch, self._unrenewed, self._time_s
        moves: list[Move] = []
        for key, evicted in self.arena.follow(gone, came):
            ahead = key not in asked
            if evicted is not None:
                account.evicted(evicted)
            if ahead:
                account.issued(key, evicted, time_s)
            moves.append(Move(key, evicted, ahead))
        return moves

    def explain(self, key: Hashable) -> dict[str, float]:
        """Return the terms of a key's forecast (accesses per request), largest first."""
        return {} if self._forecast is None else self._forecast.forecast.explain(key)
