"""The document store: what is acknowledged, what is refused, what damage says."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import CapacityError, CorruptError, InputError, UnavailableError
from stoker.index import documents as documents_module
from stoker.index.collection_build import build_collection
from stoker.index.document_values import Change, check_id, check_tenant, encode_metadata
from stoker.index.documents import DocumentStore
from stoker.index.foreign import ForeignIndex, import_foreign

DIM = 4


def upsert(document_id: int | str, value: float = 0.0, **more: Any) -> Change:
    vector = np.full(DIM, value, dtype=np.float32)
    return Change(
        0, more.pop("tenant", "default"), document_id, False, more.pop("text", None), more, vector
    )


def delete(document_id: int | str) -> Change:
    return Change(0, "default", document_id, True, None, {}, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "documents.db"
    DocumentStore.create(path, dim=DIM)
    return path


def test_changes_come_back_in_order_with_only_the_newest_of_each(path: Path) -> None:
    store = DocumentStore.open(path, dim=DIM, writable=True)
    assert store.write([upsert("a", 1, lang="en"), upsert("b", 2)]) == 2
    assert store.write([upsert("a", 3, text="hello")]) == 3
    assert store.write([delete("b")]) == 4
    assert [(c.change_offset, c.id, c.deleted) for c in store.changes(0)] == [
        (3, "a", False),
        (4, "b", True),
    ]
    assert [c.change_offset for c in store.changes(3)] == [4]
    (found, missing) = store.documents("default", ["a", "b"])
    assert found is not None
    assert (found.text, found.metadata, found.change_offset) == ("hello", {}, 3)
    assert missing is None
    store.close()
    again = DocumentStore.open(path, dim=DIM, writable=False)
    vector = next(again.changes(0)).vector
    assert vector is not None
    np.testing.assert_array_equal(vector, np.full(DIM, 3, dtype=np.float32))
    assert again.change_offset == 4
    assert again.damage() == []
    again.close()


def test_a_document_twice_in_one_write_counts_once(path: Path) -> None:
    seen: list[Change] = []
    store = DocumentStore.open(path, dim=DIM, writable=True, on_commit=seen.extend)
    assert store.write([upsert(1, 1), upsert(2, 2), upsert(1, 3)]) == 2
    assert [(c.id, float(c.vector[0])) for c in seen if c.vector is not None] == [(1, 3), (2, 2)]
    store.close()


def test_the_same_id_of_two_tenants_is_two_documents(path: Path) -> None:
    store = DocumentStore.open(path, dim=DIM, writable=True)
    store.write([upsert(1, text="a", tenant="a"), upsert(1, text="b", tenant="b")])
    texts = [store.documents(tenant, [1])[0] for tenant in ("a", "b")]
    assert [document and document.text for document in texts] == ["a", "b"]
    store.close()


def test_offsets_are_never_used_again(path: Path) -> None:
    store = DocumentStore.open(path, dim=DIM, writable=True)
    store.write([upsert(1)])
    store.write([delete(1)])
    assert store.purge_deleted(2) == 1
    store.close()
    store = DocumentStore.open(path, dim=DIM, writable=True)
    assert store.write([upsert(1)]) == 3
    store.close()


def test_concurrent_writers_share_commits_and_lose_nothing(path: Path) -> None:
    groups: list[int] = []
    seen: list[int] = []

    def committed(changes: Sequence[Change]) -> None:
        groups.append(len(changes))
        seen.extend(change.change_offset for change in changes)

    store = DocumentStore.open(path, dim=DIM, writable=True, on_commit=committed)
    threads, each = 16, 12
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        start.wait()
        for step in range(each):
            store.write([upsert(number * each + step)])

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == list(range(1, threads * each + 1))
    assert sum(groups) == threads * each
    assert max(groups) > 1  # 16 writers that start together cannot all have committed alone.
    assert len({c.id for c in store.changes(0)}) == threads * each
    store.close()


def test_a_full_disk_keeps_nothing_of_the_call_and_the_store_goes_on(path: Path) -> None:
    store = DocumentStore.open(path, dim=DIM, writable=True)
    store.write([upsert(1, text="kept")])
    assert store._writer is not None
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(CapacityError, match="full"):
        store.write([upsert(n, text="x" * 4000) for n in range(2, 20)])
    assert [c.id for c in store.changes(0)] == [1]
    store._writer.execute("PRAGMA max_page_count=100000")
    assert store.write([upsert(2)]) == 2
    store.close()


def test_changes_that_memory_could_not_take_stop_the_store(path: Path) -> None:
    def refuse(changes: Sequence[Change]) -> None:
        raise MemoryError("no room")

    store = DocumentStore.open(path, dim=DIM, writable=True, on_commit=refuse)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="open the collection again"):
            store.write([upsert(1)])
    store.close()
    with pytest.raises(UnavailableError, match="closed"):
        store.stored_offset()


def test_a_reader_cannot_write(path: Path) -> None:
    store = DocumentStore.open(path, dim=DIM, writable=False)
    with pytest.raises(UnavailableError, match="opened for reading"):
        store.write([upsert(1)])
    store.close()


def fill(path: Path, count: int = 60) -> None:
    store = DocumentStore.open(path, dim=DIM, writable=True)
    store.write([upsert(n, n, text=f"text {n}" * 20, n=n) for n in range(count)])
    store.close()


def test_a_reader_connects_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    connect = documents_module._connect

    def counted(at: Path, *, writable: bool) -> sqlite3.Connection:
        made.append(at)
        return connect(at, writable=writable)

    monkeypatch.setattr(documents_module, "_connect", counted)
    reader = DocumentStore.open(path, dim=DIM, writable=False)
    assert reader.stored_offset() == 0
    assert made == [path]
    reader.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("filled") / "documents.db"
    DocumentStore.create(path, dim=DIM)
    fill(path)
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_file_is_an_error_never_a_wrong_row(
    tmp_path: Path, filled: bytes, seed: int
) -> None:
    path = tmp_path / "documents.db"
    rng = np.random.default_rng(seed)
    data = bytearray(filled)
    if seed % 3 == 0:
        del data[int(rng.integers(0, len(data))) :]
    else:
        for _ in range(4):
            data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
    path.write_bytes(bytes(data))
    try:
        store = DocumentStore.open(path, dim=DIM, writable=False)
    except (CorruptError, UnavailableError):
        return
    try:
        found = list(store.changes(0))
    except (CorruptError, UnavailableError):
        assert store.damage()
    else:
        for change in found:
            n = change.id
            assert change.metadata == {"n": n}
            assert change.text == f"text {n}" * 20
            assert change.vector is not None
            assert float(change.vector[0]) == n
    finally:
        store.close()


def test_a_store_on_a_read_only_volume_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, 3)
    connected = documents_module._connected
    tried: list[str] = []

    def read_only(place: Path, how: str) -> sqlite3.Connection:
        tried.append(how)
        if how == "mode=ro":
            error = sqlite3.OperationalError("attempt to write a readonly database")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY
            raise error
        return connected(place, how)

    monkeypatch.setattr(documents_module, "_connected", read_only)
    store = DocumentStore.open(path, dim=DIM, writable=False)
    assert len(list(store.changes(0))) == 3
    assert tried[:2] == ["mode=ro", "mode=ro&immutable=1"]
    store.close()
    # With a log beside it the one file is not all there is: that is no store to guess about.
    path.with_name("documents.db-wal").write_bytes(b"x")
    with pytest.raises(UnavailableError, match="readonly"):
        DocumentStore.open(path, dim=DIM, writable=False)


def test_damage_names_the_row_and_goes_on(path: Path) -> None:
    fill(path, 5)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE documents SET text = 'other' WHERE id = 1")
        connection.execute("UPDATE vectors SET vector = x'00' WHERE change_offset = 4")
    connection.close()
    store = DocumentStore.open(path, dim=DIM, writable=False)
    lines = store.damage()
    assert len(lines) == 2
    assert "change 2" in lines[0]
    assert "change 4" in lines[1]
    store.close()


@pytest.mark.parametrize("content", [b"", b"hello" * 1000, b"SQLite format 3\x00" + bytes(4080)])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "documents.db"
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"documents\.db"):
        DocumentStore.open(path, dim=DIM, writable=False)


def test_another_schema_or_dimension_is_refused(path: Path) -> None:
    with pytest.raises(CorruptError, match="expected vectors of 5 dimensions, found 4"):
        DocumentStore.open(path, dim=5, writable=False)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE VIEW v AS SELECT 1")
    connection.close()
    with pytest.raises(CorruptError, match="expected the tables of version 1"):
        DocumentStore.open(path, dim=DIM, writable=False)


@pytest.mark.parametrize(
    "value", [None, 1.5, True, "", "a\x1fb", "a\x00", "x" * 513, 2**63, "\ud800", b"a"]
)
def test_what_cannot_name_a_document_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="row 3"):
        check_id(value, "row 3")


@pytest.mark.parametrize("name", ["a" * 384, "t\x1fa", "a\0", ""])
def test_a_build_takes_no_id_that_no_document_could_have(tmp_path: Path, name: str) -> None:
    vectors = np.ones((3, 4), np.float32)
    with pytest.raises(InputError, match="ids: entry 1: expected 1 to 383 bytes"):
        build_collection(tmp_path / "index", vectors, ["x", name, "y"])
    foreign = ForeignIndex("npy", vectors, np.array(["x", name, "y"], object), "l2")
    with pytest.raises(InputError, match="ids: entry 1: expected 1 to 383 bytes"):
        import_foreign(tmp_path / "index", foreign)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("value", [None, 1, "", "a\x1fb"])
def test_what_cannot_name_a_tenant_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="tenant"):
        check_tenant(value)


@pytest.mark.parametrize(
    "metadata", [[1], {"tenant": "x"}, {"a": object()}, {"a": float("nan")}, {"a": "x" * 70_000}]
)
def test_metadata_that_filters_cannot_hold_is_refused(metadata: Any) -> None:
    with pytest.raises(InputError):
        encode_metadata(metadata, "default", "row 0")


@pytest.mark.parametrize("place", ["documents.before_commit", "documents.after_commit", "shown"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_commit_is_never_acknowledged(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    interruption: type[BaseException],
) -> None:
    """One caller's Ctrl-C, or want of memory, in the commit that it makes for all who wait."""
    seen: list[Change] = []
    armed = True

    def pass_by(name: str) -> None:
        nonlocal armed
        if armed and name == place:
            armed = False
            raise interruption

    def show(changes: Sequence[Change]) -> None:
        pass_by("shown")
        seen.extend(changes)

    store = DocumentStore.open(path, dim=DIM, writable=True, on_commit=show)
    monkeypatch.setattr(documents_module, "failpoint", pass_by)
    outcomes: dict[int, BaseException | int] = {}

    def write(number: int) -> None:
        try:
            outcomes[number] = store.write([upsert(number)])
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    with store.writes_paused():
        for thread in threads:
            thread.start()
        while len(store._queue) < len(threads):
            pass
    for thread in threads:
        thread.join()
    # All four shared the commit, and nobody was told yes.
    assert sum(isinstance(found, UnavailableError) for found in outcomes.values()) >= 3
    assert not [found for found in outcomes.values() if isinstance(found, int)]
    if place == "documents.before_commit":  # Nothing was written: the store goes on.
        assert store.write([upsert(9)]) == 1
        assert [change.id for change in seen] == [9]
    else:  # What memory shows and what the file holds may differ.
        with pytest.raises(UnavailableError, match="open the collection again"):
            store.write([upsert(9)])
    store.close()
    again = DocumentStore.open(path, dim=DIM, writable=True)
    offset = again.change_offset
    assert again.write([upsert(1000)]) == offset + 1
    again.close()


def test_who_gives_up_waiting_writes_nothing_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DocumentStore.open(path, dim=DIM, writable=True)

    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *exc: object) -> None: ...

    with monkeypatch.context() as patched:
        patched.setattr(store, "_commit_lock", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            store.write([upsert("given up")])
    assert store.write([upsert("kept")]) == 1
    assert store.documents("default", ["given up"]) == [None]
    store.close()


def test_who_only_reads_leaves_no_file_behind(path: Path) -> None:
    fill(path)
    names = {path.name}
    assert {one.name for one in path.parent.iterdir()} == names
    reader = DocumentStore.open(path, dim=DIM, writable=False)
    with closing(reader):
        seen = reader.stored_offset()
        # A writer that comes and goes beside it is followed, and its log stays while it is read.
        with closing(DocumentStore.open(path, dim=DIM, writable=True)) as writer:
            writer.write([upsert(1000)])
            assert reader.stored_offset() == seen + 1
        assert reader.stored_offset() == seen + 1
    with closing(DocumentStore.open(path, dim=DIM, writable=True)) as writer:
        assert writer.stored_offset() == seen + 1
    with closing(DocumentStore.open(path, dim=DIM, writable=False)) as reader:
        assert reader.stored_offset() == seen + 1
    assert {one.name for one in path.parent.iterdir()} == names
