"""The small size of `bench_docs_corpora.py`: it runs, prints, and never fails on time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_docs_corpora.py")


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
    options = bench.Options(tmp_path, requests=1_000, queries=60, repeats=1, cloud=False)
    document = bench.run(options)
    with capsys.disabled():
        print(f"\n{bench.render(document)}")
    assert [row["mode"] for row in document["rows"]] == ["none", "all", "stoker"]
    recall = {row["mode"]: row["recall"]["median"] for row in document["rows"]}
    assert recall["stoker"] >= 0.95
    ours = document["rows"][2]
    assert ours["ready_ratio"] <= 0.2
