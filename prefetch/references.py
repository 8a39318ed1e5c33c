"""The policies that ours is compared with, behind one face.

They come from the package `libcachesim`, which is loaded on first use and belongs to no install of
Stoker: its licence (GPL-3.0) is not ours, and only comparisons need it. Two are not in it, or not
usable there: "area", a scheme measured on RAG traffic (decayed frequency, and a fifth of the room
for what was just used), and "lfu-decay" (libcachesim 0.3.5's LFU with dynamic aging does not end
on some traces). In the smallest rooms, where its S3-FIFO and W-TinyLFU end the process or never
hit, those of `candidates` stand in. "qlearning" is our own as well: it decides between one tier and
NVMe. "entropy-regime" does what the access entropy asks for, "entropy-lru-k" its eviction alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError, UnavailableError
from stoker.prefetch.candidates import Candidate, DecayedFrequency, Lru, S3Fifo, WTinyLfu
from stoker.prefetch.entropy_regime import EntropyRegime
from stoker.prefetch.regime import Regime
from stoker.prefetch.tiered import QLearning

_NEVER = 1 << 60
_CHUNK = 1 << 16
# From how many keys on libcachesim 0.3.5's policy works: with fewer, a part of it has no room.
_S3_FIFO_MIN = 20
_W_TINYLFU_MIN = 6


class Reference(Protocol):
    """A policy that only says which accesses hit."""

    def run(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of hits, shape (n,), for accesses ``keys`` (int64, shape (n,))."""
        ...


class _Ours:
    def __init__(self, caches: Iterable[Candidate]) -> None:
        self._caches = list(caches)

    def run(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        hits = np.zeros(len(keys), dtype=bool)
        for at, key in enumerate(_numbers(keys)):
            # Every part sees every access: the parts hold the same key at most twice.
            answers = [cache.access(key) for cache in self._caches]
            hits[at] = any(answers)
        return hits


def _library() -> Any:
    try:
        return importlib.import_module("libcachesim")
    except ImportError as error:
        raise UnavailableError(
            "reference policies need the package libcachesim (GPL-3.0, not installed with "
            "Stoker): pip install libcachesim"
        ) from error


class _Library:
    def __init__(self, name: str, capacity: int, **options: Any) -> None:
        self._library: Any = _library()
        power = min(24, max(16, math.ceil(math.log2(capacity + 1)) + 2))
        factory = getattr(self._library, name)
        self._cache = factory(cache_size=capacity, hashpower=power, **options)

    def run(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        request = self._library.Request()
        request.obj_size = 1
        get = self._cache._cache.get
        hits = np.zeros(len(keys), dtype=bool)
        pairs = zip(_numbers(keys), _numbers(next_accesses(keys)), strict=True)
        for at, (key, following) in enumerate(pairs):
            request.clock_time = at
            request.obj_id = key + 1
            request.next_access_vtime = following
            hits[at] = get(request)
        return hits


def _numbers(values: NDArray[np.int64]) -> Iterator[int]:
    """Yield Python's own numbers, a few at a time: a long trace stays small."""
    for start in range(0, len(values), _CHUNK):
        yield from values[start : start + _CHUNK].tolist()


def next_accesses(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each access, when its key comes next (an index), or a number beyond all."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    following = np.full(len(keys), _NEVER, dtype=np.int64)
    following[order[:-1][same]] = order[1:][same]
    return following


_LIBRARY_NAMES = {
    "lru": "LRU",
    "s3-fifo": "S3FIFO",
    "sieve": "Sieve",
    "arc": "ARC",
    "lru-k": "LRUK",
    "w-tinylfu": "WTinyLFU",
    "belady": "Belady",
    "fifo": "FIFO",
    "lfu": "LFU",
    "clock": "Clock",
    "2q": "TwoQ",
    "slru": "SLRU",
    "lirs": "LIRS",
    "lhd": "LHD",
    "lecar": "LeCaR",
    "cacheus": "Cacheus",
    "hyperbolic": "Hyperbolic",
}
# What issue and documentation compare with; `all` runs these, `stoker` and `belady`.
COMPARED = ("lru", "lfu-decay", "w-tinylfu", "s3-fifo", "sieve", "arc", "lru-k", "area")
REFERENCES = (
    *COMPARED,
    "qlearning",
    "entropy-lru-k",
    "entropy-regime",
    *(n for n in _LIBRARY_NAMES if n not in COMPARED),
)


def require(names: Iterable[str]) -> None:
    """Raise UnavailableError if a policy needs a package that is not installed."""
    for name in names:
        if name in _LIBRARY_NAMES:
            _library()
        elif name == "qlearning":
            QLearning(1)


def reference(name: str, capacity: int) -> Reference:
    """Return a fresh reference policy for ``capacity`` equal-sized keys.

    Raises:
        InputError: no such policy.
        UnavailableError: `libcachesim` is not installed, or for "qlearning" torch.
    """
    if name == "qlearning":
        return _Ours([QLearning(capacity)])
    if name == "entropy-regime":
        return _Ours([EntropyRegime(capacity)])
    if name == "entropy-lru-k":
        return _Ours([EntropyRegime(capacity, regime=Regime.EVICT)])
    if name == "lfu-decay":
        return _Ours([DecayedFrequency(capacity)])
    if name == "s3-fifo" and capacity < _S3_FIFO_MIN:
        return _Ours([S3Fifo(capacity)])
    if name == "w-tinylfu" and capacity < _W_TINYLFU_MIN:
        return _Ours([WTinyLfu(capacity)])
    if name == "area":
        recent = max(1, capacity // 5)
        frequent = capacity - recent
        return _Ours([*([DecayedFrequency(frequent)] if frequent else []), Lru(recent)])
    if name not in _LIBRARY_NAMES:
        raise InputError(f"policy {name!r}, expected one of stoker, {', '.join(REFERENCES)}, all")
    options: dict[str, Any] = {}
    if name == "w-tinylfu":
        # Below 100 keys its window of 1 % would hold nothing, and the cache would never hit.
        options["window_size"] = max(0.01, 1.001 / capacity)
    return _Library(_LIBRARY_NAMES[name], capacity, **options)
