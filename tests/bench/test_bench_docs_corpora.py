"""The small size of `bench_docs_corpora.py`: it runs, prints, and never fails on time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("bench_docs_corpora.py")
# Of the three, those with the 8,302 passages that the trace asks for.
CORPORA = ("postgresql15", "kafka")


def part_of(data: Path, folder: Path) -> int:
    """Make a data folder of two corpora, their vectors and the trace; return how many chunks."""
    (folder / "docs_corpora").mkdir(parents=True)
    (folder / "vectors").mkdir()
    (folder / "ragpulse").symlink_to(data / "ragpulse")
    for name in CORPORA:
        file = f"{name}_chunks.jsonl.gz"
        (folder / "docs_corpora" / file).symlink_to(data / "docs_corpora" / file)
    names = (data / "vectors" / "ids.txt").read_text(encoding="utf-8").split("\n")[:-1]
    rows = [row for row, name in enumerate(names) if name.split("/")[0] in CORPORA]
    kept = "".join(f"{names[row]}\n" for row in rows)
    (folder / "vectors" / "ids.txt").write_text(kept, encoding="utf-8")
    vectors = np.load(data / "vectors" / "docs_minilm_f16.npy", mmap_mode="r")
    np.save(folder / "vectors" / "docs_minilm_f16.npy", vectors[rows])
    return len(rows)


@pytest.mark.data
def test_cold_starts_on_documentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("bench_docs_corpora", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_docs_corpora", bench)
    spec.loader.exec_module(bench)
    if not bench.DATA.is_dir():
        pytest.skip(f"needs {bench.DATA}, which is not here")
    count = part_of(bench.DATA, tmp_path / "data")
    monkeypatch.setattr(bench, "DATA", tmp_path / "data")
    options = bench.Options(
        tmp_path / "out", vectors=count, requests=1_000, queries=60, repeats=1, cloud=False
    )
    document = bench.run(options)
    with capsys.disabled():
        print(f"\n{bench.render(document)}")
    assert [row["mode"] for row in document["rows"]] == ["none", "all", "stoker"]
    recall = {row["mode"]: row["recall"]["median"] for row in document["rows"]}
    assert recall["stoker"] >= 0.95
    ours = document["rows"][2]
    assert ours["ready_ratio"] <= 0.2
