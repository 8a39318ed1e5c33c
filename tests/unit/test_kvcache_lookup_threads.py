"""Lookups, stores and document changes of several tenants at once leave every invariant whole."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.kvcache.lookup import LookupReuse, Refusal, Reuse
from stoker.kvcache.reuse_selector import Fitted, Outcomes
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tenant_lookups import Fence
from stoker.service.reuse_front import ReuseFront

DIM = 12


def test_threads_do_not_break_or_mix_anything() -> None:
    reuse = LookupReuse(
        KvcacheSettings(reuse_entries_max=60, reuse_exact_entries_max=20, reuse_tenants_max=3)
    )
    vectors = np.random.default_rng(11).standard_normal((40, DIM)).astype(np.float32)
    wrong: list[str] = []
    failed: list[BaseException] = []
    offset = {"a": 0, "b": 0, "c": 0}

    def ask(tenant: str, seed: int) -> None:
        try:
            rng = np.random.default_rng((13, seed))
            for _ in range(250):
                number = int(rng.integers(40))
                fence = Fence(1, offset[tenant])
                text = f"what about item{'abcdefghij'[number % 10]}{'klmn'[number // 10]}"
                decision = reuse.lookup(tenant, text, vectors[number], fence)
                if isinstance(decision, Reuse):
                    if any(not found.startswith(tenant) for found in decision.result_ids):
                        wrong.append(decision.result_ids[0])
                else:
                    assert isinstance(decision, Refusal)
                    ids = [f"{tenant}{number}-{rank}" for rank in range(3)]
                    reuse.store(
                        tenant, text, vectors[number], ids, np.ones(3), fence,
                        similarity_floor=0.9, after=decision,
                    )  # fmt: skip
        except BaseException as error:
            failed.append(error)

    def change(tenant: str) -> None:
        try:
            for number in range(60):
                fence = Fence(1, offset[tenant] + 1)
                reuse.record_change(
                    tenant, fence, changed_ids=[f"{tenant}{number % 40}-0"],
                    vectors=vectors[number % 40][None, :],
                )  # fmt: skip
                offset[tenant] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(t, n)) for n, t in enumerate("aabbcc")]
    threads += [threading.Thread(target=change, args=(t,)) for t in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    assert not wrong
    reuse.check()


def test_lookups_go_on_while_the_policy_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked from within a fit: a lock that was held there would be waited for without end."""
    reuse = LookupReuse(KvcacheSettings())
    vector = np.eye(DIM, dtype=np.float32)[0]
    fit, answered = Outcomes.fit, []

    def ask() -> None:
        answered.append(reuse.lookup("t", "what is asked beside the fit", vector, Fence(1, 1)))

    def asked_while_fitting(self: Outcomes) -> Fitted:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(timeout=60.0)
        return fit(self)

    monkeypatch.setattr(Outcomes, "fit", asked_while_fitting)
    learn(reuse, vector)
    assert len(answered) >= 2, "no lookup was answered while a fit ran"
    reuse.check()


def test_a_server_fits_in_a_thread_that_no_request_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reuse = LookupReuse(KvcacheSettings())
    front = ReuseFront(reuse, metric="cosine", off="")
    fit, threads, begun = Outcomes.fit, [], threading.Event()

    def named(self: Outcomes) -> Fitted:
        threads.append(threading.current_thread().name)
        begun.set()
        if len(threads) == 1:
            raise ValueError("a fit that fails makes room for the next")
        return fit(self)

    monkeypatch.setattr(Outcomes, "fit", named)
    vector = np.eye(DIM, dtype=np.float32)[0]
    learn(reuse, vector)
    assert begun.wait(timeout=60.0)
    assert front.close(60.0)
    learn(reuse, vector, tenant="u")  # nobody is left to hand it to: it is done here
    assert threads[0].startswith("reuse-verify")
    assert threads[-1] == threading.current_thread().name
    reuse.check()


def learn(reuse: LookupReuse, vector: NDArray[np.float32], *, tenant: str = "t") -> None:
    """Look up and store ninety questions near each other: from the sixtieth on fits are due."""
    rng = np.random.default_rng(17)
    for number in range(90):
        near = vector + np.float32(0.1) * rng.standard_normal(DIM).astype(np.float32)
        text = f"what is asked as {'abcdefghij'[number % 10]}{'klmnopqrst'[number // 10]}"
        decision = reuse.lookup(tenant, text, near, Fence(1, 1))
        reuse.store(tenant, text, near, ["d0"], np.ones(1), Fence(1, 1), after=decision)


@pytest.mark.parametrize("error", [UnavailableError("the index is away"), ValueError("a fault")])
def test_a_check_that_fails_is_told_and_costs_no_answer(error: Exception) -> None:
    front = ReuseFront(None, metric="cosine", off="")
    done = threading.Event()

    def fail() -> None:
        raise error

    with structlog.testing.capture_logs() as lines:
        front.verify(fail)  # in its thread
        front.verify(done.set)
        assert done.wait(30)
        assert front.close(60.0)
        front.verify(fail)  # in the request's
    told = [line["reason"] for line in lines if line["event"] == "service.reuse_unverified"]
    assert told == [str(error)] * 2


def test_checks_that_are_given_up_free_their_places() -> None:
    """Else a request that waits for a place while a server closes would wait without end."""
    front = ReuseFront(None, metric="cosine", off="")
    fitted, done = threading.Event(), threading.Event()

    def fit() -> None:
        fitted.wait(60)

    front._fit_beside(fit)
    for _ in range(16):
        front.verify(lambda: None)
    front._verifier.shutdown(wait=False, cancel_futures=True)
    waiting = threading.Thread(target=front.verify, args=(done.set,), daemon=True)
    waiting.start()
    waiting.join(30)
    assert not front.close(0.001), "who closes waits no longer than it says"
    fitted.set()
    assert front.close(60.0)
    assert done.is_set()
