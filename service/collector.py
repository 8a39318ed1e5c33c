"""Python's garbage collector, told what lives as long as the server does.

A full collection walks every object there is, with the interpreter's lock in hand: 44 ms among the
68,000 of a server that had just started, and a search that meets it waits as long. Nearly all of
them are modules, classes and functions, which never become garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Never collect what is made inside; collect as before what is made afterwards.

    Nothing is collected meanwhile either: opening a server would do so two or three times. What is
    garbage by then and lies in cycles is never given back, so this is for a start, once.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
