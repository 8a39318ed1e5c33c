"""A warm-up of everything reads the files as they lie, whatever is known to be hot."""

from __future__ import annotations

from pathlib import Path

from topic_corpus import ROWS, corpus

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.prefetch.warm import run_warm
from stoker.service.collection_index import CollectionIndex


class _Unsaid:
    """A source that does not say how much it has room for."""

    def __init__(self, index: CollectionIndex) -> None:
        self.unit_batches, self.load_units = index.unit_batches, index.load_units
        self.total_bytes, self.resident_count = index.total_bytes, index.resident_count


def test_loading_everything_takes_no_more_reads_for_knowing_what_is_hot(tmp_path: Path) -> None:
    """By benefit it took several times as many: the hot pages first, then those between them."""
    path = tmp_path / "index"
    build_collection(path, corpus(), [f"d{row}" for row in range(ROWS)], threads=1)
    hot = {("default", f"d{row}"): 1.0 + row % 7 for row in range(0, ROWS, 9)}
    reads = []
    for heat, roomy in (({}, True), (hot, True), (hot, False)):
        index = CollectionIndex(Collection(path, "r"))
        receipt = run_warm(index if roomy else _Unsaid(index), heat, round_bytes=64 << 10)
        assert receipt.resident_bytes == index.total_bytes()
        reads.append(sum(line.reads for line in receipt.lines))
        index.close()
    assert reads[1] == reads[0]
    assert reads[2] > 3 * reads[1]  # else this corpus could not tell
