"""How soon a change ends the earlier answers that it alters: in the server that writes, and in
servers that read the same index.

``python tests/bench/bench_kvcache_fence.py`` (half a minute). Each change is a document nearer to a
question than all before it. In the writing server the answer must have it at once; in a reading
server, asked over and over, the time from the write's return to the first answer that has it is
what counts. ``tests/integration/test_kvcache_fence_delay.py`` shows that it cannot reach a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import stoker
from stoker.index.collection import Collection
from stoker.kvcache.lookup import LookupReuse
from stoker.service.bodies import DocumentRow, SearchRequest
from stoker.service.collection_index import CollectionIndex
from stoker.service.configuration import StokerConfig
from stoker.service.engine import Engine
from stoker.service.engine_parts import Parts
from stoker.service.settings import ServiceSettings
from stoker.service.text_model import TextModel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import machine

DIM, K = 64, 10
LATE_S = 30.0  # by then something is broken


class OneVector:
    """Every text has the question's vector: what is measured is not the model."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.tile(np.eye(DIM, dtype=np.float32)[0], (len(texts), 1))


def engine_of(path: Path, mode: str, refresh_s: float) -> Engine:
    config = StokerConfig(service=ServiceSettings(warm="none", refresh_s=refresh_s))
    text_model = TextModel(OneVector(), dim=DIM)
    index = CollectionIndex(Collection(path, "rw" if mode == "rw" else "r"))
    engine = Engine(
        Parts(index, text_model, LookupReuse(config.kvcache)), config=config, receipt_path=None
    )
    engine.start()
    assert text_model.wait_loaded(60.0)
    return engine


def ask(engine: Engine) -> tuple[set[str], bool]:
    """Return the ids found, and whether an earlier answer was reused."""
    request = SearchRequest(
        text="which passage is nearest", vector=None, k=K, filters=None, tenant=None,
        recall_target=None, deadline_ms=60_000, session=None, route=None, include_text=False,
        include_metadata=False,
    )  # fmt: skip
    answer = engine.search(request, tenant="default", left_s=60.0, request_id="r")
    return {result.id for result in answer.results}, answer.reuse.decision == "reused"


def measure(folder: Path, *, changes: int, documents: int, refresh_s: float) -> dict[str, object]:
    rng = np.random.default_rng(97)
    vectors = rng.standard_normal((documents, DIM)).astype(np.float32)
    stoker.build(folder / "index", vectors, [f"d{n}" for n in range(documents)], metric="cosine")
    writer = engine_of(folder / "index", "rw", refresh_s)
    reader = engine_of(folder / "index", "r", refresh_s)
    delays, at_once, reused = [], 0, 0
    try:
        for number in range(changes):
            ask(writer)
            ask(reader)
            time.sleep(float(rng.random()) * refresh_s)  # wherever between two looks
            vector = np.eye(DIM, dtype=np.float32)[0]
            vector[1] = 0.5 / (number + 2)
            name = f"new{number}"
            writer.upsert("default", [DocumentRow(name, None, vector, {})], left_s=60.0)
            written = time.monotonic()
            at_once += name in ask(writer)[0]
            while name not in (answer := ask(reader))[0]:
                if time.monotonic() - written > LATE_S:
                    raise SystemExit(f"the reading server did not show {name} within {LATE_S:g} s")
                reused += answer[1]
                time.sleep(0.001)
            delays.append(time.monotonic() - written)
    finally:
        reader.close()
        writer.close()
    return {
        "changes": changes, "refresh_s": refresh_s, "writer_at_once": at_once,
        "reader_delay_s_median": round(float(np.median(delays)), 3),
        "reader_delay_s_max": round(max(delays), 3), "reused_before": reused,
    }  # fmt: skip


def test_fence_delay_at_a_small_size(tmp_path: Path) -> None:
    row = measure(tmp_path, changes=3, documents=200, refresh_s=0.01)
    print(row)
    assert row["writer_at_once"] == row["changes"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--documents", type=int, default=20_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        print(
            measure(
                Path(made),
                changes=chosen.changes,
                documents=chosen.documents,
                refresh_s=ServiceSettings().refresh_s,
            )
        )
    print(f"machine {machine()}; command python {' '.join(sys.argv)}")
