"""Leases in an engine that counts: rate, fence, hottest first, and an engine that fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker.errors import InputError, UnavailableError
from stoker.kvcache.engine_warm import ContentKey, EngineWarmer, Ticket

BURST, RATE, LEASES, LEASE_S = 50, 5.0, 4, 12.0


class CountingEngine:
    """Keeps what it was asked for until its lease ends, by the test's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.down = False
        self.asked: list[tuple[float, int]] = []
        self.kept: dict[Ticket, tuple[int, float]] = {}

    def prefetch(self, token_ids: Sequence[int], *, lease_s: float, generation: int) -> Ticket:
        if self.down:
            raise UnavailableError("the engine is down")
        self.asked.append((self.now, len(token_ids)))
        ticket = Ticket(f"{generation}:{list(token_ids)}")
        self.kept[ticket] = (generation, self.now + lease_s)
        return ticket

    def release(self, ticket: Ticket) -> None:
        if self.down:
            raise UnavailableError("the engine is down")
        self.kept.pop(ticket, None)


def tokens_of(key: ContentKey) -> list[int] | None:
    number = int(key[1])
    return None if number == 9 else [number] * (5 + 10 * number)


class WarmerMachine(RuleBasedStateMachine):
    """Heat, time, generations and failures in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = CountingEngine()
        self.warmer = EngineWarmer(
            self.engine, tokens_per_s_max=RATE, tokens_burst=BURST, leases_max=LEASES,
            lease_s=LEASE_S, clock=lambda: self.engine.now,
        )  # fmt: skip
        self.generation = 1

    @rule(heat=st.dictionaries(st.integers(0, 9), st.floats(-1, 5), max_size=8))
    def warm(self, heat: dict[int, float]) -> None:
        keys = {("t", str(number)): weight for number, weight in heat.items()}
        outcome = self.warmer.warm(keys, tokens_of, generation=self.generation)
        wanted = [key for key, weight in keys.items() if weight > 0]
        told = outcome.sent + outcome.renewed + outcome.held + outcome.rate_limited
        assert told + outcome.unknown + outcome.failed == len(wanted)
        assert self.warmer.leased() <= set(wanted)
        assert ("t", "9") not in self.warmer.leased()
        assert ("t", "8") not in self.warmer.leased(), "longer than the burst"
        if not self.engine.down:
            live = {t for t, (_, ends_s) in self.engine.kept.items() if ends_s > self.engine.now}
            if outcome.failed == 0 and outcome.released == 0:
                assert len(self.warmer.leased()) <= len(live)

    @rule(seconds=st.floats(0.1, 8))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule()
    def merge(self) -> None:
        self.generation += 1

    @rule(down=st.booleans())
    def break_or_mend(self, down: bool) -> None:
        self.engine.down = down

    @invariant()
    def within_bounds(self) -> None:
        self.warmer.check()
        asked = self.engine.asked
        for place, (start_s, _) in enumerate(asked):
            total = 0
            for at_s, tokens in asked[place:]:
                total += tokens
                assert total <= BURST + RATE * (at_s - start_s) + 1e-6


WarmerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestEngineWarmer = WarmerMachine.TestCase


def test_hottest_first_leases_renewed_and_old_generations_released() -> None:
    engine = CountingEngine()
    warmer = EngineWarmer(
        engine, tokens_per_s_max=100.0, tokens_burst=100, leases_max=2, lease_s=9.0,
        clock=lambda: engine.now,
    )  # fmt: skip
    heat = {("t", "1"): 1.0, ("t", "2"): 3.0, ("t", "0"): 2.0}
    outcome = warmer.warm(heat, tokens_of, generation=1)
    assert (outcome.sent, outcome.rate_limited) == (2, 1)
    assert warmer.leased() == {("t", "2"), ("t", "0")}
    engine.now = 4.0
    assert warmer.warm(heat, tokens_of, generation=1).held == 2
    engine.now = 7.0
    assert warmer.warm(heat, tokens_of, generation=1).renewed == 2
    outcome = warmer.warm(heat, tokens_of, generation=2)
    assert (outcome.released, outcome.sent) == (2, 2)
    assert {generation for generation, _ in engine.kept.values()} == {2}
    warmer.close()
    assert engine.kept == {}


def test_a_failing_engine_is_left_alone_for_the_round() -> None:
    engine = CountingEngine()
    warmer = EngineWarmer(engine, clock=lambda: engine.now)
    engine.down = True
    outcome = warmer.warm({("t", "1"): 1.0, ("t", "2"): 1.0}, tokens_of, generation=1)
    assert (outcome.failed, outcome.sent) == (2, 0)
    engine.down = False
    assert warmer.warm({("t", "1"): 1.0}, tokens_of, generation=1).sent == 1


def test_senseless_bounds_are_refused() -> None:
    with pytest.raises(InputError, match="above 0"):
        EngineWarmer(CountingEngine(), lease_s=0.0)
