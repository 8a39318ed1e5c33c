"""The index without a server: `stoker.build`, `stoker.open` and the `Index` they give.

The rooms do the work; this file only joins the index to the planner that warms it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.arguments import byte_count, checked_heat, real_number, said, whole_number
from stoker.index.build import BuildReport
from stoker.index.collection import Collection
from stoker.index.collection_build import Progress, build_collection
from stoker.index.document_values import Document
from stoker.index.hits import Hits
from stoker.index.residency import Residency
from stoker.index.settings import IndexSettings
from stoker.prefetch.coverage_curve import Coverage
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.receipt import Receipt
from stoker.prefetch.warm import run_warm
from stoker.prefetch.warm_control import WarmControl
from stoker.prefetch.warm_set import Accesses, WarmSet
from stoker.service.collection_index import CollectionIndex
from stoker.service.logging import configure_quietly

__all__ = ["BuildReport", "Index", "build", "open"]

_DEFAULT_TENANT = "default"

configure_quietly()


class Index:
    """An open index: search it, warm it, ask what is in memory, change it.

    Any thread may call anything. Close it, or use it as a context manager.
    """

    def __init__(self, collection: Collection) -> None:
        """Use `stoker.open`."""
        self._collection = collection
        self._source = CollectionIndex(collection)
        self._loaded: WarmSet | None = None

    @property
    def count(self) -> int:
        """Live documents."""
        return self._collection.count

    @property
    def dim(self) -> int:
        """Dimensions of a vector."""
        return self._collection.dim

    @property
    def metric(self) -> str:
        """ "ip", "cosine" or "l2"."""
        return self._collection.metric

    @property
    def generation(self) -> int:
        """Number of the generation of sealed segments that answers now."""
        return self._collection.generation

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages that could be made resident."""
        return self._collection.total_bytes()

    def search(
        self,
        query: Any,
        k: int = 10,
        *,
        ef: int | None = None,
        recall_target: float | None = None,
        deadline_ms: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> Hits:
        """Find the ``k`` nearest documents of one query, or of each in a batch.

        Documents of every tenant are found, unless the filter says ``{"tenant": NAME}``: an id may
        then come once for each tenant that has it.

        Args:
            query: float32, shape (dim,) or (nq, dim), finite.
            k: 1 to 1,000.
            ef: Width of the walk; None takes the narrowest that meets the target.
            recall_target: Recall@k aimed at; None means the setting (0.95). It decides the width
                and how much the query reads to settle its answer.
            deadline_ms: Past it nothing more is read; the answer says how complete it is.
            filter: Conditions on metadata, as `stoker.index.filters` describes.

        Returns:
            Hits: 1-d arrays for one query, 2-d for a batch.

        Raises:
            InputError: wrong shape or range, or a query that is not finite.
            UnavailableError: the index was closed.
        """
        return self._collection.search(
            query, k, ef=ef, recall_target=recall_target, deadline_ms=deadline_ms, filter=filter
        )

    def warm(
        self,
        heat: Mapping[Any, float] | None = None,
        *,
        budget_bytes: int | None = None,
        deadline_s: float | None = None,
        unseen_ratio: float = 0.0,
        control: WarmControl | None = None,
    ) -> Receipt:
        """Load what ``heat`` says will be asked, top layers first; blocks until done.

        Searches go on meanwhile, and their reads come first.

        Args:
            heat: Weight (>= 0) by id, or by (tenant, id). None means that nothing is known:
                pages are then loaded in the order in which they were sealed, hottest first.
            budget_bytes: Bytes that may be made resident; None means all that fit the memory.
            deadline_s: Seconds from now after which no load starts.
            unseen_ratio: Share of coming accesses to what has no heat, 0 to 1; for the receipt's
                prediction only.
            control: Through which another thread pauses, resumes, cancels it, or gives it another
                heat (there by (tenant, id)).

        Returns:
            The receipt: planned, loaded, skipped and why, as read back from the page pool.

        Raises:
            InputError: a weight, a budget or a deadline is no number, or below 0.
        """
        if budget_bytes is not None:
            budget_bytes = byte_count(budget_bytes, "budget_bytes")
        if deadline_s is not None:
            deadline_s = real_number(deadline_s, "deadline_s")
            if deadline_s < 0:
                raise InputError(f"deadline_s: expected 0 or more, found {deadline_s}")
        loaded = WarmSet()
        receipt = run_warm(
            self._source,
            _content_keys(heat),
            budget_bytes=budget_bytes,
            deadline_s=deadline_s,
            coverage=Coverage(real_number(unseen_ratio, "unseen_ratio")),
            control=control,
            loaded=loaded,
        )
        self._loaded = loaded
        return receipt

    def warm_served(self, accesses: Mapping[Any, float]) -> float | None:
        """Return which share of these accesses the last warm-up's pages serve, in [0, 1].

        It is what the receipt predicts, of accesses that came: for `Receipt.with_measured`. What
        searches have read themselves since does not count.

        Args:
            accesses: How many fell on each id, or (tenant, id).

        Returns:
            None before the first `warm`, after a merge has laid the pages out anew, and where no
            access fell on a document that is here.
        """
        if self._loaded is None:
            return None
        asked = Accesses(_content_keys(accesses))
        batches = self._source.unit_batches(asked.by_key)
        if not self._loaded.still_offered(batches):
            return None
        return self._loaded.served(batches, asked)

    def page_counts(self) -> tuple[int, int]:
        """How often searches found a record's page in memory, and how often not."""
        return self._collection.page_counts()

    def resident(self) -> Residency:
        """What is in memory now, per layer and kind, read from the page pool."""
        return self._collection.resident()

    def upsert(
        self,
        ids: Sequence[int | str] | NDArray[Any],
        vectors: Any,
        *,
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        tenant: str = _DEFAULT_TENANT,
    ) -> int:
        """Add or replace documents; durable when this returns. Needs ``mode="rw"``.

        Returns:
            The change offset that now holds them.
        """
        return self._collection.upsert(ids, vectors, texts=texts, metadata=metadata, tenant=tenant)

    def delete(
        self, ids: Sequence[int | str] | NDArray[Any], *, tenant: str = _DEFAULT_TENANT
    ) -> int:
        """Delete documents; durable when this returns. Needs ``mode="rw"``."""
        return self._collection.delete(ids, tenant)

    def documents(
        self, ids: Sequence[int | str], *, tenant: str = _DEFAULT_TENANT
    ) -> Sequence[Document | None]:
        """Text and metadata of each id, None where there is none."""
        return self._collection.documents(ids, tenant)

    def merge(self, *, full: bool = False, heat: Mapping[Any, float] | None = None) -> None:
        """Seal the changes into a new generation now; blocks. Needs ``mode="rw"``.

        Args:
            full: Rewrite every segment, in the newest format, not only those worth it.
            heat: Weight (>= 0) by id, or by (tenant, id): hot rows are sealed side by side.

        Raises:
            InputError: opened for reading, or a weight is no number or below 0.
            CapacityError: the disk is full; the old generation goes on.
        """
        self._collection.merge(full=full, heat=_content_keys(heat) or None)

    def refresh(self) -> bool:
        """Show what a writing process has changed since; True when anything had.

        An index opened for reading stays at the change that it was opened at until this is called.
        """
        return self._collection.refresh()

    def close(self) -> None:
        """Close; searches under way end first. A second call does nothing."""
        self._collection.close()

    def __repr__(self) -> str:
        return (
            f"<stoker.Index {str(self._collection.path)!r}: {self.count} documents of {self.dim} "
            f"dimensions, {self.metric}>"
        )

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def build(
    path: str | os.PathLike[str],
    vectors: Any,
    ids: Any = None,
    *,
    metric: Literal["ip", "cosine", "l2"] = "ip",
    m: int | None = None,
    ef_construction: int = 200,
    heat: Mapping[Any, float] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build an index of vectors at ``path``, published by one rename.

    Args:
        path: Must not exist, or be an empty folder.
        vectors: float32 or float16, shape (n, dim), finite; may be a memory map. Under cosine they
            are stored at unit length.
        ids: n integers or strings, all different; None means 0 ... n - 1.
        metric: Inner product (the default; for unit vectors the same as cosine), cosine, or squared
            L2 distance.
        m: Links per node and level, twice that on the lowest; 2 to 128. None means 16, or 24 of
            more than a million vectors.
        ef_construction: Width of the walk that finds a new node's neighbors.
        heat: Weight by id; hot vectors are sealed side by side.
        threads: Threads; None means one per processor that the process may use.
        progress: Called with (what, done, total) while work goes on.

    Raises:
        InputError: a wrong shape or kind, a row that is not finite, a duplicate id (all named),
            or something is at ``path``.
    """
    return build_collection(
        Path(path),
        vectors,
        ids,
        metric=metric,
        m=m,
        ef_construction=ef_construction,
        heat=heat,
        threads=threads,
        progress=progress,
    )


def open(
    path: str | os.PathLike[str],
    *,
    memory_bytes: int | None = None,
    mode: Literal["r", "rw"] = "r",
    settings: IndexSettings | None = None,
) -> Index:
    """Open an index; reads headers and tables only, so that it answers within milliseconds.

    Args:
        path: What `build` made, or a bare segment's folder.
        memory_bytes: Budget for pages; None takes the settings', which is 0, and 0 means room for
            all of them.
        mode: "r", or "rw" to change it too (one process at a time).
        settings: Settings of the index room; None means the defaults.

    Raises:
        InputError: no index there.
        CorruptError: a file is damaged; names it and the place.
    """
    return Index(Collection(Path(path), mode, memory_bytes=memory_bytes, settings=settings))


def _content_keys(heat: Mapping[Any, float] | None) -> dict[ContentKey, float]:
    """Heat by (tenant, id), which is how the planner and the index talk about it."""
    if heat is None or not checked_heat(heat):
        return {}
    keys: dict[ContentKey, float] = {}
    for key, weight in heat.items():
        tenant, name = key if isinstance(key, tuple) and len(key) == 2 else (_DEFAULT_TENANT, key)
        named = isinstance(name, int | str | np.integer) and not isinstance(name, bool)
        if not named or not isinstance(tenant, str):
            raise InputError(f"heat: expected an id, or (tenant, id), found {said(key)}")
        chunk = name if isinstance(name, str) else str(whole_number(name, "heat"))
        keys[tenant, chunk] = float(weight)
    return keys
