"""The file of an embedded topic: its tables, its format's version, how it is made and opened.

What is done with the records is in `service.embedded_topic`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stoker.errors import ConfigError, CorruptError
from stoker.index.generation import NewerFormat
from stoker.service.streams import LogFull, LogUnavailable, TopicSpec

FORMAT_VERSION: Final = 1
_APPLICATION_ID: Final = 0x53544B4C  # "STKL": tells our files from other SQLite files
# A record's row id is (partition << 40) | offset: one b-tree serves all partitions, and reading a
# partition is a range scan of it.
OFFSET_BITS: Final = 40
OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS spec (id INTEGER PRIMARY KEY CHECK (id = 0), json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, time_s REAL NOT NULL, key BLOB NOT NULL, value BLOB);
CREATE TABLE IF NOT EXISTS partitions (
    partition INTEGER PRIMARY KEY, first INTEGER NOT NULL, next INTEGER NOT NULL,
    bytes INTEGER NOT NULL, compacted_bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS members (
    grp TEXT NOT NULL, member TEXT NOT NULL, lease_until_s REAL NOT NULL, lease_s REAL NOT NULL,
    PRIMARY KEY (grp, member)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (
    grp TEXT NOT NULL, partition INTEGER NOT NULL, member TEXT NOT NULL,
    PRIMARY KEY (grp, partition)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commits (
    grp TEXT NOT NULL, partition INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (grp, partition)) WITHOUT ROWID;
"""


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one write: all of it is durable at the end, or none of it happened."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # COMMIT itself can fail (disk full) and leave the transaction open.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours, in one place."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_FULL"):
            raise LogFull(f"{path}: the disk is full") from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise CorruptError(f"{path}: {error}") from error
        raise LogUnavailable(f"{path}: {error}") from error
    except OSError as error:
        raise LogUnavailable(f"{path}: {error.strerror}") from error


def connect(path: Path, busy_timeout_s: float, *, make: bool = False) -> sqlite3.Connection:
    """Open a connection that syncs what it commits; ``make`` allows a new file."""
    mode = "rwc" if make else "rw"
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri,
        uri=True,
        isolation_level=None,
        timeout=busy_timeout_s,
        check_same_thread=False,
        cached_statements=64,
    )
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA journal_size_limit=67108864")
    except BaseException:
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection, path: Path, spec: TopicSpec) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if version or tables:
        check_format(connection, path)
        stored = read_spec(connection, path)
        if stored.partition_count != spec.partition_count:
            raise ConfigError(
                f"topic {spec.name} in {path} has {stored.partition_count} partitions, "
                f"{spec.partition_count} were asked for; the order of a key's events would break: "
                "set the number that is there, or use another topic"
            )
    else:
        # 8 KiB: several records of a few hundred bytes per page.
        connection.execute("PRAGMA page_size=8192")
        connection.execute("PRAGMA journal_mode=WAL")
    with transaction(connection):
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.execute(
            "INSERT OR REPLACE INTO spec VALUES (0, ?)",
            (json.dumps(spec.__dict__, sort_keys=True),),
        )
        connection.executemany(
            "INSERT OR IGNORE INTO partitions VALUES (?, 0, 0, 0, 0)",
            [(partition,) for partition in range(spec.partition_count)],
        )


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Return if the file is a topic of a version that this Stoker reads.

    Raises:
        CorruptError: it is no topic of ours.
        NewerFormat: a newer Stoker wrote it: no damage, and nothing here may rewrite it.
    """
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    if found != _APPLICATION_ID:
        raise CorruptError(
            f"{path}: offset 68: expected a Stoker event log (application id "
            f"{_APPLICATION_ID:#x}), found {found:#x}"
        )
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT_VERSION:
        raise NewerFormat(path, version, f"version {FORMAT_VERSION}")
    if version != FORMAT_VERSION:
        raise CorruptError(
            f"{path}: offset 60: expected event log version {FORMAT_VERSION}, found {version}"
        )


def read_spec(connection: sqlite3.Connection, path: Path) -> TopicSpec:
    """Return how the topic was made. Raises CorruptError where that is missing."""
    row = connection.execute("SELECT json FROM spec WHERE id = 0").fetchone()
    if row is None:
        raise CorruptError(f"{path}: the topic's description is missing")
    return TopicSpec(**json.loads(row[0]))


def make_topic(root: Path, spec: TopicSpec, busy_timeout_s: float) -> None:
    """Make or update the topic's file, and sync the folder that names it.

    Raises:
        ConfigError: the topic is there with another number of partitions.
        LogUnavailable: the folder cannot be written.
    """
    path = topic_path(root, spec.name)
    with translated(path), _folder_lock(root):
        connection = connect(path, busy_timeout_s, make=True)
        try:
            _make_tables(connection, path, spec)
        finally:
            connection.close()
        _sync_folder(root)


def topic_path(root: Path, name: str) -> Path:
    """Return where the topic's file is."""
    return root / f"{name}.sqlite"


@contextlib.contextmanager
def _folder_lock(root: Path) -> Iterator[None]:
    """Let one process at a time make files; SQLite's own locks do not cover a first open."""
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
