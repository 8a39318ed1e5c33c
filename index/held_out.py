"""Held-out queries, and their true neighbors, found while the vectors to be sealed stream past.

Drawn near, far from and between stored vectors, and others at random: with no regard to what is
stored, or lying among it but near nothing. `stoker.index.calibration` asks a sealed segment them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.index.equal_rows import row_hashes
from stoker.index.exact import FEW_DIMS, unit_rows, wide_ranks
from stoker.index.segment import Segment

# Neighbors of each query.
K: Final = 10
# And of so many known ones, and of all at random.
DEEP_K: Final = 100
_DEEP_QUERIES: Final = 256
# Of the known kinds together. Of 128 queries of a kind the mean recall was off by 0.01 and more,
# which is half of what a walk may lose.
_QUERIES: Final = 1024
KINDS: Final = ("near", "far", "between", "halves")
STRANGERS: Final = 256
# Of the random queries' lengths over those of the vectors about their centre.
_STRANGE_LENGTHS: Final = (0.5, 4.0)
# Of those at random among the vectors: stored ones that each is a weighted sum of, its length over
# theirs, and that of the noise in it over its own.
_SUMMED: Final = 8
_SUM_LENGTHS: Final = (0.5, 2.0)
_SUM_NOISE: Final = (0.25, 4.0)
# Bands that strange queries are parted into, by how near they lie, and how many each has at least.
_BANDS: Final = 2
_BAND_MIN: Final = 64
# Share of the queries that may lie farther from their answers than is called known.
_FARTHEST: Final = 0.01
# Share of the other kinds that may lie as near as is called near, and the fewest near ones that
# say anything.
_NEAREST: Final = 0.01
NEAR_MIN: Final = 60
_ROWS_MIN: Final = 64
_SEED: Final = 20_160_330
# Their squares are floats, whatever way they are rounded.
_LENGTH_MAX: Final = 0.99 * float(np.finfo(np.float32).max) ** 0.5


@dataclasses.dataclass
class Probe:
    """Held-out queries, and the best rows met so far while vectors stream by.

    Attributes:
        queries: float32, shape (nq, dim): those of `KINDS` in turn, then those at random.
        known: How many are of `KINDS`.
        spread: Mean squared distance of the vectors from their centre.
        scores: Shape (nq, k): best scores so far, falling (minus squared distance for l2, but for
            what a query's length adds). float32, or float64 where dimensions are few.
        rows: int64, shape (nq, k): the sealed rows that have them.
        hashes: Of the vectors met, in sealed order: equal ones stand for each other.
        deep: Some of the queries, with more neighbors; see `DEEP_K`. None of one that is so itself,
            and where there are no more.
    """

    queries: NDArray[np.float32]
    known: int
    spread: float
    scores: NDArray[np.floating]
    rows: NDArray[np.int64]
    metric: str
    hashes: list[NDArray[np.uint64]] = dataclasses.field(default_factory=list)
    deep: Probe | None = None

    @classmethod
    def draw(cls, vectors: NDArray[Any], rows: NDArray[np.int64], *, metric: str) -> Probe | None:
        """Draw queries; None when there are too few rows for a measurement to mean anything.

        Four kinds in turn (see `KINDS`), because what a walk meets depends on how far from the
        stored vectors a query lies, and nobody knows yet what will be asked: *near* one vector
        (a cosine of 0.84 and more: a passage looks for its like), *far* from it (0.5 to 0.75: a
        question looks for a passage), *between* two that have nothing to do with each other, and
        *halves*, as near to the one as to the other: no width is chosen by those, which are seldom
        asked, but what is promised has to hold for them too. Then 256, or as many as those if they
        are fewer. A third of them lie in random directions, half from the origin and half from the
        vectors' centre, at half to four times the vectors' distance from it. The others are made of
        differences of eight vectors to the centre, at random weights, and of noise, from little to
        much: they point where vectors do, as questions asked of another corpus do, and yet no one
        vector is what they are about.
        """
        count = len(rows)
        if count < _ROWS_MIN:
            return None
        rng = np.random.default_rng(_SEED)
        queries = min(_QUERIES, count // 2)
        first = rng.choice(count, queries, replace=False)
        base = np.asarray(vectors[rows[first]], np.float32)
        other = np.asarray(vectors[rows[rng.integers(0, count, queries)]], np.float32)
        if metric == "cosine":
            base, other = unit_rows(base), unit_rows(other)
        centre = base.mean(axis=0)
        size = np.linalg.norm((base - centre).astype(np.float64), axis=1, keepdims=True)
        noise = rng.standard_normal(base.shape).astype(np.float32)
        noise *= size / np.sqrt(base.shape[1])
        reach = rng.uniform(0.0, 1.0, (queries, 1)).astype(np.float32)
        kind = np.arange(queries)[:, None] % len(KINDS)
        drawn = np.choose(
            kind,
            [
                base + (0.25 + 0.4 * reach) * noise,
                base + (0.9 + 0.8 * reach) * noise,
                0.6 * base + 0.4 * other + 0.3 * noise,
                0.5 * base + 0.5 * other + 0.3 * reach * noise,
            ],
        ).astype(np.float32)
        strange = _strangers(rng, base - centre, centre, min(STRANGERS, queries))
        drawn = np.concatenate([drawn, strange.astype(np.float32)])
        drawn = unit_rows(drawn) if metric == "cosine" else _searchable(drawn)
        dtype = np.float64 if drawn.shape[1] <= FEW_DIMS else np.float32
        spread = float((size.astype(np.float64) ** 2).mean())

        def blank(asked: NDArray[np.float32], known: int, k: int) -> Probe:
            return cls(
                queries=np.ascontiguousarray(asked),
                known=known,
                spread=spread,
                scores=np.full((len(asked), k), -np.inf, dtype),
                rows=np.full((len(asked), k), -1, np.int64),
                metric=metric,
            )

        probe = blank(drawn, queries, min(K, count))
        deep_k = min(DEEP_K, count)
        if deep_k > K:
            known = min(_DEEP_QUERIES, queries)
            some = np.concatenate([drawn[:known], drawn[queries:]])
            probe.deep = blank(some, known, deep_k)
            probe.deep.hashes = probe.hashes
        return probe

    def take(
        self,
        batch: NDArray[np.float32],
        first_row: int,
        *,
        parts: int = 1,
        run: Callable[..., Iterable[Any]] = map,
    ) -> Callable[[], None]:
        """Begin to meet a batch of vectors, and return what ends it, before the next one is begun.

        Args:
            batch: float32, shape (n, dim); unchanged until the end.
            first_row: Of it, as sealed.
            parts: Of the queries, which ``run`` may meet it with at the same time.
            run: As `map`; a pool's begins at once.
        """
        hashed = run(row_hashes, [batch])
        deep = self.deep
        few = batch.shape[1] <= FEW_DIMS
        # Each query meets each vector once: those of `deep` there, and the others here.
        asked: list[tuple[Probe, int, int]] = [
            (self, deep.known if deep else 0, self.known if deep else len(self.queries))
        ]
        if deep is not None:
            asked.append((deep, 0, len(deep.queries)))

        def meet(part: int) -> None:
            for probe, first, end in asked:
                bounds = np.linspace(first, end, parts + 1).astype(int)
                here = slice(bounds[part], bounds[part + 1])
                _core.meet_rows(
                    probe.queries[here],
                    batch,
                    first_row=first_row,
                    l2=self.metric == "l2",
                    scores=probe.scores[here],
                    rows=probe.rows[here],
                )

        if few:
            for probe, first, end in asked:
                probe._meet_few(batch, first_row, slice(first, end))
        met = () if few else run(meet, range(parts))

        def finish() -> None:
            for _ in met:
                pass
            self.hashes.extend(hashed)
            if deep is not None:
                k = self.scores.shape[1]
                for mine, deeper in ((self.scores, deep.scores), (self.rows, deep.rows)):
                    mine[: deep.known] = deeper[: deep.known, :k]
                    mine[self.known :] = deeper[deep.known :, :k]

        return finish

    def _meet_few(self, batch: NDArray[np.float32], first_row: int, here: slice) -> None:
        """The same for few dimensions, by products that tell apart what floats round to one."""
        queries = self.queries[here]
        ranks = wide_ranks(queries, batch, self.metric)
        if self.metric == "l2":
            ranks += (queries.astype(np.float64) ** 2).sum(axis=1)[:, None]
        scores = np.concatenate([self.scores[here], ranks], axis=1)
        found = np.broadcast_to(np.arange(first_row, first_row + len(batch)), ranks.shape)
        rows = np.concatenate([self.rows[here], found], axis=1)
        k = self.scores.shape[1]
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        best = np.take_along_axis(best, order, 1)
        self.scores[here] = np.take_along_axis(scores, best, 1)
        self.rows[here] = np.take_along_axis(rows, best, 1)

    def fewer(self, known: int, strangers: int | NDArray[np.bool_]) -> Probe:
        """Return the first ``known`` queries and ``strangers``, once all vectors were met.

        Args:
            known: How many of the known queries.
            strangers: How many of those at random, the first; or which.
        """

        def of(values: NDArray[Any]) -> NDArray[Any]:
            at_random = values[self.known :]
            chosen = slice(strangers) if isinstance(strangers, int) else strangers
            return np.concatenate([values[: min(known, self.known)], at_random[chosen]])

        part = dataclasses.replace(
            self,
            known=min(known, self.known),
            queries=of(self.queries),
            scores=of(self.scores),
            rows=of(self.rows),
            deep=None,
        )
        part.__dict__["_equals"] = self._equals  # Of all vectors: worked out once for all parts.
        return part

    def only(self, chosen: NDArray[np.bool_]) -> Probe:
        """Return the queries that ``chosen``, bool of shape (nq,), says; see `fewer`."""
        part = dataclasses.replace(
            self,
            known=int(chosen[: self.known].sum()),
            queries=self.queries[chosen],
            scores=self.scores[chosen],
            rows=self.rows[chosen],
            deep=None,
        )
        part.__dict__["_equals"] = self._equals
        return part

    def deeper(self) -> Probe | None:
        """Return `deep`, once all vectors were met; None where there are no more neighbors."""
        if self.deep is not None:
            self.deep.__dict__["_equals"] = self._equals
        return self.deep

    def strange_bands(
        self, near: NDArray[np.float64], low: float
    ) -> tuple[tuple[float, ...], list[NDArray[np.bool_]]]:
        """Part those at random that lie farther than known ones do into bands of as many each.

        What a walk misses of what such a query asks for depends more on how far it lies than on
        anything else that is seen of it.

        Args:
            near: `nearness` of all queries.
            low: Nearness from which on queries are like known ones.

        Returns:
            (upper edges of the bands, falling; which of those at random are of each). Where few lie
            so far, all of them are one band.
        """
        strange = near[self.known :]
        far = ~(strange >= low)
        count = int(far.sum())
        bands = min(max(count // _BAND_MIN, 1), _BANDS)
        if count < _BAND_MIN:
            return (low,), [np.ones(len(strange), np.bool_)]
        # What no number is near lies farthest.
        placed = np.nan_to_num(strange[far], nan=float(np.finfo(np.float32).min))
        cuts = np.sort(placed)[[count * part // bands for part in range(bands - 1, 0, -1)]]
        edges = (low, *(float(cut) for cut in cuts))
        at = np.zeros(len(strange), np.int64)
        for edge in edges:
            at += ~(strange >= edge)
        return edges, [at == band + 1 for band in range(bands)]

    def nearness_lows(self, segment: Segment) -> tuple[float, float]:
        """How near at least the known queries lie to their neighbors, and those at random.

        A hundredth of each is left out.
        """
        near = self.nearness(segment)
        known, strange = (
            float(np.nan_to_num(np.quantile(part, _FARTHEST)))
            for part in (near[: self.known], near[self.known :])
        )
        rounded = segment.nearness_rounded
        return known - rounded, min(known, strange) - rounded

    def near_ones(self, segment: Segment) -> tuple[float, NDArray[np.bool_]]:
        """How near is nearer than nearly all of the other kinds, and which *near* queries are so.

        Returns:
            (nearness, bool array of shape (nq,)); none are where there are too few to speak of.
        """
        near = self.nearness(segment)
        kind = np.arange(len(near)) % len(KINDS)
        kind[self.known :] = len(KINDS)
        others = near[(kind > 0) & (kind < len(KINDS)) & np.isfinite(near)]
        from_ = float(np.quantile(others, 1.0 - _NEAREST)) if len(others) else math.inf
        chosen = (kind == 0) & (near >= from_)
        if chosen.sum() < NEAR_MIN:
            return 0.0, np.zeros(len(near), np.bool_)
        return from_, chosen

    def nearness(self, segment: Segment) -> NDArray[np.float64]:
        """How near each query lies to its best row; see `recall_bounds.nearness`."""
        best = self.scores[:, 0].astype(np.float64)
        if self.metric == "l2":
            best = (self.queries.astype(np.float64) ** 2).sum(axis=1) - best
        return segment.nearness(best, self.queries)

    @functools.cached_property
    def _equals(self) -> NDArray[np.int64]:
        """A number for each sealed row, the same for equal vectors; once all were met."""
        _, numbers = np.unique(np.concatenate(self.hashes), return_inverse=True)
        return numbers.astype(np.int64)

    def recall_of(self, found: NDArray[np.int64], k: int | None = None) -> NDArray[np.float64]:
        """Share of each query's true neighbors that were found, or rows equal to them.

        Args:
            found: int64, shape (nq, n), best first.
            k: How many neighbors count, and how many of what was found; None for all.
        """
        return self._share_of(found[:, :k], self.rows[:, :k])

    def met_of(self, found: NDArray[np.int64]) -> NDArray[np.float64]:
        """Share of each query's true neighbors that are anywhere among ``found``, (nq, n)."""
        return self._share_of(found, self.rows)

    def _share_of(self, found: NDArray[np.int64], truth: NDArray[np.int64]) -> NDArray[np.float64]:
        numbers = self._equals
        if numbers.max(initial=-1) + 1 == len(numbers):  # No two are equal.
            return recall_of(found, truth)
        columns = max(found.shape[1], truth.shape[1])

        def named(rows: NDArray[np.int64]) -> NDArray[np.int64]:
            # The group of equal vectors, and the how manieth of it the row is in the answer.
            groups = np.sort(np.where(rows >= 0, numbers[rows], -1), axis=1)
            places = np.broadcast_to(np.arange(groups.shape[1]), groups.shape)
            new = np.ones(groups.shape, np.bool_)
            new[:, 1:] = groups[:, 1:] != groups[:, :-1]
            start = np.maximum.accumulate(np.where(new, places, 0), axis=1)
            unlike: NDArray[np.int64] = groups * columns + (places - start)
            return unlike

        return recall_of(named(found), named(truth))


def _searchable(queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Shorten those that are too long for float32 distances: vectors may be nearly so."""
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True)
    short: NDArray[np.float32] = (queries / np.maximum(lengths / _LENGTH_MAX, 1.0)).astype(
        np.float32
    )
    return short


def _strangers(
    rng: np.random.Generator,
    about: NDArray[np.float32],
    centre: NDArray[np.float32],
    count: int,
) -> NDArray[np.float64]:
    """Draw the queries at random; see `Probe.draw`. ``about``: vectors less their ``centre``."""
    dim = about.shape[1]
    size = float(np.linalg.norm(about.astype(np.float64), axis=1).mean())

    def lengths(bounds: tuple[float, float], number: int) -> NDArray[np.float64]:
        low, high = bounds
        drawn: NDArray[np.float64] = low * (high / low) ** rng.uniform(0.0, 1.0, (number, 1))
        return drawn

    random = rng.standard_normal((-(-count // 3), dim))
    random *= lengths(_STRANGE_LENGTHS, len(random)) * size / np.sqrt(dim)
    random[::2] += centre
    number = count - len(random)
    weights = rng.standard_normal((number, _SUMMED))
    chosen = about[rng.integers(0, len(about), (number, _SUMMED))]
    summed = np.einsum("nm,nmd->nd", weights, chosen) / np.sqrt(_SUMMED)
    noise = rng.standard_normal((number, dim)) * size / np.sqrt(dim)
    summed += lengths(_SUM_NOISE, number) * noise
    # As long as vectors are, some shorter and some longer.
    norms = np.maximum(np.linalg.norm(summed, axis=1, keepdims=True), 1e-30)
    summed *= lengths(_SUM_LENGTHS, number) * size / norms
    return np.concatenate([random, centre + summed])


def recall_of(found: NDArray[np.int64], truth: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of each query's true rows that were found, float64, shape (nq,)."""
    met = np.zeros(truth.shape, np.bool_)
    # A column at a time: all against all at once would not stay in a processor's cache.
    for column in range(found.shape[1]):
        met |= truth == found[:, column, None]
    shares: NDArray[np.float64] = met.mean(axis=1)
    return shares
