"""Writing documents: durable when it returns, and all that knew the old ones is told."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.documents import StorageFull as DocumentsFull
from stoker.index.generation import NoRoom
from stoker.prefetch.events import DOCUMENT_DELETED, DOCUMENT_UPSERTED
from stoker.service.bodies import DocumentRow
from stoker.service.engine_parts import Parts, ServingIndex
from stoker.service.metrics import Metrics
from stoker.service.problems import FeatureOff, RequestError, StorageFull
from stoker.service.reuse_front import ReuseFront
from stoker.service.streams import LogFull

Vector = NDArray[np.float32]

_ROW = re.compile(r"(metadata|texts|ids|vectors)\[(\d+)\]:? ")
_MEMBERS = {"metadata": "metadata", "texts": "text", "ids": "id", "vectors": "vector"}
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")


class DocumentWrites:
    """The write half of an engine. Every method is safe from several threads and blocks."""

    def __init__(
        self,
        parts: Parts,
        *,
        reuse: ReuseFront,
        metrics: Metrics,
        changed: Callable[[str, str, Sequence[str]], None],
    ) -> None:
        """Write to the parts' index.

        Args:
            reuse: Forgets what was found with a changed document.
            changed: Called with (type of event, tenant, ids) once a change is durable.
        """
        self._parts = parts
        self._index = parts.index
        self._reuse = reuse
        self._metrics = metrics
        self._changed = changed

    def upsert(self, tenant: str, documents: Sequence[DocumentRow], *, left_s: float) -> int:
        """Write documents; they are durable when this returns. Returns how many.

        Raises:
            InputError: a vector has another dimension than the index, or metadata is malformed.
            FeatureOff: the index is read-only, or a document has no vector and there is no model.
            StorageFull: no room; nothing was acknowledged.
        """
        self._check_writable()
        ids = [index_id(self._index, document.id) for document in documents]
        vectors = self._vectors_of(documents, left_s)
        kv = self._parts.kv
        before = None if kv is None else kv.before_change(tenant, ids)
        with storing(), _rows_named():
            offset = self._index.upsert(
                ids,
                vectors,
                tenant=tenant,
                texts=[document.text for document in documents],
                metadata=[document.metadata for document in documents],
            )
        names = [document.id for document in documents]
        self._reuse.record_change(
            tenant, names, vectors, generation=self._index.generation, offset=offset
        )
        if kv is not None:
            after = [(document.text, document.metadata or {}) for document in documents]
            kv.after_change(tenant, ids, before, after)
        self._metrics.written.labels("upsert").inc(len(documents))
        self._changed(DOCUMENT_UPSERTED, tenant, names)
        return len(documents)

    def delete(self, tenant: str, document_id: str) -> int:
        """Delete a document; durable when this returns. Returns 0 where there was none, else 1.

        Raises:
            FeatureOff: the index is read-only.
            StorageFull: no room; nothing was acknowledged.
        """
        self._check_writable()
        name = index_id(self._index, document_id)
        if not bool(self._index.contains([name], tenant)[0]):
            return 0
        with storing():
            offset = self._index.delete([name], tenant)
        none = np.empty((0, self._index.dim), np.float32)
        self._reuse.record_change(
            tenant, [document_id], none, generation=self._index.generation, offset=offset
        )
        if self._parts.kv is not None:
            self._parts.kv.after_change(tenant, [name], None, None)
        self._metrics.written.labels("delete").inc()
        self._changed(DOCUMENT_DELETED, tenant, [document_id])
        return 1

    def _check_writable(self) -> None:
        if self._index.mode != "rw":
            reason = self._parts.off.get("writes", "opened read-only").removeprefix("off: ")
            raise FeatureOff(
                f"this server has its index read-only (service.writes): {reason}",
                action="start it with writes, or send the change to the server that has them",
            )

    def _vectors_of(self, documents: Sequence[DocumentRow], left_s: float) -> Vector:
        dim = self._index.dim
        vectors = np.empty((len(documents), dim), np.float32)
        textual = []
        for i, document in enumerate(documents):
            if document.vector is None:
                textual.append(i)
                continue
            if document.vector.shape != (dim,):
                raise RequestError(
                    f"vector: expected {dim} numbers, found {document.vector.shape[0]}",
                    where=f"/documents/{i}/vector",
                )
            vectors[i] = document.vector
        if textual:
            texts = [documents[i].text or "" for i in textual]
            vectors[textual] = self._parts.text_model.embed_documents(texts, left_s=left_s)
        return vectors


def index_id(index: ServingIndex, document_id: str) -> int | str:
    """Return an id as the index spells it. Raises RequestError where it cannot be one.

    Only the one spelling that answers have is taken: with "007" or "1_000" a caller would
    write one document and ask for another, and heat would be kept under a name of no document.
    """
    if index.id_kind != "int":
        return document_id
    if not _WHOLE.fullmatch(document_id):
        raise RequestError(
            "id: the ids of this index are whole numbers of 64 bits, written like 17 or -3; "
            f"found {document_id!r}",
            where="id",
        )
    return int(document_id)


@contextlib.contextmanager
def _rows_named() -> Iterator[None]:
    """Name a document's member where the index names a row of its own arguments."""
    try:
        yield
    except InputError as error:
        row = _ROW.match(str(error))
        if row is None:
            raise
        name = _MEMBERS[row[1]]
        reason = f"{name}: {str(error)[row.end() :]}"
        raise RequestError(reason, where=f"/documents/{row[2]}/{name}") from error


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Say "storage full" where a write finds no room, which is not the same as "busy"."""
    try:
        yield
    except (DocumentsFull, NoRoom, LogFull) as error:
        raise StorageFull(str(error)) from error
