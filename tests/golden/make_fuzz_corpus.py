"""Make the first inputs of the fuzzers: ``python tests/golden/make_fuzz_corpus.py FOLDER``.

Small whole files, from which a fuzzer starts. Inputs that once broke a reader are added by hand,
named after what they broke, and stay for good.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parent


def main() -> None:
    import hnswlib
    from pyroaring import BitMap

    from stoker.index.document_values import Change
    from stoker.index.documents import DocumentStore
    from stoker.index.filter_index import FilterIndex
    from stoker.index.filters import flatten
    from stoker.index.manifest import FILES
    from stoker.index.paged_file import PagedFile
    from stoker.prefetch.snapshot import DIGEST_BYTES, MAGIC

    folder = Path(sys.argv[1])
    seeds: dict[str, list[bytes]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        index = hnswlib.Index(space="l2", dim=2)
        index.init_index(8, M=2, ef_construction=10, random_seed=3)
        index.add_items(np.arange(16, dtype=np.float32).reshape(8, 2), num_threads=1)
        index.save_index(f"{scratch}/graph")
        seeds["hnswlib"] = [Path(f"{scratch}/graph").read_bytes()]
        path = Path(scratch) / "documents.db"
        DocumentStore.create(path, dim=4)
        store = DocumentStore.open(path, dim=4, writable=True)
        vector = np.ones(4, np.float32)
        store.write([Change(0, "a", i, i == 3, f"text {i}", {"n": i}, vector) for i in range(6)])
        store.close()
        seeds["documents"] = [path.read_bytes()]
        np.save(f"{scratch}/vectors.npy", np.arange(12, dtype=np.float32).reshape(4, 3))
        seeds["npy"] = [Path(f"{scratch}/vectors.npy").read_bytes()[6:]]
    head = np.full((4, 1), 3, "<i4")
    seeds["vecs"] = [np.hstack([head, np.ones((4, 3), "<f4").view("<i4")]).tobytes()]
    seeds["dead"] = [BitMap([1, 5, 299]).serialize(), BitMap(range(300)).serialize()]
    heat = (GOLDEN / "heat-v3.snapshot").read_bytes()
    seeds["heat"] = [heat[len(MAGIC) : -DIGEST_BYTES]]
    rows = [{"lang": "en", "n": 1}, {"n": [2, 2**60], "tag": ["a", True]}, {"when": "2021-01-01"}]
    index_bytes = FilterIndex.build(
        ((i, flatten("a", row)) for i, row in enumerate(rows)), len(rows)
    ).to_bytes()
    seeds["filters"] = [index_bytes[8:-4]]
    seeds["current"] = [(GOLDEN / "collection-v1" / "CURRENT").read_bytes().split(b"\n")[0]]
    seeds["expression"] = [
        json.dumps(expression).encode()
        for expression in (
            {"tenant": "default", "lang": {"in": ["en", 1, True]}},
            {"or": [{"n": {"gte": 1, "lt": 2.5}}, {"not": {"when": {"gt": "2020-01-01"}}}]},
            {"n": {"ne": 1}, "lang": {"exists": False}},
        )
    ]
    # On one line: what a fuzzer changes is fields, not white space.
    seeds["manifest"] = [
        json.dumps(
            json.loads((GOLDEN / f"segment-v{version}" / "manifest.json").read_bytes()),
            separators=(",", ":"),
        ).encode()
        for version in (5, 4)
    ]
    ids_path = GOLDEN / "segment-v5" / "ids.stk"
    seeds["paged"] = [ids_path.read_bytes()[:64] + bytes(128)]
    ids = PagedFile(ids_path, kind="ids").read_bytes().tobytes()
    seeds["ids"] = [bytes([1, 12, 40, 0]) + ids[:400], bytes([2, 12, 0, 0]) + bytes(240)]
    seeds["segment"] = [bytes([part, 0, 0, 0]) + b"\xff" * 64 for part in range(len(FILES))]
    seeds["segment"] += [bytes([0x80 | part, 0, 0, 0]) + b"\xff" * 64 for part in range(len(FILES))]
    seeds["segment"] += [bytes([0, page, 0, 0]) + bytes(range(256)) for page in range(3)]
    # The widths of cells lie behind the centre, and a coarse record's numbers at its end.
    parts = list(FILES)
    manifest = json.loads((GOLDEN / "segment-v5" / "manifest.json").read_bytes())
    steps = (4 * manifest["dim"]).to_bytes(2, "little")
    numbers = (manifest["coarse_record_bytes"] - 8).to_bytes(2, "little")
    for value in (0.0, 1e-7, 1e5, np.nan):
        number = np.float32(value).tobytes()
        transform, coarse = (
            next(n for n in range(128, 256) if n % len(parts) == parts.index(part))
            for part in ("transform", "coarse")
        )
        seeds["segment"] += [bytes([transform, 0]) + steps + number * 2]
        seeds["segment"] += [bytes([coarse, 0]) + numbers + number * 2]
    for name, inputs in seeds.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(inputs):
            (folder / name / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    main()
