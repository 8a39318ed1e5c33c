"""No stale reuse past the fence, under random searches, changes, merges, lag and restarts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from stoker.kvcache.lookup import LookupReuse, Refusal, Reuse
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tenant_lookups import Fence

DIM, K = 6, 3
QUESTIONS = [f"what is item{name}" for name in "abc"]


def unit(seed: int) -> NDArray[np.float32]:
    vector = np.random.default_rng((41, seed)).standard_normal(DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


class FenceMachine(RuleBasedStateMachine):
    """A replica answers from any state since the last merge; every reuse is checked by search."""

    @initialize(known=st.booleans())
    def start(self, known: bool) -> None:
        self.known = known  # whether changes are recorded with vectors, or come as a surprise
        self.documents: dict[str, NDArray[np.float32]] = {f"d{n}": unit(n) for n in range(6)}
        self.generation, self.offset = 1, 0
        self.states = {0: dict(self.documents)}  # change offset -> documents
        self.merged_at = 0
        self.serial = 100
        self.restart()

    @rule(really=st.integers(0, 5))
    def maybe_restart(self, really: int) -> None:
        if really == 3:  # seldom: what is forgotten cannot be stale
            self.restart()

    def restart(self) -> None:
        self.reuse = LookupReuse(
            KvcacheSettings(reuse_entries_max=5, reuse_exact_entries_max=3), rng=random.Random(1)
        )

    def truth(self, offset: int, query: NDArray[np.float32]) -> tuple[list[str], list[float]]:
        scored = sorted(
            ((float(vector @ query), name) for name, vector in self.states[offset].items()),
            reverse=True,
        )[:K]
        return [name for _, name in scored], [score for score, _ in scored]

    @rule(question=st.integers(0, 2), lag=st.integers(0, 3), behind=st.integers(0, 2))
    def search(self, question: int, lag: int, behind: int) -> None:
        """Ask with a fence ``behind`` the newest; on a miss, search a replica ``lag`` behind."""
        query = unit(500 + question)
        fence = Fence(self.generation, max(self.merged_at, self.offset - behind))
        decision = self.reuse.lookup("acme", QUESTIONS[question], query, fence)
        if isinstance(decision, Reuse):
            found = list(decision.result_ids)
            valid = [
                self.truth(offset, query)[0]
                for offset in range(fence.change_offset, self.offset + 1)
            ]
            assert found in valid, (found, valid)
            return
        assert isinstance(decision, Refusal)
        at = max(self.merged_at, self.offset - lag)
        ids, scores = self.truth(at, query)
        self.reuse.store(
            "acme", QUESTIONS[question], query, ids, scores, Fence(self.generation, at),
            similarity_floor=scores[-1] if len(ids) == K else None, after=decision,
        )  # fmt: skip

    @rule(name=st.integers(0, 8), told=st.booleans())
    def upsert(self, name: int, told: bool) -> None:
        self.serial += 1
        vector = unit(self.serial)
        self.documents[f"d{name}"] = vector
        self.changed(f"d{name}", vector[None, :] if told else None)

    @rule(pick=st.integers(0, 8), told=st.booleans())
    def delete(self, pick: int, told: bool) -> None:
        if len(self.documents) > 1:
            name = sorted(self.documents)[pick % len(self.documents)]
            del self.documents[name]
            self.changed(name, np.zeros((0, DIM), np.float32), told=told)

    def changed(self, name: str, vectors: NDArray[np.float32] | None, *, told: bool = True) -> None:
        """Change a document; where nobody is told, the next change says since when it speaks."""
        self.offset += 1
        self.states[self.offset] = dict(self.documents)
        if self.known and told:
            self.reuse.record_change(
                "acme", Fence(self.generation, self.offset), changed_ids=[name], vectors=vectors,
                since=self.offset - 1,
            )  # fmt: skip

    @rule(really=st.integers(0, 3))
    def merge(self, really: int) -> None:
        if really == 2:
            self.generation += 1
            self.merged_at = self.offset

    @invariant()
    def checks(self) -> None:
        self.reuse.check()


FenceMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestFences = FenceMachine.TestCase


@pytest.mark.parametrize("known", [True, False])
def test_evenly_drawn_walks_find_no_stale_reuse(known: bool) -> None:
    """The same steps, drawn evenly: what takes several in a row is met some dozen times."""
    rng = random.Random(43)
    for _ in range(400):
        machine = FenceMachine()
        machine.start(known=known)
        for _ in range(40):
            step = rng.choice(["search", "search", "upsert", "delete", "merge", "restart"])
            if step == "search":
                machine.search(
                    question=rng.randrange(3), lag=rng.randrange(4), behind=rng.randrange(3)
                )
            elif step == "upsert":
                machine.upsert(name=rng.randrange(9), told=rng.random() < 0.5)
            elif step == "delete":
                machine.delete(pick=rng.randrange(9), told=rng.random() < 0.5)
            elif step == "merge":
                machine.merge(really=rng.randrange(4))
            else:
                machine.maybe_restart(really=rng.randrange(6))
        machine.checks()
