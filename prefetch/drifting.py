"""Make a trace whose popular keys change with time, from a seed.

Four things that a document service's traffic has, each with its share:

* popularity: keys are asked for by a power law of their rank (exponent ``skew``);
* drift: after every ``period`` accesses a share of the popular ranks goes to other keys, and half
  way through the trace a whole new topic becomes popular at once;
* sessions: some accesses repeat what was asked for within the last few dozen, as a next turn does;
* jobs: some accesses walk through a list of keys in one order, over and over, as a crawler, a
  nightly evaluation or a dashboard does. A job's list changes by the same share as popularity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.traces import Trace

REPEAT_WINDOW = 64  # accesses: a few requests
# Kinds of made traces: many one-off keys; and half of all accesses in a job that comes back.
KINDS: dict[str, dict[str, float]] = {
    "drift": {},
    "jobs": {"job_ratio": 0.5, "job_keys": 450, "session_ratio": 0.1},
}
_WIDTHS = (0.5, 1.0, 2.0)  # 384, 768 and 1,536 dimensions, against the usual 768


@dataclass(frozen=True)
class Law:
    """What a stretch of a made trace was drawn from: what nobody can know better.

    Attributes:
        start: Its first access.
        popular: Probability of each key where popularity draws, float64, shape (keys,).
        job: Keys that the job walks through, in order, int64.
    """

    start: int
    popular: NDArray[np.float64]
    job: NDArray[np.int64]


@dataclass(frozen=True)
class DriftingTrace:
    """A made trace.

    Attributes:
        trace: The accesses.
        sizes: Each key's size in usual units, float64, shape (footprint,).
        laws: One per stretch between two steps of drift.
        walked: Steps of the job up to and with each access, int64, shape (accesses,).
        session_ratio: Share of accesses that repeat one of the last `REPEAT_WINDOW`.
        job_ratio: Share of accesses that belong to the job.
    """

    trace: Trace
    sizes: NDArray[np.float64]
    laws: tuple[Law, ...]
    walked: NDArray[np.int64]
    session_ratio: float
    job_ratio: float


def drifting_trace(
    *,
    seed: int,
    accesses: int = 120_000,
    keys: int = 8_000,
    skew: float = 1.0,
    period: int = 6_000,
    drift_ratio: float = 0.1,
    session_ratio: float = 0.2,
    job_ratio: float = 0.2,
    job_keys: int | None = None,
    mixed_widths: bool = False,
) -> DriftingTrace:
    """Return a trace of ``accesses`` to at most ``keys`` keys; the same for the same arguments.

    Args:
        skew: Exponent of the power law; measured traces of retrieval lie around 1.
        period: Accesses between two steps of drift.
        drift_ratio: Share of the 500 highest ranks that change hands at a step.
        session_ratio: Share of accesses that repeat one of the last 64.
        job_ratio: Share of accesses that belong to the job.
        job_keys: Length of the job's list; None takes all keys.
        mixed_widths: Whether keys have three sizes instead of one.

    Raises:
        InputError: shares that cannot be.
    """
    if min(session_ratio, job_ratio) < 0.0 or session_ratio + job_ratio >= 1.0:
        raise InputError("session_ratio and job_ratio must be >= 0 and together below 1")
    job_keys = keys if job_keys is None else job_keys
    if accesses < 2 or keys < 1_000 or period < 1 or not 1 <= job_keys <= keys:
        raise InputError("expected accesses >= 2, keys >= 1000, period >= 1, 1 <= job_keys <= keys")
    if not 0.0 <= drift_ratio <= 1.0:
        raise InputError(f"drift_ratio must be in [0, 1], got {drift_ratio!r}")
    random = np.random.default_rng(seed)
    law = 1.0 / np.arange(1, keys + 1) ** skew
    law /= law.sum()
    holder = random.permutation(keys)  # rank -> key
    job = random.permutation(keys)[:job_keys]
    walked = 0
    out = np.empty(accesses, dtype=np.int64)
    walks = np.empty(accesses, dtype=np.int64)
    laws = []
    shifted = False
    for start in range(0, accesses, period):
        if start:
            _trade(random, holder, 500, int(drift_ratio * 500))
            changed = random.choice(len(job), size=int(drift_ratio * len(job)), replace=False)
            job[changed] = random.choice(keys, size=len(changed), replace=False)
        if not shifted and start >= accesses // 2:
            _trade(random, holder, 200, 200)
            shifted = True
        popular = np.empty(keys)
        popular[holder] = law
        laws.append(Law(start, popular, job.copy()))
        count = min(period, accesses - start)
        drawn = holder[random.choice(keys, size=count, p=law)]
        kinds = random.random(count)
        back = random.integers(1, REPEAT_WINDOW + 1, size=count)
        for i in range(count):
            at = start + i
            if kinds[i] < session_ratio and at >= REPEAT_WINDOW:
                out[at] = out[at - back[i]]
            elif session_ratio <= kinds[i] < session_ratio + job_ratio:
                out[at] = job[walked % len(job)]
                walked += 1
            else:
                out[at] = drawn[i]
            walks[at] = walked
    sizes = np.ones(keys)
    if mixed_widths:
        sizes = random.choice(np.array(_WIDTHS), size=keys)
    times = np.arange(accesses) / 1000.0
    trace = Trace(out, times, None, np.arange(accesses), keys)
    return DriftingTrace(trace, sizes, tuple(laws), walks, session_ratio, job_ratio)


def made_trace(name: str) -> DriftingTrace:
    """Return a made trace by "KIND:SEED", or "KIND:SEED:mixed" for keys of three sizes.

    Raises:
        InputError: no such kind, or no seed.
    """
    kind, _, rest = name.partition(":")
    seed, _, widths = rest.partition(":")
    if kind not in KINDS or not seed.isdecimal() or widths not in ("", "mixed"):
        raise InputError(f"made trace {name!r}, expected {' or '.join(KINDS)} and a seed: drift:1")
    options: dict[str, Any] = KINDS[kind]
    return drifting_trace(seed=int(seed), mixed_widths=bool(widths), **options)


def _trade(
    random: np.random.Generator, holder: NDArray[np.int64], highest: int, count: int
) -> None:
    """Let ``count`` of the highest ranks change places with lower ones."""
    up = random.choice(highest, size=count, replace=False)
    down = highest + random.choice(len(holder) - highest, size=count, replace=False)
    holder[up], holder[down] = holder[down], holder[up]
