"""Reads what users have (folders, text, JSONL, Parquet, `.npy`) as passages, in a fixed order.

Each file is taken by its ending. What is inside a folder and cannot be taken is skipped, counted
and said; what is named on the command line and cannot be taken is an error. Rows are strict: a bad
row stops the reading with file and line, unless the caller asks to skip bad rows.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.errors import InputError, UnavailableError
from stoker.service.chunking import chunk_sections
from stoker.service.passages import Passage, ReadReport, text_digest
from stoker.service.readers_rows import (
    RowLimits,
    checked_id,
    read_jsonl,
    read_npy,
    read_parquet,
)
from stoker.service.readers_text import TEXT_ENDINGS, read_sections

_FOLDERS_SKIPPED = frozenset({"__pycache__", "node_modules"})
_JSONL_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_PARQUET_ENDINGS = (".parquet", ".pq")


@dataclasses.dataclass(frozen=True)
class ReadLimits:
    """Bounds of one reading.

    Attributes:
        words: Target length of a passage cut from a text file.
        file_bytes_max: Larger text files are not read (rows and vectors are streamed instead).
        files_max: A folder with more files than this is an error, not a week of work.
        rows: Bounds for JSONL, Parquet and `.npy`.
        bad_rows_skipped: Count bad rows and go on, where the default is to stop at the first.
    """

    words: int = 150
    file_bytes_max: int = 32 << 20
    files_max: int = 1_000_000
    rows: RowLimits = dataclasses.field(default_factory=RowLimits)
    bad_rows_skipped: bool = False


def read_paths(
    paths: Sequence[Path], *, report: ReadReport, limits: ReadLimits | None = None
) -> Iterator[Passage]:
    """Yield every passage of ``paths``, folders walked in name order.

    Checks across files: ids are unique, all vectors have one dimension, and either every passage
    has a vector or none has.

    Args:
        report: Counts and skipped things; filled while passages are drawn.

    Raises:
        InputError: a path does not exist or has an unknown ending, a row is malformed, an id
            comes twice, vectors differ in dimension or are missing for some; the message names
            file and line.
        UnavailableError: a format's library is not installed, or a file cannot be opened.
    """
    bounds = limits or ReadLimits()
    gate = _Gate(report, bounds)
    names = _names(paths)
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        if stat.S_ISDIR(mode):
            for file, name in _walk(path, report, bounds):
                yield from gate.admit(_read_found(file, name, report, bounds))
        elif stat.S_ISREG(mode):
            report.file_count += 1
            yield from gate.admit(_read_file(path, names[path], report, bounds))
        else:
            raise InputError(f"{path} is neither a file nor a folder")
    gate.finish()


def _read_found(path: Path, name: str, report: ReadReport, bounds: ReadLimits) -> Iterator[Passage]:
    """Read a file met in a folder: text that cannot be decoded is skipped with its reason."""
    lowered = path.name.lower()
    if not lowered.endswith((*TEXT_ENDINGS, *_JSONL_ENDINGS, *_PARQUET_ENDINGS, ".npy")):
        report.skip(str(path), "unknown ending")
        return
    report.file_count += 1
    if lowered.endswith(TEXT_ENDINGS):
        try:
            yield from _read_file(path, name, report, bounds)
        except InputError as error:
            report.skip(str(path), str(error).removeprefix(f"{path}: "))
    else:
        yield from _read_file(path, name, report, bounds)


def _read_file(path: Path, name: str, report: ReadReport, bounds: ReadLimits) -> Iterator[Passage]:
    lowered = path.name.lower()
    skipped = report if bounds.bad_rows_skipped else None
    try:
        if lowered.endswith(_JSONL_ENDINGS):
            yield from read_jsonl(path, limits=bounds.rows, skipped=skipped)
        elif lowered.endswith(_PARQUET_ENDINGS):
            yield from read_parquet(path, limits=bounds.rows, skipped=skipped)
        elif lowered.endswith(".npy"):
            yield from read_npy(path, limits=bounds.rows, skipped=skipped)
        elif lowered.endswith(TEXT_ENDINGS):
            yield from _read_text(path, name, bounds)
        else:
            known = ", ".join((*TEXT_ENDINGS, *_JSONL_ENDINGS, *_PARQUET_ENDINGS, ".npy"))
            raise InputError(f"{path}: unknown ending; known are {known}")
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror or error}") from error


def _read_text(path: Path, name: str, bounds: ReadLimits) -> Iterator[Passage]:
    sections = read_sections(path, bytes_max=bounds.file_bytes_max)
    for place, chunk in enumerate(chunk_sections(sections, words=bounds.words)):
        try:
            chunk_id = checked_id(f"{name}#{place}", bounds.rows)
        except InputError as error:  # a path may be longer than an id, and hold a line's end
            raise InputError(f"{path}: its name cannot begin ids: {error}") from error
        yield Passage(
            id=chunk_id,
            text=chunk.text,
            metadata={
                "source": name,
                "headings": list(chunk.headings),
                "content_hash": text_digest(chunk.text),
            },
            origin=str(path),
        )


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """What ids call each path: its name or, where several share it, as much as tells them apart.

    A path that is given twice keeps one name: its ids come twice, which is refused.
    """
    resolved = {path: path.resolve() for path in paths}
    found = {}
    for path in paths:
        alike = {resolved[other] for other in paths if other.name == path.name}
        if len(alike) == 1:
            found[path] = path.name
            continue
        common = Path(os.path.commonpath([place.parent for place in alike]))
        found[path] = resolved[path].relative_to(common).as_posix()
    return found


def _walk(root: Path, report: ReadReport, bounds: ReadLimits) -> Iterator[tuple[Path, str]]:
    """Yield (file, name below the folder's own name) in name order.

    Links to folders are not followed, so no loop is possible; a file that is reached twice through
    links is read once. Pipes, sockets and devices are never opened.
    """
    seen: set[tuple[int, int]] = set()
    count = 0
    label = root.resolve().name or "root"

    def refused(error: OSError) -> None:
        report.skip(str(error.filename), error.strerror or str(error))

    for folder, folders, files in os.walk(root, followlinks=False, onerror=refused):
        for name in list(folders):
            if name.startswith(".") or name in _FOLDERS_SKIPPED:
                folders.remove(name)
            elif Path(folder, name).is_symlink():
                folders.remove(name)
                report.skip(str(Path(folder, name)), "a link to a folder is not followed")
        folders.sort()
        for name in sorted(files):
            if name.startswith("."):
                continue
            path = Path(folder, name)
            reason = _refusal(path, seen)
            if reason is not None:
                report.skip(str(path), reason)
                continue
            count += 1
            if count > bounds.files_max:
                raise InputError(f"{root} has more than files_max = {bounds.files_max} files")
            yield path, f"{label}/{path.relative_to(root).as_posix()}"


def _refusal(path: Path, seen: set[tuple[int, int]]) -> str | None:
    try:
        status = path.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    try:
        path.name.encode("utf-8")
    except UnicodeEncodeError:
        return "the file's name is not UTF-8"
    key = (status.st_dev, status.st_ino)
    if key in seen:
        return "the same file was already read under another name"
    seen.add(key)
    return None


class _Gate:
    """Holds what must be true across files: unique ids, one dimension, all vectors or none."""

    def __init__(self, report: ReadReport, bounds: ReadLimits) -> None:
        self._report = report
        self._skips = bounds.bad_rows_skipped
        self._origins: dict[str, str] = {}
        self._vector_first: Passage | None = None
        self._text_first: Passage | None = None

    def admit(self, passages: Iterator[Passage]) -> Iterator[Passage]:
        for passage in passages:
            problem = self._problem(passage)
            if problem is None:
                self._origins[passage.id] = passage.origin
                self._report.passage_count += 1
                yield passage
            elif self._skips:
                self._report.skip(passage.origin, problem)
            else:
                raise InputError(f"{passage.origin}: {problem}")

    def _problem(self, passage: Passage) -> str | None:
        earlier = self._origins.get(passage.id)
        if earlier is not None:
            return f"id {passage.id!r} is already used at {earlier}; ids must be unique"
        if passage.vector is None:
            self._text_first = self._text_first or passage
        elif self._vector_first is None:
            self._vector_first = passage
        else:
            first = self._vector_first
            assert first.vector is not None
            if passage.vector.shape != first.vector.shape:
                return (
                    f"vector has {passage.vector.shape[0]} numbers, expected"
                    f" {first.vector.shape[0]} as at {first.origin}"
                )
        if self._text_first is not None and self._vector_first is not None:
            return (
                f"{self._vector_first.origin} has a vector and {self._text_first.origin} has none;"
                " vectors of two models must not share an index: give a vector for all or for none"
            )
        return None

    def finish(self) -> None:
        if not self._origins:
            raise InputError(
                "nothing to index: no passage found"
                + (f"; {self._report.skipped_count} skipped" if self._report.skipped_count else "")
            )
