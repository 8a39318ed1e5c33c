"""The embedding model of a running server: loaded beside the start, then one text at a time.

Loading takes seconds, so it happens in a thread while the index already answers vector searches.
The newest queries' vectors are remembered: the same question comes again, and embedding it costs
more than searching for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.service.problems import DeadlinePassed, FeatureOff, NotReady

log = structlog.get_logger(__name__)

Vector = NDArray[np.float32]

_REMEMBERED_MAX = 4_096
_PROBE = "warm"
# Documents embedded before a waiting query gets its turn: about half a second on two cores.
_PART = 16


class TextEmbedder(Protocol):
    """What is needed of a model; `service.embedding.Embedder` is one."""

    def embed(self, texts: Sequence[str]) -> Vector:
        """Return one unit vector per text: float32, shape (n, dim)."""
        ...


class TextModel:
    """A model that may be off, loading, or on. Safe from several threads.

    Invariants: one call of the model at a time, since it takes all of its threads for each text
    anyway; a query never waits for more than one part of a batch of documents.
    """

    def __init__(
        self,
        embedder: TextEmbedder | None,
        *,
        dim: int,
        off: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold a model; nothing is loaded before `start`.

        Args:
            embedder: None where there is no model.
            dim: Dimensions of the index; a model of another size cannot be used.
            off: Why there is none.
        """
        self._embedder = embedder
        self._dim = dim
        self._off = off
        self._clock = clock
        self._loaded = threading.Event()
        self._turn_over = threading.Condition()
        self._busy = False
        self._queries_waiting = 0
        self._remembered: OrderedDict[str, Vector] = OrderedDict()
        self._remember = threading.Lock()
        self._thread: threading.Thread | None = None
        if embedder is None:
            self._loaded.set()

    @property
    def state(self) -> str:
        """ "on", "loading", or why it is off."""
        if self._off:
            return self._off
        return "on" if self._loaded.is_set() else "loading"

    @property
    def loading(self) -> bool:
        """Whether it is being loaded."""
        return not self._loaded.is_set()

    def start(self) -> None:
        """Load the model in the background."""
        if self._embedder is None:
            return
        self._thread = threading.Thread(target=self._load, name="text-model", daemon=True)
        self._thread.start()

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until loading has ended, well or not."""
        return self._loaded.wait(timeout_s)

    def embed_query(self, text: str, *, left_s: float) -> Vector:
        """Return the text's vector, shape (dim,).

        Raises:
            FeatureOff: there is no model, or it could not be loaded.
            NotReady: it is still being loaded.
            DeadlinePassed: other texts took the time.
        """
        with self._remember:
            known = self._remembered.get(text)
            if known is not None:
                self._remembered.move_to_end(text)
                return known
        embedder = self._ready()
        with self._turn(left_s, query=True):
            vector: Vector = embedder.embed([text])[0]
        with self._remember:
            self._remembered[text] = vector
            while len(self._remembered) > _REMEMBERED_MAX:
                self._remembered.popitem(last=False)
        return vector

    def embed_documents(self, texts: Sequence[str], *, left_s: float) -> Vector:
        """Return the vectors of documents, shape (n, dim), giving way to queries.

        Raises:
            FeatureOff, NotReady: as `embed_query`.
            DeadlinePassed: the time did not suffice; nothing is kept of those that were done.
        """
        embedder = self._ready()
        end = self._clock() + left_s
        parts = []
        for start in range(0, len(texts), _PART):
            left_s = end - self._clock()
            if left_s <= 0:
                raise DeadlinePassed(
                    f"{start} of {len(texts)} texts were embedded in time; nothing was written",
                    where="/documents",
                    action="send fewer documents at once, or send vectors with them",
                )
            with self._turn(left_s, query=False):
                parts.append(embedder.embed(texts[start : start + _PART]))
        return np.concatenate(parts) if parts else np.empty((0, self._dim), np.float32)

    def _ready(self) -> TextEmbedder:
        if self.loading:
            raise NotReady("the embedding model is still being loaded", where="/text")
        if self._off or self._embedder is None:
            raise FeatureOff(
                f"texts cannot be embedded: {self._off}",
                where="/text",
                action="send a vector, or have the operator set service.embed_model",
            )
        return self._embedder

    @contextlib.contextmanager
    def _turn(self, left_s: float, *, query: bool) -> Iterator[None]:
        """Wait for the model; queries go before documents. Raises DeadlinePassed."""
        with self._turn_over:
            self._queries_waiting += query
            try:
                free = self._turn_over.wait_for(
                    lambda: not self._busy and (query or not self._queries_waiting),
                    timeout=max(0.0, left_s),
                )
            finally:
                self._queries_waiting -= query
            if not free:
                self._turn_over.notify_all()
                raise DeadlinePassed("the embedding model was busy with other texts", where="/text")
            self._busy = True
        try:
            yield
        finally:
            with self._turn_over:
                self._busy = False
                self._turn_over.notify_all()

    def _load(self) -> None:
        assert self._embedder is not None
        try:
            dim = self._embedder.embed([_PROBE]).shape[1]
        except StokerError as error:
            self._turn_off(str(error))
        except Exception as error:
            log.exception("service.text_model_failed", reason=str(error))
            self._off = f"off: loading failed with {type(error).__name__}"
        else:
            if dim != self._dim:
                self._turn_off(
                    f"the model of service.embed_model has {dim} dimensions, the index {self._dim}"
                )
        self._loaded.set()

    def _turn_off(self, reason: str) -> None:
        self._off = f"off: {reason}"
        log.error("service.text_model_off", reason=reason)
