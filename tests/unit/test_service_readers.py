"""Readers: what each format becomes, and what each kind of bad input says."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError, UnavailableError
from stoker.service.passages import Passage, ReadReport
from stoker.service.readers import ReadLimits, read_paths
from stoker.service.readers_rows import RowLimits


def read(
    paths: Path | Sequence[Path], limits: ReadLimits | None = None
) -> tuple[list[Passage], ReadReport]:
    report = ReadReport()
    given = [paths] if isinstance(paths, Path) else paths
    return list(read_paths(given, report=report, limits=limits)), report


def lines(path: Path, *rows: Any) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    )
    return path


def test_folder_is_read_in_name_order_with_headings(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    (root / "b").mkdir(parents=True)
    (root / "b" / "two.txt").write_text("A plain paragraph.\n\nAnother one.")
    (root / "a.md").write_text(
        "---\ntitle: x\n---\n# Caches\n\nA *cache* keeps `pages`.\n\n## Warm\n\n- first\n- second\n"
    )
    (root / "c.rst").write_text(
        "Title\n=====\n\nA paragraph about :func:`os.walk`.\n\n.. note:: Mind the gap.\n\n"
        ".. function:: spam(eggs)\n   :noindex:\n\n   Fries the eggs.\n"
    )
    (root / "d.html").write_text(
        "<html><head><style>p{}</style></head><body><h1>Heat</h1><p>Hot &amp; cold</p>"
        "<script>evil()</script><h2>Decay</h2><ul><li>one</li><li>two</li></ul></body></html>"
    )
    passages, report = read(root)
    assert [p.id for p in passages] == [
        "docs/a.md#0",
        "docs/a.md#1",
        "docs/c.rst#0",
        "docs/d.html#0",
        "docs/d.html#1",
        "docs/b/two.txt#0",
    ]
    text = {p.id: p.text for p in passages}
    assert text["docs/a.md#0"] == "Caches\nA cache keeps pages."
    assert passages[1].metadata["headings"] == ["Caches", "Warm"]
    assert "about os.walk." in text["docs/c.rst#0"]
    assert "Mind the gap." in text["docs/c.rst#0"]
    assert "spam(eggs) Fries the eggs." in text["docs/c.rst#0"]
    assert text["docs/d.html#0"] == "Heat\nHot & cold"
    assert text["docs/d.html#1"] == "Decay\none two"
    assert report.passage_count == 6
    assert report.file_count == 4


def test_ids_and_hashes_are_stable_and_follow_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One thing.")
    first = read(path)[0][0]
    assert read(path)[0][0] == first
    path.write_text("Another thing.")
    second = read(path)[0][0]
    assert second.id == first.id == "a.txt#0"
    assert second.metadata["content_hash"] != first.metadata["content_hash"]


def test_what_a_folder_holds_and_cannot_be_read_is_skipped_and_said(tmp_path: Path) -> None:
    root = tmp_path / "mixed"
    root.mkdir()
    (root / "good.txt").write_text("Fine.")
    (root / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (root / "binary.txt").write_bytes(b"\x7fELF\0\0\0")
    (root / "wide.txt").write_bytes("wide".encode("utf-16"))
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / ".hidden.txt").write_text("not read")
    os.mkfifo(root / "pipe.txt")
    (root / "dangling.txt").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    (root / "good_again.txt").symlink_to(root / "good.txt")
    passages, report = read(root)
    assert [p.id for p in passages] == ["mixed/good.txt#0"]
    reasons = {Path(s.origin).name: s.reason for s in report.skipped}
    assert reasons["latin.txt"] == "not UTF-8 at byte 3"
    assert "binary" in reasons["binary.txt"]
    assert "UTF-16" in reasons["wide.txt"]
    assert reasons["image.png"] == "unknown ending"
    assert reasons["pipe.txt"] == "not a regular file"
    assert "loop" in reasons
    assert "another name" in reasons["good_again.txt"]
    assert report.skipped_count == len(report.skipped) == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8 at byte 3"),
        ("a.exe", b"MZ", "unknown ending"),
        ("a.txt", b"x" * 101, "file_bytes_max = 100"),
        ("a.txt", b"", "no passage found"),
        ("a.npy", b"not numpy", "not a readable .npy"),
        ("a.jsonl.gz", b"not gzip", "damaged gzip"),
        ("a.parquet", b"PAR1 nope", "damaged Parquet"),
    ],
)
def test_a_named_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(path, ReadLimits(file_bytes_max=100))


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: No such file"):
        read(tmp_path / "nowhere")


def test_jsonl_keeps_metadata_and_other_keys(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"id": "x", "text": "one", "metadata": {"tag": "t"}, "page": 3},
        "",
        {"id": 7, "text": "two"},
    )
    passages, _ = read(path)
    assert [p.id for p in passages] == ["x", "7"]
    assert passages[0].metadata["tag"] == "t"
    assert passages[0].metadata["page"] == 3
    assert passages[0].metadata["source"] == "a.jsonl"
    assert passages[1].origin == f"{path}:3"


def test_gzip_jsonl_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id":"x","text":"one"}\n{"id":"y","text":"two"}'))
    assert [p.id for p in read(path)[0]] == ["x", "y"]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: damaged gzip data after line \d"):
        read(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ('{"text": "x"}', "`id` is missing"),
        ('{"id": "", "text": "x"}', "1 to 383 bytes"),
        ('{"id": "' + "x" * 384 + '", "text": "x"}', "1 to 383 bytes"),
        ('{"id": true, "text": "x"}', "found bool"),
        ('{"id": "a\\u0000b", "text": "x"}', "control characters"),
        ('{"id": "a", "text": 5}', "`text` must be a string, found int"),
        ('{"id": "a"}', "neither a `text` nor a `vector`"),
        ('{"id": "a", "text": "x", "metadata": [1]}', "`metadata` must be an object"),
        ('{"id": "a", "text": "x", "tenant": "t"}', "metadata key 'tenant' cannot be used"),
        ('{"id": "a", "text": "x", "m": ' + '{"a":' * 300 + "1" + "}" * 301, "Recursion limit"),
        ('{"id": "a", "vector": [1.0, NaN]}', "not valid JSON"),
        ('{"id": "a", "vector": [1.0, 1e300]}', "not finite as float32 at place 1"),
        ('{"id": "a", "vector": []}', "not empty"),
        ('{"id": "a", "vector": [0, 0]}', "all zeros"),
        ('{"id": "a", "vector": [1, "2"]}', "numbers only"),
        ('{"id": "a", "vector": [[1], [2]]}', "numbers only"),
        ('{"id": "a", "vector": {"0": 1}}', "list of numbers"),
        ('{"id": "ok", "text": "x"}', "already used at .*a.jsonl:1"),
        ('{"id": "a", "vector": [1, 2]}', "vector for all or for none"),
        ('{"id": "a", "text": "' + "x" * 3000 + '"}', "line_bytes_max = 2000"),
        ('{"id": "a", "text": "\ud800"}'.encode("utf-8", "surrogatepass"), "not valid JSON"),
    ],
)
def test_a_bad_row_stops_with_file_and_line_or_is_counted(
    tmp_path: Path, row: str | bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    raw = row if isinstance(row, bytes) else row.encode()
    good = b'{"id": "ok", "text": "fine"}\n'
    path.write_bytes(good + raw + b'\n{"id": "ok2", "text": "fine"}\n')
    rows = RowLimits(line_bytes_max=2000)
    with pytest.raises(InputError, match=rf"a\.jsonl:2: .*{message}"):
        read(path, ReadLimits(rows=rows))
    passages, report = read(path, ReadLimits(rows=rows, bad_rows_skipped=True))
    if "for all or for none" not in message:
        assert [p.id for p in passages] == ["ok", "ok2"]
        assert report.skipped_count == 1


def test_vectors_of_two_widths_are_refused_across_files(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", {"id": "a", "vector": [1, 2, 3]})
    two = lines(tmp_path / "two.jsonl", {"id": "b", "vector": [1, 2]})
    with pytest.raises(InputError, match=r"two\.jsonl:1: vector has 2 numbers, expected 3 as at"):
        read([one, two])


def test_npy_takes_its_ids_from_beside_it(tmp_path: Path) -> None:
    matrix = np.eye(3, 4, dtype=np.float16)
    np.save(tmp_path / "m.npy", matrix)
    assert [p.id for p in read(tmp_path / "m.npy")[0]] == ["m.npy#0", "m.npy#1", "m.npy#2"]
    (tmp_path / "ids.txt").write_text("a\nb\nc\n")
    passages, _ = read(tmp_path / "m.npy")
    assert [p.id for p in passages] == ["a", "b", "c"]
    assert passages[1].vector is not None
    assert passages[1].vector.dtype == np.float32
    (tmp_path / "ids.txt").write_text("a\nb\n")
    with pytest.raises(InputError, match=r"ids\.txt: has 2 ids for a matrix of 3 rows"):
        read(tmp_path / "m.npy")


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.array([[1.0, np.nan]], dtype=np.float32), "row 0: vector is not finite"),
        (np.zeros((1, 2), dtype=np.float32), "row 0: vector is all zeros"),
        (np.ones(3, dtype=np.float32), r"found float32 of shape \(3,\)"),
        (np.ones((2, 2), dtype=np.float64), "found float64"),
        (np.ones((0, 2), dtype=np.float32), "empty"),
        (np.array([["a"]], dtype=object), "not a readable"),
    ],
)
def test_bad_matrices_are_refused(tmp_path: Path, matrix: np.ndarray, message: str) -> None:
    np.save(tmp_path / "m.npy", matrix, allow_pickle=True)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "m.npy")


def test_parquet_rows_become_passages(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table(
        {
            "id": ["a", "b"],
            "text": ["one", "two"],
            "metadata": [{"k": "v"}, {"k": "w"}],
            "vector": arrow.array([[1.0, 0.0], [0.0, 1.0]], arrow.list_(arrow.float32(), 2)),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    passages, _ = read(tmp_path / "a.parquet")
    assert [(p.id, p.text, p.metadata["k"]) for p in passages] == [
        ("a", "one", "v"),
        ("b", "two", "w"),
    ]
    bad = arrow.table({"id": ["a", "a"], "text": ["one", "two"]})
    parquet.write_table(bad, tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet row 1: id 'a' is already used"):
        read(tmp_path / "b.parquet")
    parquet.write_table(arrow.table({"key": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"needs a column `id`"):
        read(tmp_path / "c.parquet")


@pytest.mark.parametrize("name", ["a.md", "a.html", "a.rst", "a.parquet"])
def test_a_missing_library_is_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("markdown_it", "bs4", "docutils.core", "docutils", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_text("# x\n\ntext")
    with pytest.raises(UnavailableError, match=r"stoker\[formats\]"):
        read(tmp_path / name)


def test_deeply_nested_documents_do_not_break_the_reader(tmp_path: Path) -> None:
    (tmp_path / "deep.html").write_text("<div>" * 5_000 + "core" + "</div>" * 5_000)
    (tmp_path / "deep.md").write_text("> " * 2_000 + "core\n")
    passages, _ = read(tmp_path)
    assert any("core" in p.text for p in passages if p.id.endswith("deep.html#0"))


def test_a_page_with_too_many_parts_is_not_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.service.readers_text._NODES_MAX", 100)
    (tmp_path / "wide.html").write_text("<p>x</p>" * 100 + "<p>the end</p>")
    (tmp_path / "good.txt").write_text("Fine.")
    passages, report = read(tmp_path)
    assert [p.text for p in passages] == ["Fine."]
    assert [s.reason for s in report.skipped] == ["has more than 100 tags and texts"]
    with pytest.raises(InputError, match=r"wide\.html: has more than 100"):
        read(tmp_path / "wide.html")


def test_metadata_that_an_index_cannot_keep_stops_at_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "a", "text": "x", "metadata": {"m": "y" * 70_000}}))
    with pytest.raises(InputError, match=r"a\.jsonl:1: `metadata`: expected at most 65536 bytes"):
        read(path)


def test_a_file_whose_path_cannot_begin_an_id_is_skipped_and_said(tmp_path: Path) -> None:
    deep = tmp_path / "docs" / ("a" * 200) / ("b" * 200)
    deep.mkdir(parents=True)
    (deep / "long.txt").write_text("Far down.")
    (tmp_path / "docs" / "two\nlines.txt").write_text("Odd.")
    (tmp_path / "docs" / "good.txt").write_text("Fine.")
    passages, report = read(tmp_path / "docs")
    assert [p.id for p in passages] == ["docs/good.txt#0"]
    assert all("its name cannot begin ids" in s.reason for s in report.skipped)
    assert report.skipped_count == 2


def test_restructured_text_cannot_include_files_or_raw(tmp_path: Path) -> None:
    secret = tmp_path / "secret.dat"
    secret.write_text("do not read me")
    doc = tmp_path / "a.rst"
    doc.write_text(
        f"Text.\n\n.. include:: {secret}\n\n.. raw:: html\n   :file: {secret}\n\n"
        f".. literalinclude:: {secret}\n\n.. csv-table:: t\n   :file: {secret}\n"
    )
    passages, _ = read(doc)
    assert all("do not read me" not in p.text for p in passages)
    assert passages[0].text.startswith("Text.")


def test_files_of_one_name_in_different_folders_keep_apart(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text(f"# {folder}\n\nWords of {folder}.\n")
    paths = [tmp_path / "one" / "README.md", tmp_path / "two" / "README.md"]
    ids = [passage.id for passage in read_paths(paths, report=ReadReport())]
    assert ids == ["one/README.md#0", "two/README.md#0"]
    alone = [passage.id for passage in read_paths(paths[:1], report=ReadReport())]
    assert alone == ["README.md#0"]
    with pytest.raises(InputError, match="already used"):
        list(read_paths([paths[0], paths[0]], report=ReadReport()))
