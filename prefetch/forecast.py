"""Forecast which keys the next request asks for, from sessions and what goes together.

The expected number of accesses to key p by the next request is a weighted sum of excitations that
fade with time (a Hawkes process, marked by request):

* popularity: each access excites its own key, over minutes, hours, a day, a week; repeats inside
  one session count less, or a talkative session would look like demand;
* the session's last turn excites its own keys for the next turn, more for those ranked first or
  asked for several turns in a row; withdrawn when that next turn has come;
* earlier turns of the session, and what used to follow a turn like it;
* companions: keys that were retrieved together with what has just been asked for.

The weights start from values fitted on one data set and follow the live stream: expectation
maximisation for a sum of Poisson sources, over a sliding window of requests. Everything stays >= 0,
so that no weight can explode and each forecast can be explained by its largest terms.

Source: Hawkes, Biometrika 58 (1971); the multiplicative update is that of Richardson and Lucy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# (name, time constant in seconds, first weight): accesses per request and unit of excitation.
_TERMS: tuple[tuple[str, float, float], ...] = (
    ("popularity", 300.0, 2.0e-3),
    ("popularity", 7200.0, 1.0e-4),
    ("popularity", 86400.0, 5.0e-4),
    ("popularity", 518400.0, 1.9e-4),
    ("popularity by rank", 300.0, 2.0e-3),
    ("last turn", 30.0, 3.0e-3),
    ("last turn", 120.0, 3.0e-2),
    ("last turn", 600.0, 1.0e-3),
    ("last turn by rank", 30.0, 5.0e-2),
    ("last turn by rank", 120.0, 3.5e-2),
    ("last turn by rank", 600.0, 2.0e-3),
    ("asked again", 600.0, 6.5e-3),
    ("used to follow", 120.0, 5.0e-3),
    ("earlier turns", 120.0, 1.0e-2),
    ("earlier turns", 600.0, 8.0e-4),
    ("companions", 60.0, 1.25e-2),
    ("companions", 600.0, 1.0e-3),
    ("companions", 7200.0, 2.4e-4),
    ("companions by rank", 60.0, 2.5e-2),
    ("companions by rank", 600.0, 1.0e-3),
)
_NAMES = tuple(term[0] for term in _TERMS)
_TAUS = np.array([term[1] for term in _TERMS])
_WEIGHTS = np.array([term[2] for term in _TERMS])
_BASE = 5e-5  # accesses per request of a key about which nothing is known


def _columns(name: str) -> slice:
    found = [at for at, have in enumerate(_NAMES) if have == name]
    return slice(found[0], found[-1] + 1)


_POPULARITY = _columns("popularity")
_POPULARITY_RANK = _columns("popularity by rank")
_TURN = _columns("last turn")
_TURN_RANK = _columns("last turn by rank")
_AGAIN = _columns("asked again")
_FOLLOW = _columns("used to follow")
_EARLIER = _columns("earlier turns")
_COMPANIONS = _columns("companions")
_COMPANIONS_RANK = _columns("companions by rank")
# What a session's next turn withdraws.
_SESSION = slice(_TURN.start, _EARLIER.stop)

_REPEAT_WEIGHT = 0.1  # what a repeat inside one session adds to popularity
_PRIOR = 3.0  # observations that a conditional share must outweigh
_DEGREE_MAX = 64  # companions and followers kept per key
_EXPONENT_MAX = 200.0
_EARLIER_FADE = 0.8


@dataclass
class _Turn:
    """What is known of a session after its last request."""

    time_s: float
    keys: list[int]
    earlier: dict[int, float]
    streak: dict[int, int]
    turns: int
    rows: Ints
    amounts: Floats  # shape (rows, session columns), as they were added


class _Links:
    """Counts of what goes with, or follows, a key: bounded per key, the rarest goes first."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}
        self.counts: dict[int, dict[int, float]] = {}

    def add(self, key: int, others: Sequence[int]) -> None:
        self.seen[key] = self.seen.get(key, 0.0) + 1.0
        row = self.counts.setdefault(key, {})
        for other in others:
            if other != key:
                row[other] = row.get(other, 0.0) + 1.0
        if len(row) > 2 * _DEGREE_MAX:
            strongest = sorted(row.items(), key=lambda item: -item[1])[:_DEGREE_MAX]
            self.counts[key] = dict(strongest)

    def spread(self, key: int, amount: float, into: dict[int, float]) -> None:
        """Add ``amount`` times the share of each companion of ``key``."""
        row = self.counts.get(key)
        if row:
            scale = amount / (self.seen[key] + _PRIOR)
            for other, count in row.items():
                into[other] = into.get(other, 0.0) + scale * count

    def renumber(self, number: Sequence[int]) -> None:
        self.seen = {number[k]: v for k, v in self.seen.items() if number[k] >= 0}
        self.counts = {
            number[k]: {number[o]: c for o, c in row.items() if number[o] >= 0}
            for k, row in self.counts.items()
            if number[k] >= 0
        }


class SessionForecast:
    """Expected accesses per key by the next request. One thread at a time.

    Invariants: excitations and weights are finite and >= 0; at most ``keys_max`` keys and
    ``sessions_max`` sessions are known.
    """

    def __init__(
        self,
        *,
        keys_max: int = 65_536,
        sessions_max: int = 20_000,
        session_gap_s: float = 1800.0,
        window_requests: float = 1500.0,
    ) -> None:
        self._keys_max = keys_max
        self._sessions_max = sessions_max
        self._gap_s = session_gap_s
        self._fade = 1.0 - 1.0 / window_requests
        self.keys: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}
        self._x = np.zeros((1024, len(_TERMS)))
        self._landmarks = np.zeros(len(_TERMS))  # seconds; excitations are grown since then
        self._now = 0.0
        self.weights = _WEIGHTS.copy()
        # Attributed accesses and exposure per term: their ratio is the weight. The prior keeps
        # a term that the stream has not touched yet at its first value.
        self._prior_hits = 5.0
        self._hits = np.full(len(_TERMS), self._prior_hits)
        self._exposure = self._prior_hits / _WEIGHTS
        self._sessions: OrderedDict[Hashable, _Turn] = OrderedDict()
        self._companions = _Links()
        self._followers = _Links()
        self.requests = 0

    def number(self, key: Hashable) -> int | None:
        """Return the key's row in `rates`, or None when it was never seen."""
        return self._numbers.get(key)

    def rates(self) -> Floats:
        """Return expected accesses per key by the next request, shape (len(keys),)."""
        scaled = self.weights * np.exp(-(self._now - self._landmarks) / _TAUS)
        rates: Floats = self._x[: len(self.keys)] @ scaled + _BASE
        return rates

    def explain(self, key: Hashable) -> dict[str, float]:
        """Return the terms of one key's forecast, largest first; empty when unknown."""
        row = self._numbers.get(key)
        if row is None:
            return {}
        scaled = self.weights * np.exp(-(self._now - self._landmarks) / _TAUS)
        parts: dict[str, float] = {}
        for name, value in zip(_NAMES, (self._x[row] * scaled).tolist(), strict=True):
            parts[name] = parts.get(name, 0.0) + value
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def observe(
        self, keys: Sequence[Hashable], session: Hashable | None, time_s: float
    ) -> Ints | None:
        """Take one request: learn from how well it was foreseen, then let it excite.

        Args:
            keys: What it asked for, best first, without repeats.
            session: Whose request it was, or None.
            time_s: Unix seconds; one before an earlier request's counts as that one's.

        Returns:
            None, or, when keys had to be forgotten, the old rows of the kept ones in order.
        """
        if not keys:
            return None
        self._advance(max(time_s, self._now))
        known = [n for n in (self._numbers.get(key) for key in keys) if n is not None]
        self._learn(known)
        rows, kept = self._intern(keys)
        self._excite(rows, session)
        for row in rows:
            self._companions.add(row, rows)
        self.requests += 1
        return kept

    def _advance(self, now: float) -> None:
        self._now = now
        exponent = (now - self._landmarks) / _TAUS
        late = np.flatnonzero(exponent > _EXPONENT_MAX)
        if len(late):
            self._x[:, late] *= np.exp(-exponent[late])
            self._landmarks[late] = now

    def _learn(self, known: list[int]) -> None:
        count = len(self.keys)
        if count == 0:
            return
        fading = np.exp(-(self._now - self._landmarks) / _TAUS)
        exposure = self._x[:count].sum(axis=0) * fading
        self._hits *= self._fade
        self._exposure *= self._fade
        renewed = (1.0 - self._fade) * self._prior_hits
        self._hits += renewed
        self._exposure += renewed / _WEIGHTS + exposure
        if known:
            parts = self._x[known] * (fading * self.weights)
            share = parts / (parts.sum(axis=1, keepdims=True) + _BASE)
            self._hits += share.sum(axis=0)
        self.weights = self._hits / self._exposure

    def _intern(self, keys: Sequence[Hashable]) -> tuple[list[int], Ints | None]:
        kept: Ints | None = None
        fresh = [key for key in keys if key not in self._numbers]
        if len(self.keys) + len(fresh) > self._keys_max and self.keys:
            kept = self._forget(max(len(keys), self._keys_max // 10))
            fresh = [key for key in keys if key not in self._numbers]
        for key in fresh:
            self._numbers[key] = len(self.keys)
            self.keys.append(key)
        if len(self.keys) > len(self._x):
            grown = np.zeros((2 * len(self.keys), len(_TERMS)))
            grown[: len(self._x)] = self._x
            self._x = grown
        return [self._numbers[key] for key in keys], kept

    def _excite(self, rows: list[int], session: Hashable | None) -> None:
        grown = np.exp((self._now - self._landmarks) / _TAUS)
        before = self._withdraw(session)
        again = before is not None and self._now - before.time_s <= self._gap_s
        earlier: dict[int, float] = {}
        streak = dict.fromkeys(rows, 1)
        turns = 1
        if before is not None and again:
            for row in before.keys:
                self._followers.add(row, rows)
            streak = {row: before.streak.get(row, 0) + 1 for row in rows}
            earlier = before.earlier
            turns = before.turns + 1
        amounts: dict[int, Floats] = {}
        companions: dict[int, float] = {}
        companions_rank: dict[int, float] = {}
        follow: dict[int, float] = {}
        lively = 1.0 + 0.15 * min(turns - 1, 5)  # long sessions tend to go on
        for rank, row in enumerate(rows):
            by_rank = 1.0 / (1.0 + rank)
            popular = _REPEAT_WEIGHT if row in earlier else 1.0
            amount = amounts.setdefault(row, np.zeros(len(_TERMS)))
            amount[_POPULARITY] += popular
            amount[_POPULARITY_RANK] += popular * by_rank
            if session is not None:
                amount[_TURN] += lively
                amount[_TURN_RANK] += lively * by_rank
                amount[_AGAIN] += lively * min(streak[row] - 1, 4)
                self._followers.spread(row, lively * by_rank, follow)
            self._companions.spread(row, 1.0, companions)
            self._companions.spread(row, by_rank, companions_rank)
        # Rows of the change: what was asked for, then what that makes likelier.
        place = {row: at for at, row in enumerate(amounts)}
        onward = {r: lively * v for r, v in earlier.items() if r not in streak}
        columns = (
            (_COMPANIONS, companions),
            (_COMPANIONS_RANK, companions_rank),
            (_FOLLOW, follow),
            (_EARLIER, onward),
        )
        for _, values in columns:
            for row in values:
                place.setdefault(row, len(place))
        index = np.fromiter(place, dtype=np.int64, count=len(place))
        matrix = np.zeros((len(place), len(_TERMS)))
        matrix[: len(amounts)] = list(amounts.values())
        for column, values in columns:
            if values:
                at = [place[row] for row in values]
                matrix[at, column] += np.array(list(values.values()))[:, None]
        self._x[index] += matrix * grown
        if session is not None:
            self._remember(session, rows, earlier, streak, turns, index, matrix)

    def _withdraw(self, session: Hashable | None) -> _Turn | None:
        """Take back what the session's last turn promised for its next one, which is now."""
        if session is None:
            return None
        before = self._sessions.pop(session, None)
        if before is not None:
            exponent = (before.time_s - self._landmarks[_SESSION]) / _TAUS[_SESSION]
            rows = before.rows
            left = self._x[rows, _SESSION] - before.amounts * np.exp(exponent)
            self._x[rows, _SESSION] = np.maximum(left, 0.0)
        return before

    def _remember(
        self,
        session: Hashable,
        rows: list[int],
        earlier: dict[int, float],
        streak: dict[int, int],
        turns: int,
        index: Ints,
        matrix: Floats,
    ) -> None:
        seen = {row: value * _EARLIER_FADE for row, value in earlier.items() if value > 0.1}
        for row in rows:
            seen[row] = seen.get(row, 0.0) + 1.0
        part = matrix[:, _SESSION]
        touched = part.any(axis=1)
        self._sessions[session] = _Turn(
            self._now, rows, seen, streak, turns, index[touched], part[touched]
        )
        if len(self._sessions) > self._sessions_max:
            self._sessions.popitem(last=False)

    def _forget(self, count: int) -> Ints:
        """Drop the keys of the least forecast, and renumber the rest."""
        total = len(self.keys)
        order = np.argsort(self.rates(), kind="stable")
        kept = np.sort(order[min(count, total) :])
        number = np.full(total, -1, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        moved = np.zeros_like(self._x)
        moved[: len(kept)] = self._x[kept]
        self._x = moved
        self.keys = [self.keys[i] for i in kept.tolist()]
        self._numbers = {key: at for at, key in enumerate(self.keys)}
        renumber = number.tolist()
        self._companions.renumber(renumber)
        self._followers.renumber(renumber)
        for turn in self._sessions.values():
            alive = number[turn.rows] >= 0
            turn.rows, turn.amounts = number[turn.rows[alive]], turn.amounts[alive]
            turn.keys = [renumber[k] for k in turn.keys if renumber[k] >= 0]
            turn.earlier = {renumber[k]: v for k, v in turn.earlier.items() if renumber[k] >= 0}
            turn.streak = {renumber[k]: v for k, v in turn.streak.items() if renumber[k] >= 0}
        return kept
