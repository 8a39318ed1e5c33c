"""Numpy's products on one thread, for work that spreads itself over the cores in another way.

A thread of OpenBLAS's pool spins for tens of milliseconds after each product, on a core that other
threads could use: beside threads that code vectors, products on two threads took a seal from 0.8 s
to 1.1 s, and from 1.4 s to 2.1 s of processor time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, Final

from threadpoolctl import ThreadpoolController


class _Limit:
    """How many parts of the process want products on one thread; the last to leave undoes it.

    The number is the process's own: were each to put back what it found, two that overlap could
    leave it at one for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._undo = contextlib.ExitStack()

    def enter(self) -> None:
        with self._lock:
            if self._wanted == 0:
                self._undo.enter_context(_blas().limit(limits=1))
            self._wanted += 1

    def leave(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                self._undo.close()


@functools.cache
def _blas() -> Any:
    return ThreadpoolController().select(user_api="blas")


_LIMIT: Final = _Limit()


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep products on the thread that asks for them, in all of the process, until it is left."""
    _LIMIT.enter()
    try:
        yield
    finally:
        _LIMIT.leave()
