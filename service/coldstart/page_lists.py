"""The ways to warm an index that Stoker is compared with, each as a list of pages to load in order.

All are given the same budget of bytes and are loaded by the same code, so that only the choice and
its order differ. Two look at files alone (sequential, level order), three at the pages needed
before the stop (last blocks, most recent, W-TinyLFU's content), and one at the future (oracle).
Pages before the stop are numbered by the layout of then: after a rebuild they name other content,
which is how such lists fail.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.index.manifest import Manifest
from stoker.service.coldstart.load_job import KINDS
from stoker.service.coldstart.page_trace import PageTrace, page_keys

Keys = NDArray[np.int64]

_UPPER, _LINKS, _CODES, _REFINE, _VECTORS = range(5)


def sequential(pages: Mapping[str, int]) -> Keys:
    """Return all pages file by file from the start: what reading the folder through does.

    Args:
        pages: How many pages each kind has.
    """
    # The upper pages lie at the head of the links and the codes.
    order = (_UPPER, _CODES, _LINKS, _REFINE, _VECTORS)
    return np.concatenate([_whole(code, pages) for code in order])


def level_order(
    manifest: Manifest, rows_by_id: NDArray[np.int64], pages: Mapping[str, int]
) -> Keys:
    """Return the upper levels, then each node's pages in the order of the ids.

    Args:
        rows_by_id: int64, shape (count,): the row of the 1st, 2nd, ... id.
    """
    m = manifest
    links_per_page = m.levels[0].per_page
    upper_codes = -(-m.levels[1].count // m.code_per_page) if len(m.levels) > 1 else 0
    rows = rows_by_id.astype(np.int64)
    first = rows * m.vector_record_bytes // m.page_bytes
    last = ((rows + 1) * m.vector_record_bytes - 1) // m.page_bytes
    table = np.stack(
        [
            _keys(_LINKS, rows // links_per_page),
            _keys(_CODES, rows // m.code_per_page - upper_codes),
            _keys(_REFINE, rows // m.refine_per_page),
            _keys(_VECTORS, first),
            _keys(_VECTORS, last),
        ],
        axis=1,
    )
    found = np.concatenate([_whole(_UPPER, pages), table.reshape(-1)])
    # Codes of upper rows lie on upper pages, there already: the number made above is nobody's.
    known = np.concatenate([_whole(code, pages) for code in range(len(KINDS))])
    return _first_of_each(found[np.isin(found, known)])


def most_recent(trace: PageTrace) -> Keys:
    """Return the pages that were needed before the stop, the last ones first."""
    return _first_of_each(trace.keys()[::-1])


def most_needed(trace: PageTrace) -> Keys:
    """Return the pages that a trace needs, by how many of its queries need them: the oracle's.

    All pages are of one size, so the number of queries is the benefit per byte. Ties go to what is
    needed earlier.
    """
    keys, first, count = np.unique(trace.keys(), return_index=True, return_counts=True)
    return np.asarray(keys[np.lexsort((first, -count))])


def w_tinylfu_content(trace: PageTrace, capacity: int) -> Keys:
    """Return what W-TinyLFU holds after a trace, the pages needed last first.

    Raises:
        UnavailableError: the package libcachesim is not installed.
    """
    try:
        library: Any = importlib.import_module("libcachesim")
    except ImportError as error:
        raise UnavailableError(
            "W-TinyLFU's content needs the package libcachesim (GPL-3.0, not installed with Stoker)"
        ) from error
    keys, numbers = np.unique(trace.keys(), return_inverse=True)
    cache = library.WTinyLFU(
        cache_size=max(2, capacity), hashpower=20, window_size=max(0.01, 1.001 / max(2, capacity))
    )
    request = library.Request()
    request.obj_size = 1
    for at, number in enumerate(numbers.tolist()):
        request.clock_time = at
        request.obj_id = number + 1
        cache.get(request)
    held = np.zeros(len(keys), dtype=bool)
    for number in range(len(keys)):
        request.obj_id = number + 1
        held[number] = cache.find(request, update_cache=False) is not None
    recent = most_recent(trace)
    return recent[held[np.searchsorted(keys, recent)]]


def _keys(code: int, units: NDArray[np.int64]) -> Keys:
    return page_keys(np.full(len(units), code, np.uint8), units.astype(np.uint32))


def _whole(code: int, pages: Mapping[str, int]) -> Keys:
    return _keys(code, np.arange(pages.get(KINDS[code], 0)))


def _first_of_each(keys: Keys) -> Keys:
    _, first = np.unique(keys, return_index=True)
    return np.asarray(keys[np.sort(first)])
