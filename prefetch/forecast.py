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

from stoker.kernels._core import (
    LinkCounts,
    add_excitations,
    add_shares,
    weighted_rows,
    withdraw_excitations,
)

Rates = NDArray[np.float32]
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
    ("companions", 86400.0, 1.3e-4),
    ("companions by rank", 60.0, 2.5e-2),
    ("companions by rank", 600.0, 1.0e-3),
)
_NAMES = tuple(term[0] for term in _TERMS)
_TAUS = np.array([term[1] for term in _TERMS])
_WEIGHTS = np.array([term[2] for term in _TERMS])
_BASE = 5e-5  # accesses per request of a key about which nothing is known


def _groups(*names: str) -> Ints:
    """Return, for each column, which amount it takes: the place of its name, or -1."""
    places = [names.index(name) if name in names else -1 for name in _NAMES]
    return np.array(places, dtype=np.int64)


def _ranked(count: int) -> Floats:
    """Return one unit for each of ``count`` keys, whole and by rank, shape (count, 2)."""
    return np.stack([np.ones(count), 1.0 / np.arange(1, count + 1)], axis=1)


_RANKED = _ranked(64)

# What a request's own keys get: five amounts a key. Its session's next turn withdraws three.
_OWN = _groups("popularity", "popularity by rank", "last turn", "last turn by rank", "asked again")
_OWN_TURN = np.where(_OWN >= 2, _OWN, -1)
_COMPANIONS = _groups("companions", "companions by rank")
_FOLLOW = _groups("used to follow")
_EARLIER = _groups("earlier turns")

_REPEAT_WEIGHT = 0.1  # what a repeat inside one session adds to popularity
_PRIOR_HITS = 5.0  # accesses that a first weight stands for
_PRIOR = 3.0  # observations that a conditional share must outweigh
_DEGREE_MAX = 64  # companions and followers kept per key
# Of a request's keys so many, the best, are linked to each other: the work grows with their square.
_LINKED_MAX = 256
_EXPONENT_MAX = 200.0
_EARLIER_FADE = 0.8
_SUMMED_ANEW_REQUESTS = 4096  # so that what rounding adds to running sums stays without meaning


@dataclass(slots=True)
class _Part:
    """Amounts added to some rows: int64 (n,), float64 (n, groups), int64 (terms,)."""

    rows: Ints
    amounts: Floats
    groups: Ints


@dataclass(slots=True)
class _Turn:
    """What is known of a session after its last request."""

    time_s: float
    keys: list[int]
    earlier: dict[int, float]
    streak: dict[int, int]
    turns: int
    promised: list[_Part]  # as it was added


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
        self._sums = np.zeros(len(_TERMS))  # of the columns of _x
        self._landmarks = np.zeros(len(_TERMS))  # seconds; excitations are grown since then
        self._landmarks_until = -1.0
        self._now = 0.0
        self._fading = np.ones(len(_TERMS))  # from the landmarks to now
        self.weights = _WEIGHTS.copy()
        # Attributed accesses and exposure per term: their ratio is the weight. The prior keeps
        # a term that the stream has not touched yet at its first value.
        self._hits = np.full(len(_TERMS), _PRIOR_HITS)
        self._exposure = _PRIOR_HITS / _WEIGHTS
        self._renewed_hits = (1.0 - self._fade) * _PRIOR_HITS
        self._renewed_exposure = self._renewed_hits / _WEIGHTS
        self._sessions: OrderedDict[Hashable, _Turn] = OrderedDict()
        self._companions = LinkCounts(degree=_DEGREE_MAX)
        self._followers = LinkCounts(degree=_DEGREE_MAX)
        self.requests = 0

    def number(self, key: Hashable) -> int | None:
        """Return the key's row in `rates`, or None when it was never seen."""
        return self._numbers.get(key)

    def rates(self, rows: Sequence[int] | None = None) -> Rates:
        """Return expected accesses per key by the next request, float32, shape (len(keys),).

        Hours after the request that first brought them, two keys differ by rounding alone; as
        float32 they are equal, and whoever compares them decides by the row.

        Args:
            rows: Only of these keys, shape (len(rows),); None means all.
        """
        values = self._x[: len(self.keys)] if rows is None else self._x[rows]
        return weighted_rows(values, self.weights * self._fading, _BASE, len(values))

    def explain(self, key: Hashable) -> dict[str, float]:
        """Return the terms of one key's forecast, largest first; empty when unknown."""
        row = self._numbers.get(key)
        if row is None:
            return {}
        scaled = self.weights * self._fading
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
        at = np.array(rows, dtype=np.int64)
        self._excite(rows, at, session)
        together = at[:_LINKED_MAX]
        self._companions.add(together, together)
        self.requests += 1
        if self.requests % _SUMMED_ANEW_REQUESTS == 0:
            self._sums = self._x[: len(self.keys)].sum(axis=0)
        return kept

    def _advance(self, now: float) -> None:
        self._now = now
        if now > self._landmarks_until:
            exponent = (now - self._landmarks) / _TAUS
            late = np.flatnonzero(exponent > 0.5 * _EXPONENT_MAX)
            faded = np.exp(-exponent[late])
            self._x[:, late] *= faded
            self._sums[late] *= faded
            self._landmarks[late] = now
            self._landmarks_until = float((self._landmarks + _EXPONENT_MAX * _TAUS).min())
        self._fading = np.exp((self._landmarks - now) / _TAUS)

    def _learn(self, known: list[int]) -> None:
        if not self.keys:
            return
        self._hits *= self._fade
        self._exposure *= self._fade
        self._hits += self._renewed_hits
        self._exposure += self._renewed_exposure
        self._exposure += self._sums * self._fading
        if known:
            rows = np.array(known, dtype=np.int64)
            add_shares(self._x, rows, self._fading * self.weights, _BASE, self._hits)
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

    def _excite(self, rows: list[int], at: Ints, session: Hashable | None) -> None:
        grown = np.exp((self._now - self._landmarks) / _TAUS)
        before = self._withdraw(session)
        earlier: dict[int, float] = {}
        streak = dict.fromkeys(rows, 1)
        turns = 1
        if before is not None and self._now - before.time_s <= self._gap_s:
            followed = np.array(before.keys[:_LINKED_MAX], dtype=np.int64)
            self._followers.add(followed, at[:_LINKED_MAX])
            streak = {row: before.streak.get(row, 0) + 1 for row in rows}
            earlier = before.earlier
            turns = before.turns + 1
        lively = 1.0 + 0.15 * min(turns - 1, 5)  # long sessions tend to go on
        turn = 0.0 if session is None else lively
        amounts = []
        for rank, row in enumerate(rows, start=1):
            by_rank = 1.0 / rank
            popular = _REPEAT_WEIGHT if row in earlier else 1.0
            again = turn * min(streak[row] - 1, 4)
            amounts.append((popular, popular * by_rank, turn, turn * by_rank, again))
        own = np.array(amounts)
        ranked = _RANKED[: len(rows)] if len(rows) <= len(_RANKED) else _ranked(len(rows))
        self._add(_Part(at, own, _OWN), grown)
        others, shares = self._companions.spread(at, ranked, prior=_PRIOR)
        self._add(_Part(others, shares, _COMPANIONS), grown)
        if session is None:
            return
        promised = [_Part(at, own, _OWN_TURN)]
        others, shares = self._followers.spread(at, lively * ranked[:, 1:], prior=_PRIOR)
        if len(others):
            promised.append(_Part(others, shares, _FOLLOW))
        onward = {r: lively * v for r, v in earlier.items() if r not in streak}
        if onward:
            onward_rows = np.array(list(onward), dtype=np.int64)
            onward_amounts = np.array(list(onward.values()))[:, None]
            promised.append(_Part(onward_rows, onward_amounts, _EARLIER))
        for part in promised[1:]:
            self._add(part, grown)
        self._remember(session, _Turn(self._now, rows, earlier, streak, turns, promised))

    def _add(self, part: _Part, grown: Floats) -> None:
        add_excitations(self._x, self._sums, part.rows, part.amounts, part.groups, grown)

    def _withdraw(self, session: Hashable | None) -> _Turn | None:
        """Take back what the session's last turn promised for its next one, which is now."""
        if session is None:
            return None
        before = self._sessions.pop(session, None)
        if before is not None:
            grown = np.exp((before.time_s - self._landmarks) / _TAUS)
            for part in before.promised:
                withdraw_excitations(
                    self._x, self._sums, part.rows, part.amounts, part.groups, grown
                )
        return before

    def _remember(self, session: Hashable, turn: _Turn) -> None:
        """Keep a session's turn for its next one; ``turn.earlier`` is that of the turn before."""
        seen = {row: v * _EARLIER_FADE for row, v in turn.earlier.items() if v > 0.1}
        for row in turn.keys:
            seen[row] = seen.get(row, 0.0) + 1.0
        turn.earlier = seen
        self._sessions[session] = turn
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
        self._sums = self._x.sum(axis=0)
        self._companions.renumber(number)
        self._followers.renumber(number)
        renumber = number.tolist()
        for turn in self._sessions.values():
            for part in turn.promised:
                alive = number[part.rows] >= 0
                part.rows, part.amounts = number[part.rows[alive]], part.amounts[alive]
            turn.keys = [renumber[k] for k in turn.keys if renumber[k] >= 0]
            turn.earlier = {renumber[k]: v for k, v in turn.earlier.items() if renumber[k] >= 0}
            turn.streak = {renumber[k]: v for k, v in turn.streak.items() if renumber[k] >= 0}
        return kept
