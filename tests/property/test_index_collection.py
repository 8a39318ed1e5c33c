"""A collection against a dict: whatever is done to it, it holds and finds what the dict holds."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.index.collection import Collection
from stoker.index.collection_build import create_collection
from stoker.index.settings import IndexSettings

DIM = 3
# Memory where there is some: thousands of steps that each wait for a disk would take minutes.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _load(name: str) -> Any:
    """Load a helper from tests/: the tests are no package, so it has no import name."""
    path = Path(__file__).resolve().parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if name not in sys.modules:
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


ENGINE = _load("brute_force_engine").BruteForceEngine()
SETTINGS = IndexSettings(merge_rows=0, segments_max=3)
VECTORS = st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM)
TENANTS = st.sampled_from(["default", "default", "a"])


class CollectionMachine(RuleBasedStateMachine):
    """Upserts, deletes, merges, reopens, and a second process's reader that follows."""

    @initialize(
        metric=st.sampled_from(["ip", "cosine", "l2"]), kind=st.sampled_from(["int", "str"])
    )
    def make(self, metric: str, kind: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-collection-", dir=SCRATCH))
        self.path = self.folder / "c"
        self.metric = metric
        self.kind = kind
        create_collection(self.path, dim=DIM, metric=metric)
        self.collection = self.opened("rw")
        self.reader = self.opened("r")
        self.model: dict[tuple[str, Any], tuple[np.ndarray, dict[str, Any], str | None]] = {}

    def opened(self, mode: Any) -> Collection:
        return Collection(self.path, mode, settings=SETTINGS, engine=ENGINE)

    def name(self, number: int) -> Any:
        return number - 3 if self.kind == "int" else f"doc-{number}"

    @rule(
        tenant=TENANTS,
        documents=st.lists(
            st.tuples(st.integers(0, 9), VECTORS, st.integers(0, 3)), min_size=1, max_size=5
        ),
        bodies=st.booleans(),
    )
    def upsert(
        self, tenant: str, documents: list[tuple[int, list[int], int]], bodies: bool
    ) -> None:
        ids = [self.name(number) for number, _, _ in documents]
        vectors = np.array([vector for _, vector, _ in documents], dtype=np.float32)
        texts = [f"text {year}" for _, _, year in documents] if bodies else None
        metadata = [{"year": year} for _, _, year in documents] if bodies else None
        before = self.collection.change_offset
        offset = self.collection.upsert(ids, vectors, texts=texts, metadata=metadata, tenant=tenant)
        assert offset == before + len(set(ids)) == self.collection.change_offset
        for i, document_id in enumerate(ids):
            self.model[tenant, document_id] = (
                vectors[i],
                metadata[i] if metadata else {},
                texts[i] if texts else None,
            )

    @rule(tenant=TENANTS, numbers=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def delete(self, tenant: str, numbers: list[int]) -> None:
        self.collection.delete([self.name(number) for number in numbers], tenant)
        for number in numbers:
            self.model.pop((tenant, self.name(number)), None)

    @rule(full=st.booleans())
    def merge(self, full: bool) -> None:
        before = self.collection.generation
        report = self.collection.merge(full=full)
        assert self.collection.generation == before + int(report.merged)
        if report.merged:
            assert self.collection.delta_rows == 0
        if full:
            assert len(self.collection.segment_names) <= 1
        if report.merged and full:
            assert report.rows == len(self.model)
            on_disk = sorted(path.name for path in (self.path / "segments").iterdir())
            held = set(self.reader.segment_names) | set(self.collection.segment_names)
            assert set(on_disk) <= held

    @rule()
    def reopen(self) -> None:
        self.collection.close()
        self.collection = self.opened("rw")

    @rule()
    def reopen_the_reader(self) -> None:
        self.reader.close()
        self.reader = self.opened("r")
        self.compare(self.reader)

    @rule()
    def follow(self) -> None:
        self.reader.refresh()
        assert self.reader.generation == self.collection.generation
        self.compare(self.reader)

    @precondition(lambda self: self.collection.segment_names)
    @rule(data=st.data())
    def lose_what_can_be_made_anew(self, data: st.DataObject) -> None:
        self.collection.close()
        folder = self.path / data.draw(st.sampled_from(["filters", "dead"]))
        for path in folder.iterdir():
            if data.draw(st.booleans()):
                path.unlink()
            else:
                path.write_bytes(b"junk")
        self.collection = self.opened("rw")

    @rule(query=VECTORS, k=st.integers(1, 12), year=st.integers(0, 3), tenant=TENANTS)
    def search(self, query: list[int], k: int, year: int, tenant: str) -> None:
        vector = np.array(query, dtype=np.float32)
        self.compare_search(self.collection, vector, k, None, lambda key, data: True)
        self.compare_search(
            self.collection,
            vector,
            k,
            {"tenant": tenant, "year": {"gte": year}},
            lambda key, data: key[0] == tenant and data.get("year", -1) >= year,
        )
        self.compare_search(
            self.collection, vector, k, {"tenant": tenant}, lambda key, data: key[0] == tenant
        )

    def compare_search(
        self, collection: Collection, query: Any, k: int, expression: Any, holds: Any
    ) -> None:
        hits = collection.search(query, k, filter=expression)
        scored = []
        for key, (vector, data, _) in self.model.items():
            if holds(key, data):
                scored.append((self.score(query, vector), key[1]))
        scored.sort(key=lambda pair: pair[0] if self.metric == "l2" else -pair[0])
        wanted = [score for score, _ in scored[:k]]
        found = ~np.isnan(hits.scores)
        assert int(found.sum()) == len(wanted)
        np.testing.assert_allclose(hits.scores[: len(wanted)], wanted, atol=1e-5)
        assert np.isnan(hits.scores[len(wanted) :]).all()
        # Equal scores may come in any order, and the same id may be two tenants' document.
        for document_id, score in zip(hits.ids[: len(wanted)], hits.scores, strict=False):
            assert any(
                document_id == other and abs(score - other_score) < 1e-5
                for other_score, other in scored
            )
        assert hits.completeness == 1.0

    def score(self, query: Any, vector: Any) -> float:
        q, v = query.astype(np.float64), vector.astype(np.float64)
        if self.metric == "l2":
            return float(((q - v) ** 2).sum())
        if self.metric == "ip":
            return float(q @ v)
        length = np.linalg.norm(q) * np.linalg.norm(v)
        return float(q @ v / length) if length else 0.0

    def compare(self, collection: Collection) -> None:
        assert collection.count == len(self.model)
        assert collection.change_offset == self.collection.change_offset
        query = np.array([1, -2, 3], dtype=np.float32)
        self.compare_search(collection, query, 30, None, lambda key, data: True)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "collection"):
            return
        self.collection.check()
        assert self.collection.count == len(self.model)
        for tenant in ("default", "a"):
            ids = [self.name(number) for number in range(10)]
            live = self.collection.contains(ids, tenant)
            assert live.tolist() == [(tenant, value) in self.model for value in ids]
            for value, document in zip(ids, self.collection.documents(ids, tenant), strict=True):
                known = self.model.get((tenant, value))
                assert (document is None) == (known is None)
                if document is not None and known is not None:
                    assert (document.metadata, document.text) == (known[1], known[2])

    def teardown(self) -> None:
        if hasattr(self, "collection"):
            self.collection.close()
            self.reader.close()
            shutil.rmtree(self.folder)


TestCollection = CollectionMachine.TestCase
TestCollection.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestCollection.pytestmark = [pytest.mark.timeout(300)]
