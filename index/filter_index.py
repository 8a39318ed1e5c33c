"""Postings of one set of rows' metadata: answers a filter as a roaring bitmap over those rows."""

from __future__ import annotations

import array
import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray
from pyroaring import BitMap

from stoker.errors import CorruptError
from stoker.index.filters import All, Any_, Between, Equal, Exists, Fields, Filter, Kind, Not

_MAGIC: Final = b"STKRFLT1"
_NUMBER_KINDS: Final = ("n", "t", "w")


class FilterIndexError(CorruptError):
    """A stored filter index is damaged; it can be rebuilt from the documents."""


def _bitmap(rows: NDArray[np.uint32]) -> BitMap:
    # An array.array is taken whole; a numpy array would be walked item by item.
    return BitMap(array.array("I", np.ascontiguousarray(rows, dtype=np.uint32).tobytes()))


@dataclasses.dataclass(frozen=True)
class _Words:
    """Rows of each different value, values in rising order: rows[starts[i]:starts[i + 1]]."""

    values: tuple[str, ...]
    starts: NDArray[np.uint32]
    rows: NDArray[np.uint32]

    def rows_of(self, value: str) -> NDArray[np.uint32]:
        low, high = 0, len(self.values)
        while low < high:
            middle = (low + high) // 2
            if self.values[middle] < value:
                low = middle + 1
            else:
                high = middle
        if low == len(self.values) or self.values[low] != value:
            return self.rows[:0]
        return self.rows[self.starts[low] : self.starts[low + 1]]


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """Rows in rising order of their value."""

    values: NDArray[np.float64]
    rows: NDArray[np.uint32]

    def rows_between(self, node: Between) -> NDArray[np.uint32]:
        start = np.searchsorted(self.values, node.low, "left" if node.low_included else "right")
        stop = np.searchsorted(self.values, node.high, "right" if node.high_included else "left")
        return self.rows[start : max(start, stop)]


class FilterIndex:
    """Postings of one set of rows; answers a filter as a bitmap over those rows.

    Columns, not one bitmap per value: a million different timestamps cost 12 bytes each, and a
    range is one slice. Immutable.
    """

    def __init__(self, count: int, columns: Mapping[tuple[str, str], _Words | _Numbers]) -> None:
        self.count = count
        self._columns = dict(columns)

    @classmethod
    def build(cls, rows: Iterable[tuple[int, Fields]], count: int) -> FilterIndex:
        """Build from rows' `flatten`ed values, in any order; rows that are not given have none.

        Args:
            rows: (row, values), each row below ``count`` and given once. Read once: may stream.
            count: Rows in all.
        """
        words: dict[tuple[str, str], tuple[dict[str, int], array.array[int], array.array[int]]] = {}
        numbers: dict[tuple[str, str], tuple[array.array[float], array.array[int]]] = {}
        for row, fields in rows:
            for key, values in fields.items():
                if key[1] in _NUMBER_KINDS:
                    held, held_rows = numbers.setdefault(key, (array.array("d"), array.array("I")))
                    held.extend(values)
                    held_rows.extend([row] * len(values))
                    continue
                codes, code_list, rows_list = words.setdefault(
                    key, ({}, array.array("I"), array.array("I"))
                )
                for value in values:
                    code_list.append(codes.setdefault(str(value), len(codes)))
                    rows_list.append(row)
        columns: dict[tuple[str, str], _Words | _Numbers] = {}
        for key, (held, held_rows) in numbers.items():
            floats = np.frombuffer(held, dtype=np.float64)
            order = np.argsort(floats, kind="stable")
            columns[key] = _Numbers(floats[order], np.frombuffer(held_rows, np.uint32)[order])
        for key, (codes, code_list, rows_list) in words.items():
            columns[key] = _words(codes, code_list, rows_list)
        return cls(count, columns)

    def select(self, node: Filter) -> BitMap:
        """Return the rows where ``node`` holds, as a new bitmap."""
        match node:
            case All(parts):
                found = [self.select(part) for part in parts]
                return BitMap.intersection(*found) if found else self._everything()
            case Any_(parts):
                return BitMap.union(*[self.select(part) for part in parts])
            case Not(part):
                return self._everything() - self.select(part)
            case Equal(field, values):
                rows = [self._rows_equal(field, kind, value) for kind, value in values]
                return _bitmap(np.concatenate(rows)) if rows else BitMap()
            case Between(field):
                ranges = [self._columns.get((field, kind)) for kind in node.kinds]
                return BitMap.union(
                    BitMap(),
                    *[_bitmap(c.rows_between(node)) for c in ranges if isinstance(c, _Numbers)],
                )
            case Exists(field):
                held = [self._columns.get((field, kind)) for kind in "binst"]
                return BitMap.union(
                    BitMap(), *[_bitmap(column.rows) for column in held if column is not None]
                )

    def _everything(self) -> BitMap:
        return BitMap(range(self.count))

    def _rows_equal(self, field: str, kind: Kind, value: Any) -> NDArray[np.uint32]:
        column = self._columns.get((field, kind))
        if isinstance(column, _Words):
            return column.rows_of(str(value))
        if isinstance(column, _Numbers):
            return column.rows_between(Between(field, kind, value, True, value, True))
        return np.empty(0, dtype=np.uint32)

    def to_bytes(self) -> bytes:
        """Return a stored form that `from_bytes` reads: header JSON, arrays, CRC-32."""
        blobs: list[bytes] = []
        table = []
        for (field, kind), column in self._columns.items():
            if isinstance(column, _Words):
                blobs += [
                    column.starts.astype("<u4").tobytes(),
                    column.rows.astype("<u4").tobytes(),
                ]
                table.append([field, kind, column.values, int(column.rows.size)])
            else:
                blobs += [
                    column.values.astype("<f8").tobytes(),
                    column.rows.astype("<u4").tobytes(),
                ]
                table.append([field, kind, None, int(column.rows.size)])
        header = orjson.dumps({"count": self.count, "columns": table})
        body = b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *blobs])
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, data: bytes, place: str) -> FilterIndex:
        """Read `to_bytes` output, trusting nothing in it.

        Raises:
            FilterIndexError: names ``place`` and what was expected.
        """
        if len(data) < 20 or data[:8] != _MAGIC:
            raise FilterIndexError(f"{place}: at byte 0: expected a filter index of version 1")
        if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise FilterIndexError(f"{place}: at byte {len(data) - 4}: the checksum differs")
        try:
            return cls._decode(data)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise FilterIndexError(f"{place}: malformed: {error}") from error

    @classmethod
    def _decode(cls, data: bytes) -> FilterIndex:
        header_end = 16 + int.from_bytes(data[8:16], "little")
        header = orjson.loads(data[16:header_end])
        count = int(header["count"])
        at = header_end

        def take(dtype: str, length: int) -> NDArray[Any]:
            nonlocal at
            end = at + length * np.dtype(dtype).itemsize
            if length < 0 or end > len(data) - 4:
                raise ValueError(f"expected {length} values at byte {at}, found the end")
            taken = np.frombuffer(data, dtype=dtype, count=length, offset=at)
            at = end
            return taken

        columns: dict[tuple[str, str], _Words | _Numbers] = {}
        for field, kind, values, length in header["columns"]:
            if (values is None) != (kind in _NUMBER_KINDS):
                raise ValueError(f"column {field!r}: kind {kind!r} has values of another")
            if values is None:
                numbers = take("<f8", length)
                column: _Words | _Numbers = _Numbers(numbers, take("<u4", length))
                fine = bool((numbers[1:] >= numbers[:-1]).all())
            else:
                if not all(isinstance(value, str) for value in values):
                    raise ValueError(f"column {field!r}: a value is not text")
                starts = take("<u4", len(values) + 1)
                column = _Words(tuple(values), starts, take("<u4", length))
                fine = bool((starts[1:] >= starts[:-1]).all()) and int(starts[-1]) == length
                fine = fine and all(a < b for a, b in itertools.pairwise(values))
            if not fine or (column.rows.size and int(column.rows.max()) >= count):
                raise ValueError(f"column {field!r} is out of order or names rows past {count}")
            columns[(str(field), str(kind))] = column
        if at != len(data) - 4:
            raise ValueError(f"expected the end at byte {at}, found {len(data) - 4 - at} more")
        return cls(count, columns)


def _words(
    codes: dict[str, int], code_list: array.array[int], rows_list: array.array[int]
) -> _Words:
    values = sorted(codes)
    rank = np.empty(len(values), dtype=np.int64)
    rank[[codes[value] for value in values]] = np.arange(len(values))
    ranked = rank[np.frombuffer(code_list, dtype=np.uint32)]
    order = np.argsort(ranked, kind="stable")
    starts = np.zeros(len(values) + 1, dtype=np.uint32)
    np.cumsum(np.bincount(ranked, minlength=len(values)), out=starts[1:])
    return _Words(tuple(values), starts, np.frombuffer(rows_list, dtype=np.uint32)[order])
