"""The store of passages' KV: files on disk, the hot ones in host memory, warmed by plan.

It offers its entries to be warmed like the index offers its pages (the protocol that `prefetch`
defines), so that one plan divides one budget between vector pages and KV.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NewType

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import CapacityError, InputError
from stoker.kvcache.kv_file import (
    KvCorrupt,
    KvHeader,
    read_header,
    read_kv,
    sync_folder,
    write_kv,
)
from stoker.kvcache.language_model import Kv
from stoker.kvcache.settings import STORAGES
from stoker.kvcache.worth import Worth

log = structlog.get_logger(__name__)

UnitId = NewType("UnitId", int)
ContentKey = tuple[str, str]
KIND = "kv_block"
_SIZE_STEP = 1 << 16  # loadable units are grouped by size, rounded up to this many bytes


class PassageTooLarge(CapacityError):
    """One entry is larger than the whole budget; it is not kept."""


@dataclasses.dataclass(frozen=True)
class KvUnitBatch:
    """Entries of one size, hottest first: the fields of prefetch's ``UnitBatch``."""

    source: str
    kind: str
    stage: int
    units: NDArray[np.uint32]
    unit_bytes: int
    benefit: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class KvLoadOutcome:
    """What one `PassageStore.load_units` did: the fields of prefetch's ``LoadOutcome``."""

    loaded: int
    already: int
    no_room: int
    failed: int
    not_reached: int
    bytes_read: int
    reads: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PassageCounts:
    """Entries and bytes by tier, and what happened so far."""

    entries: int
    disk_bytes: int
    resident: int
    memory_bytes: int
    hits: int
    loads: int
    misses: int
    evictions: int
    corrupt: int


@dataclasses.dataclass(slots=True)
class _Entry:
    unit: UnitId
    key: ContentKey
    path: Path
    header: KvHeader


class PassageStore:
    """KV of passages for one model, in two tiers with a byte budget each.

    Thread-safe. Files are read and written outside the lock.

    Invariants (`check`): the bytes of each tier are within its budget; what is resident is on
    disk too; a key has at most one entry; a sticky entry leaves memory only with its file.

    Args:
        folder: Where the files are; made if missing. One store per folder at a time.
        model_id: Whose KV it is; files of other models are left alone and not seen.
        memory_bytes_max: Budget of host memory.
        disk_bytes_max: Budget of the files.
        storage: How new files keep numbers: float32 (exact), float16, int8 or int4.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model_id: str,
        memory_bytes_max: int,
        disk_bytes_max: int,
        storage: str = "float32",
    ) -> None:
        if storage not in STORAGES:
            raise InputError(f"storage: expected one of {', '.join(STORAGES)}, found {storage!r}")
        if not model_id.isalnum():
            raise InputError(f"model_id: expected letters and digits, found {model_id!r}")
        self._folder = folder / model_id
        self._model_id = model_id
        self._memory_max = memory_bytes_max
        self._disk_max = disk_bytes_max
        self._storage = storage
        self._lock = threading.RLock()
        self._writing = threading.Lock()  # one writer at a time: a file and its entry agree
        self._entries: dict[UnitId, _Entry] = {}
        self._by_key: dict[ContentKey, UnitId] = {}
        self._worth = Worth()
        self._memory: dict[UnitId, Kv] = {}
        self._sticky: set[UnitId] = set()
        self._memory_bytes = self._disk_bytes = 0
        self._next = 0
        self._hits = self._loads = self._misses = self._evictions = self._corrupt = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        self._scan()

    def _scan(self) -> None:
        found: list[tuple[float, Path, KvHeader]] = []
        for path in self._folder.iterdir():
            # A writer died before it published, or a damaged file was looked at long enough.
            if path.is_dir():  # somebody else's: none of ours is a folder
                continue
            if path.name.startswith(".tmp-") or path.suffix == ".corrupt":
                path.unlink(missing_ok=True)
            elif path.suffix == ".safetensors":
                try:
                    header = read_header(path)
                except (KvCorrupt, OSError) as error:
                    self._quarantine(path, error)
                    continue
                if header.model_id == self._model_id and path.name == self._name(header):
                    found.append((path.stat().st_mtime, path, header))
        for _, path, header in sorted(found, key=lambda item: (item[0], item[1].name)):
            key = (header.tenant, header.chunk_id)
            self._worth.meet(key)
            self._add(key, path, header)
        self._fit_disk(keep=None)

    def _name(self, header: KvHeader) -> str:
        return self._name_of((header.tenant, header.chunk_id))

    def _name_of(self, key: ContentKey) -> str:
        digest = hashlib.blake2b(digest_size=20)
        for part in (self._model_id, *key):
            raw = part.encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return f"{digest.hexdigest()}.safetensors"

    def _quarantine(self, path: Path, error: Exception) -> None:
        self._corrupt += 1
        log.warning("kvcache.file_quarantined", file=path.name, reason=str(error))
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(".corrupt"))

    def _add(self, key: ContentKey, path: Path, header: KvHeader) -> _Entry:
        entry = _Entry(UnitId(self._next), key, path, header)
        self._next += 1
        self._entries[entry.unit] = entry
        self._by_key[key] = entry.unit
        self._disk_bytes += header.file_bytes
        return entry

    def _forget(self, unit: UnitId) -> None:
        entry = self._entries.pop(unit)
        if self._by_key.get(entry.key) == unit:
            del self._by_key[entry.key]
        self._disk_bytes -= entry.header.file_bytes
        self._drop_resident(unit)
        self._sticky.discard(unit)

    def _drop_resident(self, unit: UnitId) -> None:
        kv = self._memory.pop(unit, None)
        if kv is not None:
            self._memory_bytes -= kv.nbytes

    def put(self, tenant: str, chunk_id: str, kv: Kv, *, kind: str = "") -> KvHeader:
        """Keep a passage's KV; durable when this returns. It replaces an earlier one.

        Args:
            tenant: Whose passage.
            chunk_id: Which passage.
            kv: Of its tokens.
            kind: As in `get`.

        Raises:
            PassageTooLarge: it would not fit the disk budget even alone.
            InputError: the arrays do not belong together.
            OSError: the disk failed; an earlier entry is then still there.
        """
        if kv.nbytes > self._disk_max:
            raise PassageTooLarge(
                f"{chunk_id}: expected at most {self._disk_max} bytes, found {kv.nbytes}"
            )
        key = (tenant, chunk_id)
        path = self._folder / self._name_of(key)
        with self._writing:
            header = write_kv(
                path, kv, tenant=tenant, chunk_id=chunk_id, model_id=self._model_id,
                storage=self._storage,
            )  # fmt: skip
            with self._lock:
                previous = self._by_key.get(key)
                if previous is not None:
                    self._forget(previous)
                self._worth.meet(key, kind=kind)
                entry = self._add(key, path, header)
                self._fit_disk(keep=entry.unit)
                if self._storage == "float32":  # else memory held other numbers than the file
                    self._make_resident(entry.unit, kv)
        return header

    def _fit_disk(self, *, keep: UnitId | None) -> None:
        removed = False
        while self._disk_bytes > self._disk_max:
            unit = self._least_worthy(unit for unit in self._entries if unit != keep)
            if unit is None:
                break
            self._entries[unit].path.unlink(missing_ok=True)
            self._forget(unit)
            self._evictions += 1
            removed = True
        if removed:
            sync_folder(self._folder)

    def _least_worthy(self, units: Iterable[UnitId]) -> UnitId | None:
        return min(units, key=lambda unit: self._worth.of(self._entries[unit].key), default=None)

    def _make_resident(self, unit: UnitId, kv: Kv, *, sticky: bool = False) -> bool:
        """Put an entry into memory if less worthy ones can make room; return if it is there."""
        if unit not in self._memory:
            fixed = sum(self._memory[held].nbytes for held in self._sticky if held in self._memory)
            if fixed + kv.nbytes > self._memory_max:
                return False
            while self._memory_bytes + kv.nbytes > self._memory_max:
                victim = self._least_worthy(set(self._memory) - self._sticky)
                assert victim is not None, "what is sticky was counted to leave room"
                self._drop_resident(victim)
                self._evictions += 1
            self._memory[unit] = kv
            self._memory_bytes += kv.nbytes
        if sticky:
            self._sticky.add(unit)
        return True

    def get(
        self, tenant: str, chunk_id: str, token_ids: Sequence[int], *, kind: str = ""
    ) -> Kv | None:
        """Return a passage's KV, from memory or its file, or None.

        Args:
            tenant: Whose passage; another tenant's is never returned.
            chunk_id: Which passage.
            token_ids: Its tokens now. An entry of other tokens is of an older text: removed.
            kind: What piece of a prompt it is ("system", "passage", "history"), where there are
                several: of those used once, what its kind seldom needs again goes first.
        """
        wanted = np.asarray(token_ids, np.int64)
        with self._lock:
            self._worth.use((tenant, chunk_id), kind=kind)
            unit = self._by_key.get((tenant, chunk_id))
            if unit is None:
                self._misses += 1
                return None
            kv = self._memory.get(unit)
            if kv is not None:
                self._hits += 1
        if kv is None:
            kv = self._read(unit)
            if kv is None:
                return None
            with self._lock:
                if unit in self._entries:
                    self._make_resident(unit, kv)
        if not np.array_equal(kv.token_ids, wanted):
            self.remove(tenant, chunk_id)
            return None
        return kv

    def _read(self, unit: UnitId) -> Kv | None:
        with self._lock:
            entry = self._entries.get(unit)
            self._misses += entry is None
        if entry is None:
            return None
        try:
            kv = read_kv(entry.path)
        except (KvCorrupt, OSError) as error:
            with self._lock:
                self._misses += 1
                if self._entries.get(unit) is entry:
                    if not isinstance(error, FileNotFoundError):
                        self._quarantine(entry.path, error)
                    self._forget(unit)
            return None
        with self._lock:
            self._loads += 1
        return kv

    def remove(self, tenant: str, chunk_id: str) -> bool:
        """Forget a passage in every tier; False if it was not there."""
        with self._lock:
            unit = self._by_key.get((tenant, chunk_id))
            if unit is None:
                return False
            self._entries[unit].path.unlink(missing_ok=True)
            self._forget(unit)
            sync_folder(self._folder)
        return True

    def predict(self, weights: Mapping[ContentKey, float]) -> None:
        """Take the heat plan's view: uses expected per passage, soon. It replaces the last."""
        with self._lock:
            kept: dict[Hashable, float] = {
                key: weight for key, weight in weights.items() if key in self._by_key
            }
            self._worth.predict(kept)

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> list[KvUnitBatch]:
        """Offer the entries to a warm plan: those with heat, grouped by size, hottest first."""
        groups: dict[int, list[tuple[float, UnitId]]] = {}
        with self._lock:
            for key, weight in heat.items():
                unit = self._by_key.get(key)
                if unit is not None and weight > 0.0:
                    size = self._entries[unit].header.memory_bytes
                    rounded = -(-size // _SIZE_STEP) * _SIZE_STEP
                    groups.setdefault(rounded, []).append((weight, unit))
        batches = []
        for size, members in sorted(groups.items()):
            members.sort(key=lambda member: (-member[0], member[1]))
            batches.append(
                KvUnitBatch(
                    source="kvcache", kind=KIND, stage=2,
                    units=np.array([unit for _, unit in members], np.uint32), unit_bytes=size,
                    benefit=np.array([weight for weight, _ in members], np.float32),
                )
            )  # fmt: skip
        return batches

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> KvLoadOutcome:
        """Load entries into memory; blocks until done or ``deadline_s`` seconds have passed."""
        if kind != KIND:
            raise InputError(f"kind: expected {KIND!r}, found {kind!r}")
        started = time.monotonic()
        loaded = already = no_room = failed = not_reached = bytes_read = 0
        for number in units:
            unit = UnitId(int(number))
            if deadline_s is not None and time.monotonic() - started > deadline_s:
                not_reached += 1
                continue
            with self._lock:
                entry, kv = self._entries.get(unit), self._memory.get(unit)
                if kv is not None:
                    self._make_resident(unit, kv, sticky=sticky)
                    already += 1
                    continue
            if entry is None:
                failed += 1
                continue
            if not self._has_room(entry):
                no_room += 1
                continue
            kv = self._read(unit)
            if kv is None:
                failed += 1
                continue
            bytes_read += entry.header.file_bytes
            with self._lock:
                if unit in self._entries and self._make_resident(unit, kv, sticky=sticky):
                    loaded += 1
                else:
                    no_room += 1
        return KvLoadOutcome(
            loaded=loaded, already=already, no_room=no_room, failed=failed,
            not_reached=not_reached, bytes_read=bytes_read, reads=loaded,
            seconds=time.monotonic() - started,
        )  # fmt: skip

    def _has_room(self, entry: _Entry) -> bool:
        # A warm-up fills free memory only: it never evicts what demand brought in.
        with self._lock:
            return self._memory_bytes + entry.header.memory_bytes <= self._memory_max

    def total_bytes(self) -> int:
        """Return the bytes of all entries if all were in memory."""
        with self._lock:
            return sum(entry.header.memory_bytes for entry in self._entries.values())

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        """Return how many of these entries are in memory now."""
        with self._lock:
            return sum(kind == KIND and UnitId(int(unit)) in self._memory for unit in units)

    def counts(self) -> PassageCounts:
        """Return what is held and what happened so far."""
        with self._lock:
            return PassageCounts(
                len(self._entries), self._disk_bytes, len(self._memory), self._memory_bytes,
                self._hits, self._loads, self._misses, self._evictions, self._corrupt,
            )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        with self._lock:
            assert self._memory_bytes == sum(kv.nbytes for kv in self._memory.values())
            assert self._memory_bytes <= self._memory_max
            sizes = [entry.header.file_bytes for entry in self._entries.values()]
            assert self._disk_bytes == sum(sizes)
            assert self._disk_bytes <= self._disk_max or len(sizes) == 1
            assert set(self._memory) <= set(self._entries)
            assert self._sticky <= set(self._entries)
            assert {entry.key: unit for unit, entry in self._entries.items()} == self._by_key
            for entry in self._entries.values():
                assert entry.path.is_file(), entry.path.name
