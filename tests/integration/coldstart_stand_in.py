"""A brute-force index over one file of vectors, for tests of the cold-start harness only.

A search reads every row that is not in memory yet, so a cold one really reads, and a warmed one
does not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

PAGE_ROWS = 16


class StandIn:
    """Answers exactly, page by page of `PAGE_ROWS` vectors."""

    def __init__(self, path: str) -> None:
        root = Path(path)
        shape = json.loads((root / "shape.json").read_text())
        self._rows, self._dim = shape["rows"], shape["dim"]
        self._file = os.open(root / "vectors.bin", os.O_RDONLY)
        self._pages: dict[int, np.ndarray] = {}
        self._hits = self._misses = 0
        self.page_count = -(-self._rows // PAGE_ROWS)

    def _read(self, page: int) -> int:
        size = PAGE_ROWS * self._dim * 4
        raw = os.pread(self._file, size, page * size)
        self._pages[page] = np.frombuffer(raw, dtype=np.float32).reshape(-1, self._dim)
        return len(raw)

    def search(self, query: np.ndarray, k: int, **_: Any) -> SimpleNamespace:
        pages = read = 0
        for page in range(self.page_count):
            if page in self._pages:
                self._hits += 1
            else:
                self._misses += 1
                pages += 1
                read += self._read(page)
        scores = np.concatenate([self._pages[p] for p in range(self.page_count)]) @ query
        ids = np.argsort(-scores, kind="stable")[:k]
        return SimpleNamespace(ids=ids, completeness=1.0, pages_read=pages, bytes_read=read)

    def warm(self, heat: dict[str, float] | None = None, *, budget_bytes: int | None = None) -> Any:
        read = 0
        hot = None if heat is None else {int(key) // PAGE_ROWS for key in heat}
        for page in range(self.page_count):
            if page not in self._pages and (hot is None or page in hot):
                read += self._read(page)
        return _Receipt(read, len(heat or {}), budget_bytes)

    def resident(self) -> SimpleNamespace:
        page = PAGE_ROWS * self._dim * 4
        return SimpleNamespace(
            resident_bytes=len(self._pages) * page, total_bytes=self.page_count * page
        )

    def page_counts(self) -> tuple[int, int]:
        return self._hits, self._misses

    def close(self) -> None:
        os.close(self._file)


@dataclasses.dataclass
class _Receipt:
    bytes_read: int
    heat_keys: int
    budget_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def build(root: Path, vectors: np.ndarray) -> None:
    """Write the vectors where `open_index` finds them."""
    root.mkdir(parents=True)
    (root / "vectors.bin").write_bytes(np.ascontiguousarray(vectors, dtype=np.float32).tobytes())
    rows, dim = vectors.shape
    (root / "shape.json").write_text(json.dumps({"rows": rows, "dim": dim}))


def open_index(path: str, *, memory_bytes: int | None = None) -> StandIn:
    """What `ColdJob.opener` names."""
    return StandIn(path)


def open_broken(path: str, *, memory_bytes: int | None = None) -> StandIn:
    """An opener that fails, for the test of the message."""
    raise RuntimeError(f"the index at {path} does not open today")


def open_hanging(path: str, *, memory_bytes: int | None = None) -> StandIn:
    """An opener that never ends, however late its starter looks."""
    threading.Event().wait()
    raise AssertionError("nobody sets it")
