"""Terms and query clusters as nodes beside the heat graph: what a request was about.

A node (a term or an entity of the query, or the cluster of its vector) leads to the chunks that
were retrieved for it. A node's heat fades faster than its edges: what was asked for lately says
which topics are on, the edges say what they need. `TopicHeat.lift` is one step from hot nodes to
their chunks, `TopicHeat.expected` one from the nodes of a single query.

Nothing uses it by default: on the traces measured it adds nothing to decayed demand
(`prefetch/BENCHMARKS.md`). Entities are found in `entities`; `query_topics` feeds terms and
entities from the stream of events.

Terms come from scikit-learn's text analyser (tokens of two letters and more, English stop words,
pairs of words), weighed by how rare they are. Clusters are mini-batch k-means, started from the
last centres with a window of the newest queries only, so that they follow drift.

Sources: Sculley, "Web-scale k-means clustering", WWW 2010; Spärck Jones, "A statistical
interpretation of term specificity", 1972.
"""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError, UnavailableError
from stoker.prefetch.protocols import ContentKey

Node = tuple[str, str]
"""(kind, name): ("term", "page fault"), ("entity", "apache kafka") or ("cluster", "17")."""

AnyNode = tuple[str, ...]
"""A `Node`, or one with more strings behind it, such as the tenant whose node it is."""


def _sklearn(module: str) -> Any:
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise UnavailableError(
            "terms and query clusters need scikit-learn: pip install 'stoker[models]'"
        ) from error


class Terms:
    """The rarest terms of a text, by what was seen before.

    Invariant: at most ``terms_max`` terms are counted; the one not seen for longest goes first.

    Raises:
        UnavailableError: scikit-learn is not installed.
    """

    def __init__(self, *, per_text_max: int = 8, terms_max: int = 100_000) -> None:
        text = _sklearn("feature_extraction.text")
        analyser = text.CountVectorizer(stop_words="english", ngram_range=(1, 2))
        self._analyse = analyser.build_analyzer()
        self._per_text_max = per_text_max
        self._terms_max = terms_max
        self._texts = 0
        self._seen: OrderedDict[str, int] = OrderedDict()

    def of(self, text: str) -> list[Node]:
        """Return the terms of a text, the rarest first, and count them."""
        found = self._found(text)
        self._texts += 1
        nodes = self._rarest(found)
        for term in found:
            self._seen[term] = self._seen.pop(term, 0) + 1
        while len(self._seen) > self._terms_max:
            self._seen.popitem(last=False)
        return nodes

    def peek(self, text: str) -> list[Node]:
        """Return the terms of a text, the rarest first, and change nothing."""
        return self._rarest(self._found(text))

    def _found(self, text: str) -> list[str]:
        return list(dict.fromkeys(self._analyse(text)))

    def _rarest(self, found: list[str]) -> list[Node]:
        rarity = {
            term: math.log((1.0 + self._texts) / (1.0 + self._seen.get(term, 0))) for term in found
        }
        order = sorted(found, key=lambda term: (-rarity[term], term))
        return [("term", term) for term in order[: self._per_text_max]]

    def to_state(self) -> dict[str, Any]:
        """Return what was counted, as plain values for a snapshot."""
        return {"texts": self._texts, "seen": [[term, n] for term, n in self._seen.items()]}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Become what `to_state` gave."""
        self._texts = int(values["texts"])
        self._seen = OrderedDict((term, int(count)) for term, count in values["seen"])


class QueryClusters:
    """Streaming k-means over query vectors. Cluster numbers keep their meaning while it drifts.

    Invariants: at most ``window`` vectors are kept; every cluster's number is below ``clusters``.

    Raises:
        UnavailableError: scikit-learn is not installed.
    """

    def __init__(
        self, clusters: int, *, window: int = 2_000, refit_every: int = 250, seed: int = 0
    ) -> None:
        """Start empty; queries have no cluster before ``refit_every`` of them were seen."""
        if not 1 <= clusters <= refit_every <= window:
            raise InputError(
                "expected 1 <= clusters <= refit_every <= window, found "
                f"{clusters}, {refit_every}, {window}"
            )
        self._cluster = _sklearn("cluster")
        self._count = clusters
        self._refit_every = refit_every
        self._seed = seed
        self._recent: deque[NDArray[np.float32]] = deque(maxlen=window)
        self._since = 0
        self._centres: NDArray[np.float32] | None = None
        self.drift = 0.0

    def of(self, vector: NDArray[np.float32]) -> list[Node]:
        """Return the cluster of a query (float32, shape (dim,)), and learn from it."""
        self._recent.append(vector)
        self._since += 1
        if self._since >= self._refit_every:
            self._since = 0
            self._refit()
        if self._centres is None:
            return []
        nearest = int(np.argmin(((self._centres - vector) ** 2).sum(axis=1)))
        return [("cluster", str(nearest))]

    def _refit(self) -> None:
        before = self._centres
        model = self._cluster.MiniBatchKMeans(
            self._count,
            init="k-means++" if before is None else before,
            n_init=1,
            batch_size=max(256, self._count),
            random_state=self._seed,
        )
        model.partial_fit(np.stack(self._recent))
        self._centres = np.asarray(model.cluster_centers_, np.float32)
        if before is not None:
            self.drift = float(np.sqrt(((self._centres - before) ** 2).sum(axis=1)).mean())


class TopicHeat:
    """Heat of nodes and their edges to chunks, both decayed exponentially and lazily.

    Invariants: at most ``nodes_max`` nodes, and ``edges_max`` edges of each; weights are >= 0.
    """

    def __init__(
        self,
        *,
        node_half_life_s: float = 6 * 3600.0,
        edge_half_life_s: float = 7 * 86400.0,
        nodes_max: int = 50_000,
        edges_max: int = 64,
    ) -> None:
        self._node_half_life_s = node_half_life_s
        self._edge_half_life_s = edge_half_life_s
        self._nodes_max = nodes_max
        self._edges_max = edges_max
        # node -> (heat, seconds it is of); node -> {chunk: (weight, seconds it is of)}
        self._heat: OrderedDict[AnyNode, tuple[float, float]] = OrderedDict()
        self._edges: dict[AnyNode, dict[ContentKey, tuple[float, float]]] = {}

    def __len__(self) -> int:
        return len(self._heat)

    def observe(
        self, nodes: Sequence[AnyNode], chunks: Sequence[ContentKey], time_s: float
    ) -> None:
        """Take one request: its nodes, and the chunks retrieved for it, best first."""
        for node in nodes:
            heat, then = self._heat.pop(node, (0.0, time_s))
            self._heat[node] = (
                _faded(heat, time_s - then, self._node_half_life_s) + 1.0,
                max(then, time_s),
            )
            edges = self._edges.setdefault(node, {})
            for chunk in chunks:
                weight, then = edges.get(chunk, (0.0, time_s))
                edges[chunk] = (
                    _faded(weight, time_s - then, self._edge_half_life_s) + 1.0,
                    max(then, time_s),
                )
            self._trim(edges)
        self._drop_oldest()

    def lift(self, now_s: float) -> dict[ContentKey, float]:
        """Return the accesses per chunk that hot nodes lead one to expect, >= 0.

        A node of heat h whose edges have the shares p gives each chunk h * p, a request with
        several nodes counts once for each.
        """
        lifted: dict[ContentKey, float] = {}
        for node, (heat, then) in self._heat.items():
            hot = _faded(heat, now_s - then, self._node_half_life_s)
            if hot >= 1e-3:
                self._add_shares(lifted, node, now_s, hot)
        return lifted

    def expected(self, nodes: Sequence[AnyNode], now_s: float) -> dict[ContentKey, float]:
        """Return what a query with these nodes leads one to expect: accesses per chunk, >= 0.

        Each known node gives its chunks their shares of one access, whatever its heat: the query
        itself is the heat. Unknown nodes give nothing. Changes nothing.
        """
        lifted: dict[ContentKey, float] = {}
        for node in nodes:
            if node in self._heat:
                self._add_shares(lifted, node, now_s, 1.0)
        return lifted

    def _add_shares(
        self, lifted: dict[ContentKey, float], node: AnyNode, now_s: float, amount: float
    ) -> None:
        weights = {
            chunk: _faded(weight, now_s - at, self._edge_half_life_s)
            for chunk, (weight, at) in self._edges[node].items()
        }
        total = sum(weights.values())
        if total > 0.0:  # edges of decades ago fade to nothing
            for chunk, weight in weights.items():
                lifted[chunk] = lifted.get(chunk, 0.0) + amount * weight / total

    def to_state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return plain values and arrays for a snapshot; equal state gives equal ones."""
        places: dict[ContentKey, int] = {}
        heads, edges = [], []
        for row in self._edges_in_order():
            for chunk, edge in row.items():
                heads.append(places.setdefault(chunk, len(places)))
                edges.append(edge)
        values = {"nodes": list(map(list, self._heat)), "chunks": list(map(list, places))}
        return values, {
            "heat": np.array(list(self._heat.values()), np.float64).reshape(-1, 2),
            "degrees": np.array([len(row) for row in self._edges_in_order()], np.uint32),
            "heads": np.array(heads, np.uint32),
            "edges": np.array(edges, np.float64).reshape(-1, 2),
        }

    def load_state(self, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Become what `to_state` gave, within this one's own bounds.

        Raises:
            InputError: the values and arrays are not of one state.
        """
        nodes = [tuple(node) for node in values["nodes"]]
        chunks = [(tenant, chunk) for tenant, chunk in values["chunks"]]
        heads, ends = arrays["heads"].tolist(), np.cumsum(arrays["degrees"]).tolist()
        edges = list(map(tuple, arrays["edges"].tolist()))
        if (
            not len(nodes) == len(arrays["heat"]) == len(ends)
            or not len(heads) == len(edges) == (ends[-1] if ends else 0)
            or max(heads, default=-1) >= len(chunks)
        ):
            raise InputError("nodes, degrees and edges of topics do not fit each other")
        self._heat = OrderedDict(zip(nodes, map(tuple, arrays["heat"].tolist()), strict=True))
        self._edges = {}
        for node, start, end in zip(nodes, [0, *ends], ends, strict=False):
            self._edges[node] = {
                chunks[head]: edge
                for head, edge in zip(heads[start:end], edges[start:end], strict=True)
            }
            self._trim(self._edges[node])
        self._drop_oldest()

    def _edges_in_order(self) -> list[dict[ContentKey, tuple[float, float]]]:
        return [self._edges[node] for node in self._heat]

    def _trim(self, edges: dict[ContentKey, tuple[float, float]]) -> None:
        while len(edges) > self._edges_max:
            del edges[min(edges, key=lambda key: (edges[key][1], edges[key][0], key))]

    def _drop_oldest(self) -> None:
        while len(self._heat) > self._nodes_max:
            node, _ = self._heat.popitem(last=False)
            del self._edges[node]

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert self._heat.keys() == self._edges.keys()
        assert len(self._heat) <= self._nodes_max
        assert all(len(edges) <= self._edges_max for edges in self._edges.values())


def blend(
    demand: Mapping[ContentKey, float], lift: Mapping[ContentKey, float], *, share: float
) -> dict[ContentKey, float]:
    """Return demand with ``share`` of its total taken over by the lift; share in [0, 1]."""
    total, lifted = sum(demand.values()), sum(lift.values())
    if not total or not lifted:
        return dict(demand)
    scale = share * total / lifted
    mixed = {key: (1.0 - share) * value for key, value in demand.items()}
    for key, value in lift.items():
        mixed[key] = mixed.get(key, 0.0) + scale * value
    return mixed


def _faded(value: float, age_s: float, half_life_s: float) -> float:
    # A late event counts as if it had come in time: it must not make anything grow.
    return value * math.pow(2.0, -max(0.0, age_s) / half_life_s)
