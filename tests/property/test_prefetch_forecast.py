"""The session forecast and its cache against a slow, obvious model: same rates, same decisions."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from stoker.prefetch import forecast as terms
from stoker.prefetch.arena import Arena
from stoker.prefetch.forecast import SessionForecast
from stoker.prefetch.forecast_cache import ForecastCache

TAUS, BASE = terms._TAUS.tolist(), 5e-5
SESSION_NAMES = {"last turn", "last turn by rank", "asked again", "used to follow", "earlier turns"}
Values = dict[str, dict[Hashable, float]]  # name of a term -> key -> amount


class Counts:
    """What goes with a key, in dictionaries."""

    def __init__(self) -> None:
        self.seen: dict[Hashable, float] = {}
        self.rows: dict[Hashable, dict[Hashable, float]] = {}

    def add(self, key: Hashable, others: list[Hashable]) -> None:
        self.seen[key] = self.seen.get(key, 0.0) + 1.0
        row = self.rows.setdefault(key, {})
        for other in others:
            if other != key:
                row[other] = row.get(other, 0.0) + 1.0
        if len(row) > 128:
            strongest = sorted(row.items(), key=lambda item: -item[1])
            self.rows[key] = dict(strongest[:64])

    def spread(self, key: Hashable, amount: float, into: dict[Hashable, float]) -> None:
        for other, count in self.rows.get(key, {}).items():
            into[other] = into.get(other, 0.0) + amount / (self.seen[key] + 3.0) * count


class PlainForecast:
    """Everything fades at every request; every sum is taken anew; a list per key."""

    def __init__(self) -> None:
        self.x: dict[Hashable, list[float]] = {}
        self.weights = terms._WEIGHTS.tolist()
        self.hits = [5.0] * len(TAUS)
        self.exposure = [5.0 / weight for weight in self.weights]
        self.now = 0.0
        self.together, self.after = Counts(), Counts()
        self.sessions: dict[Hashable, dict[str, Any]] = {}

    def parts(self, key: Hashable) -> list[float]:
        return [x * w for x, w in zip(self.x[key], self.weights, strict=True)]

    def rates(self) -> dict[Hashable, float]:
        return {key: float(np.float32(sum(self.parts(key)) + BASE)) for key in self.x}

    def observe(self, keys: list[Hashable], session: Hashable | None, now: float) -> None:
        gap, self.now = now - self.now, now
        for row in self.x.values():
            row[:] = [v * math.exp(-gap / tau) for v, tau in zip(row, TAUS, strict=True)]
        self.learn([key for key in keys if key in self.x])
        for key in keys:
            self.x.setdefault(key, [0.0] * len(TAUS))
        self.excite(keys, session)
        for key in keys:
            self.together.add(key, keys)

    def learn(self, known: list[Hashable]) -> None:
        if not self.x:
            return
        fade = 1.0 - 1.0 / 1500.0
        shares = []
        for key in known:
            parts = self.parts(key)
            shares.append([part / (sum(parts) + BASE) for part in parts])
        for term, first in enumerate(terms._WEIGHTS.tolist()):
            seen = sum(row[term] for row in self.x.values())
            self.exposure[term] = self.exposure[term] * fade + (1.0 - fade) * 5.0 / first + seen
            self.hits[term] = self.hits[term] * fade + (1.0 - fade) * 5.0
            self.hits[term] += sum(share[term] for share in shares)
        self.weights = [h / e for h, e in zip(self.hits, self.exposure, strict=True)]

    def change(self, amounts: Values, *, names: set[str], age_s: float, sign: float) -> None:
        for term, (name, tau) in enumerate(zip(terms._NAMES, TAUS, strict=True)):
            if name in names:
                for key, amount in amounts[name].items():
                    moved = self.x[key][term] + sign * amount * math.exp(-age_s / tau)
                    self.x[key][term] = max(0.0, moved)

    def excite(self, keys: list[Hashable], session: Hashable | None) -> None:
        amounts: Values = {name: {} for name in terms._NAMES}
        earlier: dict[Hashable, float] = {}
        streak = dict.fromkeys(keys, 1)
        turns = 1
        before = self.sessions.pop(session, None) if session is not None else None
        if before is not None:
            age_s = self.now - before["time_s"]
            self.change(before["amounts"], names=SESSION_NAMES, age_s=age_s, sign=-1.0)
            if age_s <= 1800.0:
                for key in before["keys"]:
                    self.after.add(key, keys)
                streak = {key: before["streak"].get(key, 0) + 1 for key in keys}
                earlier, turns = before["earlier"], before["turns"] + 1
        lively = 1.0 + 0.15 * min(turns - 1, 5)
        for rank, key in enumerate(keys, start=1):
            amounts["popularity"][key] = 0.1 if key in earlier else 1.0
            amounts["popularity by rank"][key] = amounts["popularity"][key] / rank
            self.together.spread(key, 1.0, amounts["companions"])
            self.together.spread(key, 1.0 / rank, amounts["companions by rank"])
            if session is not None:
                amounts["last turn"][key] = lively
                amounts["last turn by rank"][key] = lively / rank
                amounts["asked again"][key] = lively * min(streak[key] - 1, 4)
                self.after.spread(key, lively / rank, amounts["used to follow"])
        if session is not None:
            onward = {key: lively * v for key, v in earlier.items() if key not in streak}
            amounts["earlier turns"] = onward
            seen = {key: value * 0.8 for key, value in earlier.items() if value > 0.1}
            for key in keys:
                seen[key] = seen.get(key, 0.0) + 1.0
            self.sessions[session] = {
                "time_s": self.now,
                "keys": keys,
                "earlier": seen,
                "streak": streak,
                "turns": turns,
                "amounts": amounts,
            }
        self.change(amounts, names=set(terms._NAMES), age_s=0.0, sign=1.0)


class PlainCache:
    """The same content by sorting everything; of equals, the key that was seen first counts less
    when one has to leave, and more when one may come."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.forecast = PlainForecast()
        self.inside: set[Hashable] = set()
        self.fresh: set[Hashable] = set()

    def close(self, keys: list[Hashable], session: Hashable | None, now: float) -> None:
        self.fresh -= set(keys)
        self.forecast.observe(keys, session, now)
        before = set(self.inside)
        rates, age = self.forecast.rates(), {key: at for at, key in enumerate(self.forecast.x)}
        self.inside |= set(keys)
        least = sorted(self.inside, key=lambda key: (rates[key], age[key]))
        over = max(0, len(least) - self.capacity)
        self.inside -= set(least[:over])
        free = self.capacity - len(self.inside)
        least = least[over:]
        away = [key for key in self.forecast.x if key not in self.inside]
        best = sorted(away, key=lambda key: (-rates[key], age[key]))
        best = best[: max(0, min(64, int(self.capacity * 0.5) - len(self.fresh)))]
        self.inside |= set(best[:free])
        for newcomer, leaver in zip(best[free:], least, strict=False):
            if np.float32(rates[newcomer]) > np.float32(1.1) * np.float32(rates[leaver]):
                self.inside = (self.inside - {leaver}) | {newcomer}
        self.fresh = (self.fresh & self.inside) | (self.inside - before - set(keys))


def requests(count: int, *, seed: int) -> list[tuple[float, Hashable | None, list[Hashable]]]:
    """Sessions on topics, some requests without one; gaps from nothing to hours."""
    rng = np.random.default_rng(seed)
    made: list[tuple[float, Hashable | None, list[Hashable]]] = []
    now, open_sessions = 1.7e9, [(0, 1)]
    for number in range(count):
        now += float(rng.choice([0.0, 5.0, 60.0, 4000.0], p=[0.1, 0.4, 0.45, 0.05]))
        session, topic = open_sessions[int(rng.integers(len(open_sessions)))]
        if rng.random() < 0.4:
            session, topic = number, int(rng.zipf(1.3)) % 15
            open_sessions = [*open_sessions[-3:], (session, topic)]
        keys: list[Hashable] = (topic * 8 + rng.permutation(11)[: int(rng.integers(1, 7))]).tolist()
        made.append((now, None if number % 11 == 10 else session, keys))
    return made


@pytest.mark.parametrize(("capacity", "seed"), [(12, 1), (40, 2)])
def test_decisions_are_those_of_the_plain_model(capacity: int, seed: int) -> None:
    cache, plain = ForecastCache(capacity, SessionForecast()), PlainCache(capacity)
    for now, session, keys in requests(250, seed=seed):
        for key in keys:
            assert cache.access(key) == (key in plain.inside)
        cache.observe(keys, session, now)
        cache.renew(swap=True)
        plain.close(keys, session, now)
        rates = plain.forecast.rates()
        assert cache.forecast.rates().tolist() == pytest.approx(list(rates.values()), rel=1e-6)
        assert {key for key in rates if key in cache} == plain.inside
        assert len(cache) == len(plain.inside) <= capacity


@pytest.mark.parametrize("each", [1, 5])
@pytest.mark.parametrize("swap", [True, False])
def test_what_came_and_left_is_what_is_there(each: int, swap: bool) -> None:
    """Also where keys are forgotten, and where the content is renewed only every few requests."""
    cache = ForecastCache(24, SessionForecast(keys_max=48, sessions_max=6))
    arena = Arena(24)
    arena.enter(cache)
    there: set[Hashable] = set()
    forgotten = False
    for at, (now, session, keys) in enumerate(requests(600, seed=3), start=1):
        for key in keys:
            arena.access(key)
        before = len(cache.forecast.keys)
        cache.observe(keys, session, now)
        shrunk = len(cache.forecast.keys) < before
        forgotten |= shrunk
        gone, came = cache.renew(swap=swap) if at % each == 0 else cache.admit(keys)
        there = (there - set(gone)) | set(came)
        if arena.forecast_acts:
            arena.follow(gone, came)
        assert len(cache) <= 24
        assert cache._fresh <= there
        if at % each == 0:
            assert there == {key for key in cache.forecast.keys if key in cache}
            assert len(cache) == len(there)
            arena.check()
        elif not shrunk:
            assert all(key in cache for key in came)
            assert not any(key in cache for key in gone)
    assert forgotten


def test_between_renewals_newcomers_take_the_room_of_the_least() -> None:
    cache = ForecastCache(12, SessionForecast())
    now = 0.0
    for now, session, keys in requests(200, seed=5):
        cache.observe(keys, session, now)
        cache.renew(swap=False)
    rates = dict(zip(cache.forecast.keys, cache.forecast.rates().tolist(), strict=True))
    rising = sorted((key for key in rates if key in cache), key=rates.__getitem__)
    seen = set()
    for number in range(80):
        keys: list[Hashable] = [f"new {number // 4}"]
        cache.observe(keys, "new", now + 30.0 * number)
        row = cache.forecast.number(keys[0])
        assert row is not None
        was, rate = keys[0] in cache, float(cache.forecast.rates([row])[0])
        gone, came = cache.admit(keys)
        comes = not was and bool(rising) and rate > rates[rising[0]]
        assert (gone, came) == (([rising.pop(0)], keys) if comes else ([], []))
        seen.add((was, comes))
        assert len(cache) == 12
    assert seen == {(False, True), (False, False), (True, False)}


def test_running_sums_are_those_of_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = SessionForecast(keys_max=64)
    for now, session, keys in requests(400, seed=4):
        forecast.observe(keys, session, now)
        exact = forecast._x[: len(forecast.keys)].sum(axis=0) * forecast._fading
        assert (forecast._sums * forecast._fading).tolist() == pytest.approx(exact, abs=1e-9)
    monkeypatch.setattr(terms, "_SUMMED_ANEW_REQUESTS", 1)
    forecast.observe(["a"], None, 2e9)
    assert forecast._sums.tolist() == forecast._x[: len(forecast.keys)].sum(axis=0).tolist()


class CountedLinks:
    """Links that count how many pairs they were told of."""

    def __init__(self, links: Any) -> None:
        self.links, self.pairs = links, 0

    def add(self, before: Any, after: Any) -> None:
        self.pairs += len(before) * len(after)
        self.links.add(before, after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.links, name)


def test_a_request_of_thousands_links_its_best_alone() -> None:
    """The work of a request must not grow with the square of what it asks for."""
    pairs = []
    for count in (600, 2_400):
        forecast = SessionForecast()
        counted = [CountedLinks(forecast._companions), CountedLinks(forecast._followers)]
        forecast._companions, forecast._followers = counted  # type: ignore[assignment]
        for turn in range(2):
            forecast.observe(list(range(turn, turn + count)), "s", 60.0 * turn)
        pairs.append([links.pairs for links in counted])
        assert len(forecast.keys) == count + 1
    assert pairs[0] == pairs[1]
