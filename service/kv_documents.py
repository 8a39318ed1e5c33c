"""Documents that answers carry, kept per tenant within quotas, and dropped before a change shows.

Every search that asks for texts reads its documents from storage. The few that all ask for are kept
here, in `kvcache.tenant_slots`: hot by recency, cold by use, each tenant within its quota.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

from stoker.index.document_values import Document
from stoker.kvcache.hot_keys import HotKeys
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tenant_slots import SlotCounts, SlotsFull, TenantQuota, TenantSlots

ReadDocuments = Callable[[Sequence[int | str], str], Sequence[Document | None]]

_OVERHEAD_BYTES = 300


class DocumentSlots:
    """A cache of documents in front of the index. Safe from several threads.

    Invariant: what `get` returns was true when the call began or later, for changes that were told
    to `forget` before they were acknowledged. What is read while a change is told is not kept.

    Args:
        read: Reads documents from the index.
        settings: How many bytes for all and for one tenant, and when a document is hot: hot ones
            are read without a lock, and are few, so that they count towards no quota.
    """

    def __init__(self, read: ReadDocuments, settings: KvcacheSettings) -> None:
        self._read = read
        bytes_max, tenant_ratio = settings.documents_bytes_max, settings.documents_tenant_ratio
        self._slots: TenantSlots[tuple[int, Document]] = TenantSlots(
            bytes_max=bytes_max, quota=TenantQuota(max(1, int(bytes_max * tenant_ratio)))
        )
        self._hot: HotKeys[Document] = HotKeys(
            self._held,
            accesses_min=settings.hot_accesses_min,
            window_s=settings.hot_window_s,
            p99_us=settings.hot_p99_us,
            fast_max=settings.hot_keys_max,
        )
        self._lock = threading.Lock()
        self._changes = 0  # told so far
        self._valid_from = 0  # entries of before are of another time

    def get(self, ids: Sequence[int | str], tenant: str) -> list[Document | None]:
        """Return documents as the index does, reading only those that are not here."""
        found: list[Document | None] = [None] * len(ids)
        missing: list[int] = []
        for place, name in enumerate(ids):
            found[place] = self._hot.get(_hot_key(tenant, name))
            if found[place] is None:
                missing.append(place)
        if missing:
            with self._lock:
                before = self._changes
            fresh = self._read([ids[place] for place in missing], tenant)
            for place, document in zip(missing, fresh, strict=True):
                found[place] = document
                if document is not None:
                    self._keep(tenant, ids[place], document, before)
        return found

    def _held(self, key: str) -> Document | None:
        """Return a document from its tenant's slots: the path of what is not hot."""
        tenant, name = key.split("\0", 1)
        valid_from = self._valid_from
        with self._slots.use(tenant, name) as held:
            return held[1] if held is not None and held[0] >= valid_from else None

    def _keep(self, tenant: str, name: int | str, document: Document, before: int) -> None:
        size = _OVERHEAD_BYTES + len(document.text or "")
        size += len(json.dumps(dict(document.metadata), default=str)) if document.metadata else 0
        with self._lock:
            if self._changes != before:  # something was told meanwhile: it may be this one
                return
            try:
                self._slots.put(tenant, _key(name), (before, document), size)
            except SlotsFull:
                return  # larger than the quota, or all of it is being read now

    def forget(self, tenant: str, ids: Sequence[int | str]) -> None:
        """Drop documents that change; call when the change is durable, before it is told."""
        with self._lock:
            self._changes += 1
            for name in ids:
                self._slots.remove(tenant, _key(name))
        for name in ids:
            self._hot.forget(_hot_key(tenant, name))

    def forget_all(self) -> None:
        """Drop everything: another process has written what we were not told of."""
        with self._lock:
            self._changes += 1
            self._valid_from = self._changes
        self._hot.forget_all()

    def counts(self, tenant: str) -> SlotCounts:
        """Return what a tenant holds."""
        return self._slots.counts(tenant)

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        self._slots.check()
        self._hot.check()


def _hot_key(tenant: str, name: int | str) -> str:
    return f"{tenant}\0{name}"  # no tenant's name holds the separator


def _key(name: int | str) -> str:
    return str(name)
