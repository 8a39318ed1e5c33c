"""Make the golden collection, version 1: ``python tests/golden/make_collection_v1.py FOLDER``.

Run once, when the version was new. Later readers must still read what it wrote, so it is run again
only to make the golden collection of a *new* version, under a new name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SEED = 20_261_129


def main() -> None:
    from stoker.index.collection import Collection
    from stoker.index.collection_build import create_collection
    from stoker.index.settings import IndexSettings

    folder = Path(sys.argv[1])
    # Sums of small integers, so that every machine makes the same ones.
    vectors = np.random.default_rng(SEED).integers(-8, 9, (30, 8)).astype(np.float32)
    create_collection(folder, dim=8, metric="l2", m=4, ef_construction=20)
    with Collection(folder, "rw", settings=IndexSettings(merge_rows=0)) as collection:
        ids = [f"chunk-{i}" for i in range(20)]
        texts = [f"text {i}" for i in range(20)]
        metadata = [{"n": i, "lang": ["en", "de"][i % 2]} for i in range(20)]
        collection.upsert(ids, vectors[:20], texts=texts, metadata=metadata)
        collection.upsert(["chunk-0"], vectors[20:21], metadata=[{"n": 100}], tenant="other")
        collection.merge()
        collection.upsert(["chunk-1"], vectors[21:22], texts=["newer"], metadata=[{"n": 1}])
        collection.merge()
        collection.delete(["chunk-2"])
        collection.upsert(["late"], vectors[22:23], metadata=[{"created": "2026-11-29"}])
        assert (len(collection.segment_names), collection.count) == (2, 21)
    (folder / "writer.lock").unlink()


if __name__ == "__main__":
    main()
