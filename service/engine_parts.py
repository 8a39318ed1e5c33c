"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.index.document_values import Document
from stoker.index.hits import Hits
from stoker.index.residency import Residency
from stoker.kvcache.lookup import LookupReuse
from stoker.prefetch.protocols import WarmSource
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.kv_parts import KvParts
from stoker.service.placement_wiring import LivePlacement
from stoker.service.publisher import Publisher
from stoker.service.streams import EventLog
from stoker.service.text_model import TextModel

Vector = NDArray[np.float32]


class ServingIndex(Protocol):
    """What the engine needs of an index; `service.collection_index.CollectionIndex` is one."""

    @property
    def dim(self) -> int: ...
    @property
    def metric(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def change_offset(self) -> int: ...
    @property
    def id_kind(self) -> str | None: ...
    @property
    def count(self) -> int: ...
    @property
    def mode(self) -> str: ...
    def search(
        self,
        query: Vector,
        k: int = 10,
        *,
        ef: int | None = None,
        recall_target: float | None = None,
        deadline_ms: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> Hits: ...
    def documents(self, ids: Sequence[int | str], tenant: str) -> Sequence[Document | None]: ...
    def contains(self, ids: Sequence[int | str], tenant: str) -> NDArray[np.bool_]: ...
    def upsert(
        self,
        ids: Sequence[int | str],
        vectors: Vector,
        *,
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        tenant: str,
    ) -> int: ...
    def delete(self, ids: Sequence[int | str], tenant: str) -> int: ...
    def refresh(self) -> bool: ...
    def in_place(self) -> bool: ...
    def warm_sources(self) -> Sequence[WarmSource]: ...
    def resident(self) -> Residency: ...
    def close(self) -> None: ...


@dataclass
class Parts:
    """What an engine is made of. None means that a part is off; ``off`` says why, by name."""

    index: ServingIndex
    text_model: TextModel
    reuse: LookupReuse | None = None
    event_log: EventLog | None = None
    publisher: Publisher | None = None
    heat: HeatKeeper | None = None
    kv: KvParts | None = None
    placement: LivePlacement | None = None
    off: Mapping[str, str] = field(default_factory=dict)
