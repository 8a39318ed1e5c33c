"""The parts of `kvcache` that a server runs beside its searches, as its settings say.

Each is off until its setting names what it needs: a folder of passages' KV (warmed with the pages,
and dropped field by field when documents change), slots for documents, the order of passages in a
prompt, group keys of searches, an inference engine to warm, shared between replicas, and the folder
of its blocks. What keeps KV is told what the heat expects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import ConfigError, InputError, StokerError
from stoker.index.document_values import Document
from stoker.kvcache.chunk_gate import ChunkGate
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.engine_warm import ContentKey, EngineWarmer
from stoker.kvcache.field_rollback import compare_fields, rolled_back
from stoker.kvcache.passages import PassageStore
from stoker.kvcache.prompt_order import PromptOrder
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tiers import open_gate, open_passages
from stoker.prefetch.protocols import WarmSource
from stoker.service.kv_documents import DocumentSlots
from stoker.service.kv_events import KvEventFollower
from stoker.service.kv_gate import Advance, show_gate
from stoker.service.kv_groups import LookupGroups
from stoker.service.kv_lmcache import LmcachePrefetch
from stoker.service.kv_predict import ReusePrediction
from stoker.service.kv_replicas import ReplicatedMetadata, SharedLeases
from stoker.service.kv_warm import EngineWarmLoop, PromptTokens
from stoker.service.metrics import Metrics
from stoker.service.passage_source import PassageSource
from stoker.service.streams import EventLog

log = structlog.get_logger(__name__)

ReadDocuments = Callable[[Sequence[int | str], str], Sequence[Document | None]]


class KvParts:
    """What of the KV room runs in one server. Safe from several threads.

    Args:
        settings: The room's.
        read: Reads documents from the index.
        index_id: An id as the index spells it, from a text.
        event_log: Carries what replicas tell each other; None where there is none.
        replica: This replica's name.
    """

    def __init__(
        self,
        settings: KvcacheSettings,
        *,
        read: ReadDocuments,
        index_id: Callable[[str], int | str],
        event_log: EventLog | None,
        replica: str,
    ) -> None:
        self._settings = settings
        self._read = read
        self._index_id = index_id
        self._event_log = event_log
        self._replica = replica
        self.passages: PassageStore | None = None
        self.gate: ChunkGate | None = None
        if settings.passages_dir:
            self.passages = open_passages(
                Path(settings.passages_dir), model_id=settings.passages_model_id, settings=settings
            )
            self.gate = open_gate(Path(settings.passages_dir), settings=settings)
        self.documents: DocumentSlots | None = None
        if settings.documents_bytes_max:
            self.documents = DocumentSlots(read, settings)
        self._orders: dict[str, PromptOrder] = {}
        self._orders_lock = threading.Lock()
        self.replicas: ReplicatedMetadata | None = None
        self.warm_loop: EngineWarmLoop | None = None
        self._follower: KvEventFollower | None = None
        self.prediction: ReusePrediction | None = None
        self._groups: LookupGroups | None = None
        if settings.group_keys_enabled:
            self._groups = LookupGroups(
                window_s=settings.reuse_window_s, tenants_max=settings.reuse_tenants_max
            )

    def warm_sources(self) -> list[WarmSource]:
        """Return what a warm-up may load beside the index."""
        return [] if self.passages is None else [PassageSource(self.passages)]

    def show(self, metrics: Metrics, advance: Advance, *, time_s: float) -> None:
        """Bring the metrics of the parts that run up to date."""
        if self.gate is not None:
            show_gate(metrics, self.gate, self._settings.passages_model_id, advance)
        if self._groups is not None:
            metrics.groups.set(self._groups.count(time_s))
        if self.prediction is not None:
            counts = self.prediction.counts()
            metrics.expected_blocks.set(counts.blocks)
            metrics.engine_bytes.set(counts.bytes)
            advance(metrics.evicted_blocks, "evicted blocks", float(counts.removed))

    # -- documents ---------------------------------------------------------------------------

    def read_documents(self, ids: Sequence[int | str], tenant: str) -> Sequence[Document | None]:
        """Return documents, from the tenant's slots where they are there."""
        if self.documents is None:
            return self._read(ids, tenant)
        return self.documents.get(ids, tenant)

    def before_change(
        self, tenant: str, ids: Sequence[int | str]
    ) -> Sequence[Document | None] | None:
        """Return the documents that are about to change, where their fields will be compared."""
        return self._read(ids, tenant) if self.passages is not None else None

    def after_change(
        self,
        tenant: str,
        ids: Sequence[int | str],
        before: Sequence[Document | None] | None,
        after: Sequence[tuple[str | None, Mapping[str, Any]]] | None,
    ) -> None:
        """Roll back what a durable change made wrong; call before it is acknowledged.

        A passage's KV is of its text. It goes where that says something else now, and stays where
        only other fields changed, or only the writing of the text: the tokens are compared again
        whenever it is used, so what stays can cost a miss and never a wrong answer.

        Args:
            before: From `before_change`.
            after: Text and metadata now, in the same order; None for a delete.
        """
        if self.documents is not None:
            self.documents.forget(tenant, ids)
        if self.passages is None:
            return
        kept = gone = 0
        for place, name in enumerate(ids):
            earlier = before[place] if before is not None else None
            if earlier is not None and after is not None and _text_stays(earlier, after[place]):
                kept += 1
            else:
                gone += self.passages.remove(tenant, str(name))
        if gone or kept:
            log.debug("service.passages_rolled_back", kept=kept, rolled_back=gone)

    def forget_documents(self) -> None:
        """Drop all documents: another process has written."""
        if self.documents is not None:
            self.documents.forget_all()

    # -- prompts -----------------------------------------------------------------------------

    def prompt_order(self, tenant: str, names: Sequence[str]) -> tuple[str, ...]:
        """Return results in the order that shares the longest prompt; () where that is off."""
        if not self._settings.prompt_order_enabled or not names:
            return ()
        with self._orders_lock:
            order = self._orders.get(tenant)
            if order is None:
                while len(self._orders) >= self._settings.reuse_tenants_max:
                    del self._orders[next(iter(self._orders))]
                order = self._orders[tenant] = PromptOrder(nodes_max=50_000)
            return tuple(str(name) for name in order.arrange(list(dict.fromkeys(names))))

    def group_key(
        self, tenant: str, text: str | None, vector: NDArray[np.float32], time_s: float
    ) -> str:
        """Return a search's group key; empty where that is off, and for a search by vector."""
        if self._groups is None or text is None:
            return ""
        try:
            return self._groups.key(tenant, text, vector, time_s)
        except InputError:
            return ""  # a text whose embedding is all zero has no direction, and so no neighbour

    # -- an inference engine -----------------------------------------------------------------

    def start(
        self, *, heat: Callable[[], Mapping[ContentKey, float]], generation: Callable[[], int]
    ) -> None:
        """Begin to warm the engine, if one is named, and to tell what keeps KV what is expected.

        Raises:
            UnavailableError: its tokenizer, or a package for its events, is missing.
        """
        settings = self._settings
        self._start_prediction(heat)
        if not settings.engine_url:
            return
        if self._event_log is not None and settings.engine_shared:
            self.replicas = ReplicatedMetadata(self._event_log, replica=self._replica)
            self.replicas.start()
        if settings.engine_events:
            self._follower = KvEventFollower(settings.engine_events, settings.engine_replay)
        warmer = EngineWarmer(
            LmcachePrefetch(
                settings.engine_url,
                model_name=settings.engine_model,
                world_size=settings.engine_world_size,
                cache_salt=settings.engine_salt,
            ),
            tokens_per_s_max=settings.engine_tokens_per_s_max,
            leases_max=settings.engine_leases_max,
            lease_s=settings.engine_lease_s,
        )
        leases = None
        if self.replicas is not None:
            leases = SharedLeases(self.replicas, lease_s=settings.engine_lease_s)
        self.warm_loop = EngineWarmLoop(
            warmer,
            heat=heat,
            tokens_of=self._prompt_tokens(),
            generation=generation,
            held=None if self._follower is None else self._follower.matched,
            leases=leases,
            every_s=settings.engine_every_s,
        )  # fmt: skip
        self.warm_loop.start()

    def _start_prediction(self, heat: Callable[[], Mapping[ContentKey, float]]) -> None:
        settings = self._settings
        blocks: EngineBlocks | None = None
        tokens_of: Callable[[ContentKey], Sequence[int] | None] = _no_tokens
        if settings.engine_blocks_dir:
            tokens_of = self._prompt_tokens()
            blocks = EngineBlocks(
                Path(settings.engine_blocks_dir),
                model_id=settings.engine_blocks_model_id,
                block_tokens=settings.kv_block_tokens,
                bytes_max=settings.kv_disk_bytes_max,
            )
        if blocks is None and self.passages is None:
            return
        self.prediction = ReusePrediction(
            heat,
            passages=self.passages,
            blocks=blocks,
            root=None if blocks is None else blocks.root(settings.engine_blocks_tenant),
            tokens_of=tokens_of,
            passages_max=settings.predict_passages_max,
            every_s=settings.predict_every_s,
        )
        self.prediction.start()

    def _prompt_tokens(self) -> PromptTokens:
        settings = self._settings
        return PromptTokens(
            self._text_of,
            open_tokenizer(settings.engine_tokenizer),
            before=settings.engine_before,
        )

    def _text_of(self, key: ContentKey) -> str | None:
        # Past the slots: what is read to look ahead is no demand, and would push that out.
        tenant, name = key
        try:
            (document,) = self._read([self._index_id(name)], tenant)
        except (StokerError, ValueError):
            return None  # an id that this index cannot have
        return None if document is None else document.text

    def close(self, timeout_s: float) -> bool:
        """Give the engine's leases back and stop following; tells whether that took no longer."""
        idle = True
        if self.prediction is not None:
            idle = self.prediction.close(timeout_s)
        if self.warm_loop is not None:
            idle = self.warm_loop.close(timeout_s) and idle
        if self._follower is not None:
            self._follower.close()
        if self.replicas is not None:
            idle = self.replicas.close(timeout_s) and idle
        return idle


def _no_tokens(key: ContentKey) -> None:
    """Answer for a server without an engine's blocks: no sequence is needed."""


def _text_stays(before: Document, after: tuple[str | None, Mapping[str, Any]]) -> bool:
    text, metadata = after
    verdicts = compare_fields(_fields(before.text, before.metadata or {}), _fields(text, metadata))
    return "text" not in rolled_back(verdicts)


def _fields(text: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    fields = {f"metadata.{name}": str(value) for name, value in metadata.items()}
    return fields if text is None else {**fields, "text": text}


def open_tokenizer(folder: str) -> Callable[[str], Sequence[int]]:
    """Open an engine's tokenizer from the file ``tokenizer.json`` of its model's folder.

    Raises:
        ConfigError: there is no such file, or it is none.
        UnavailableError: the package `tokenizers` is missing.
    """
    from stoker.service.kv_events import need_package

    tokenizers = need_package("tokenizers", extra="models")
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more precise
        raise ConfigError(f"kvcache.engine_tokenizer: {path}: {error}") from error
    return lambda text: tokenizer.encode(text, add_special_tokens=True).ids
