"""Products stay on one thread while somebody wants that, and are as before afterwards."""

from __future__ import annotations

from threadpoolctl import threadpool_info, threadpool_limits

from stoker.index.blas_threads import one_blas_thread


def _threads() -> list[int]:
    return [int(pool["num_threads"]) for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_two_that_overlap_put_back_what_the_first_found() -> None:
    with threadpool_limits(limits=2, user_api="blas"):
        before = _threads()
        if before and max(before) > 1:
            first, second = one_blas_thread(), one_blas_thread()
            first.__enter__()
            second.__enter__()
            assert set(_threads()) == {1}
            first.__exit__(None, None, None)
            assert set(_threads()) == {1}
            second.__exit__(None, None, None)
        assert _threads() == before


def test_an_error_inside_lets_go() -> None:
    before = _threads()
    try:
        with one_blas_thread():
            raise KeyError("inside")
    except KeyError:
        pass
    assert _threads() == before
