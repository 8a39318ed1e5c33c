"""Group keys of searches: which questions of the last seconds ask for the same thing.

The key goes into the answer and into the event of a search, so that whoever reads either can tell
a burst (many sessions, one need) from many needs; the metrics tell how often a search that came
together with others was spared the index.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from stoker.kvcache.group_key import GroupKeys
from stoker.service.kv_events import need_package


class LookupGroups:
    """The windows of all tenants. Safe from several threads.

    Invariant: never more than ``tenants_max`` windows; one tenant's questions are in one window,
    and no other tenant's key depends on them. A window that is over is dropped, with its vectors.

    Args:
        window_s: Width of a window; seconds.
        tenants_max: Tenants with a window; the longest idle one goes first.

    Raises:
        UnavailableError: scikit-learn is missing.
    """

    def __init__(self, *, window_s: float, tenants_max: int) -> None:
        need_package("sklearn.cluster", extra="models")
        self._window_s = window_s
        self._tenants_max = tenants_max
        self._lock = threading.Lock()
        # Lock, window and time of the newest question, the longest idle tenant first.
        self._tenants: OrderedDict[str, tuple[threading.Lock, GroupKeys, float]] = OrderedDict()

    def key(self, tenant: str, text: str, vector: NDArray[np.float32], time_s: float) -> str:
        """Take a question into its tenant's window and return its key.

        Raises:
            InputError: the vector is all zero, or of another dimension than the last.
        """
        with self._lock:
            self._drop_idle(time_s)
            held = self._tenants.pop(tenant, None)
            if held is None:
                held = (threading.Lock(), GroupKeys(window_s=self._window_s), time_s)
            lock, groups, newest = held
            self._tenants[tenant] = (lock, groups, max(newest, time_s))
            while len(self._tenants) > self._tenants_max:
                self._tenants.popitem(last=False)
        with lock:
            groups.add(text, vector, time_s)
            return groups.key_of(text, time_s)

    def count(self, time_s: float) -> int:
        """Return how many groups there are now, all tenants together."""
        with self._lock:
            self._drop_idle(time_s)
            tenants = list(self._tenants.values())
        total = 0
        for lock, groups, _ in tenants:
            with lock:
                total += groups.group_count(time_s)
        return total

    def _drop_idle(self, time_s: float) -> None:
        while self._tenants:
            tenant, (_, _, newest) = next(iter(self._tenants.items()))
            if newest > time_s - self._window_s:
                return
            del self._tenants[tenant]


def is_grouped(key: str) -> bool:
    """Tell whether a question with this key came together with another."""
    return bool(key) and "|grp:-|" not in key
