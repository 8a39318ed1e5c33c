"""The heat in parts by content key, small enough for records of a log, and whole again.

A part holds the keys whose hash falls to it, with their numbers, counts and edges, the sessions of
the same hash, and a run of the event ids seen; a head holds what is not any key's, and each part's
checksum. Parts and head carry the offsets that they stand for, so that whoever joins them goes on
reading the events from there and ends with the same bytes as one that read everything. PageRank is
derived, and left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch import heat_state
from stoker.prefetch.snapshot import DIGEST_BYTES, SnapshotCorrupt, kind_of, pack, unpack

# A million keys of 230 bytes make parts of 0.9 MB.
PARTS: Final = 256

_HEAD: Final = "heat head 2"
_HEAD_NAMES: Final = "heat head 1"  # its parts hold ids by name
_PART: Final = "heat part 1"
_PER_KEY: Final = ("last", "deleted", "edge_targets", "edge_weights")
# Of no key, but too large for the head: an equal run of each goes into every part.
_SPREAD: Final = ("tail", "topics", "seen")
_SEEN_RUN_BYTES: Final = 1 << 14  # fewer of ids are not cut any smaller
_DERIVED: Final = ("rank", "tracker_x", "tracker_residual")

Arrays = dict[str, NDArray[Any]]
Name = tuple[str, str]


def split_heat(
    snapshot: bytes, seen: bytes, about: Mapping[str, Any]
) -> tuple[bytes, dict[int, bytes]]:
    """Cut a heat graph's snapshot into a head and its parts.

    Args:
        snapshot: What `HeatGraph.to_snapshot` gave.
        seen: The ids of the events seen lately, in a form of the caller's own.
        about: Plain values that go with it, such as the offsets; `join_heat` gives them back.

    Returns:
        The head, and the parts that hold anything by their number.
    """
    kind, values, arrays = heat_state.read_snapshot(snapshot)
    keys = values.pop("keys")
    sessions = values.pop("sessions")
    spread = {name: arrays.pop(name) for name in _SPREAD if name in arrays}
    homes = np.array([_part_of(tenant, chunk_id) for tenant, chunk_id in keys], dtype=np.int64)
    order = np.argsort(homes, kind="stable")
    edges = np.searchsorted(homes[order], np.arange(PARTS + 1))
    of_sessions = _dealt([(row[0], row[1]) for row in sessions])
    runs: dict[str, tuple[NDArray[Any], int]] = {
        name: (array, PARTS) for name, array in spread.items()
    }
    runs["seen"] = np.frombuffer(seen, np.uint8), min(PARTS, 1 + len(seen) // _SEEN_RUN_BYTES)
    parts: dict[int, bytes] = {}
    for part in range(PARTS):
        numbers = order[edges[part] : edges[part + 1]]
        held: Arrays = {name: arrays[name][numbers] for name in _PER_KEY}
        held["numbers"] = numbers
        held["count_parts"] = arrays["count_parts"][:, numbers]
        for run, (array, cuts) in runs.items():
            if part < cuts and len(array):
                held[run] = array[len(array) * part // cuts : len(array) * (part + 1) // cuts]
        plain = {
            "keys": [keys[number] for number in numbers.tolist()],
            "sessions": [[at, *sessions[at]] for at in of_sessions[part]],
        }
        if any(plain.values()) or not held.keys().isdisjoint(_SPREAD):
            parts[part] = pack(_PART, plain, held)
    whole = {"kind": kind, "values": {**values, "tracked": False}, "key_count": len(keys)}
    digests = {str(part): digest_of(data) for part, data in parts.items()}
    head: Arrays = {name: array for name, array in arrays.items() if name not in _DERIVED}
    for name in _PER_KEY:  # their shapes only, for a heat without keys
        head[name] = head[name][:0]
    head["count_parts"] = head["count_parts"][:, :0]
    return pack(_HEAD, {"about": dict(about), "digests": digests, "heat": whole}, head), parts


def read_head(head: bytes) -> tuple[dict[str, Any], dict[int, str]]:
    """Return what was given as `about`, and each part's checksum by its number.

    Raises:
        SnapshotCorrupt: it is damaged, or of another version.
    """
    values, _ = _unpack_head(head)
    try:
        digests = {int(part): str(digest) for part, digest in values["digests"].items()}
        about = dict(values["about"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SnapshotCorrupt(f"heat head does not fit together: {error!r}") from error
    return about, digests


def _unpack_head(head: bytes) -> tuple[dict[str, Any], Arrays]:
    return unpack(_HEAD_NAMES if kind_of(head) == _HEAD_NAMES else _HEAD, head)


def join_heat(head: bytes, parts: Mapping[int, bytes]) -> tuple[bytes, bytes | list[Name]]:
    """Return the snapshot and the event ids that `split_heat` was given, PageRank left out.

    Publications of before have the ids by name: (tenant, id), the oldest first.

    Raises:
        SnapshotCorrupt: head or part is damaged, missing, of another version, or not of one
            publication. What is in the snapshot, `heat_state.restore` looks at.
    """
    try:
        return _join(head, parts)
    except SnapshotCorrupt:
        raise
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise SnapshotCorrupt(f"heat parts do not fit together: {error!r}") from error


def _join(head: bytes, parts: Mapping[int, bytes]) -> tuple[bytes, bytes | list[Name]]:
    values, arrays = _unpack_head(head)
    heat = values["heat"]
    count = int(heat["key_count"])
    if not 0 <= count <= sum(map(len, parts.values())):  # each key takes more than a byte
        raise SnapshotCorrupt(f"heat head names {count} keys, more than its parts hold")
    keys: list[Any] = [None] * count
    sessions: dict[int, Any] = {}
    seen: dict[int, Name] = {}
    spread: dict[str, list[NDArray[Any]]] = {}
    for name in _PER_KEY:
        arrays[name] = np.zeros((count, *arrays[name].shape[1:]), dtype=arrays[name].dtype)
    arrays["count_parts"] = np.zeros((len(arrays["count_parts"]), count))
    for name, digest in sorted(values["digests"].items(), key=lambda item: int(item[0])):
        data = parts.get(int(name))
        if data is None or digest_of(data) != digest:
            state = "missing" if data is None else "of another publication"
            raise SnapshotCorrupt(f"heat part {name} is {state}")
        plain, held = unpack(_PART, data)
        numbers = held.pop("numbers")
        for run in _SPREAD:
            if run in held:
                spread.setdefault(run, []).append(held.pop(run))
        for field in _PER_KEY:
            arrays[field][numbers] = held[field]
        arrays["count_parts"][:, numbers] = held["count_parts"]
        for number, key in zip(numbers.tolist(), plain["keys"], strict=True):
            keys[number] = key
        sessions.update((at, row) for at, *row in plain["sessions"])
        named = plain.get("seen", [])
        seen.update((at, (str(tenant), str(name))) for at, tenant, name in named)
    if None in keys:
        raise SnapshotCorrupt(f"heat key {keys.index(None)} of {count} is in no part")
    plain = {
        **heat["values"],
        "keys": keys,
        "sessions": [sessions[at] for at in sorted(sessions)],
    }
    for name in _DERIVED:
        arrays[name] = np.empty(0)
    arrays |= {field: np.concatenate(runs) for field, runs in spread.items()}
    ids = arrays.pop("seen", np.empty(0, np.uint8)).tobytes()
    snapshot = heat_state.write_snapshot(heat["kind"], plain, arrays)
    return snapshot, [seen[at] for at in sorted(seen)] if seen else ids


def digest_of(packed: bytes) -> str:
    """Return the checksum that ends a packed snapshot, as hexadecimal digits."""
    return packed[-DIGEST_BYTES:].hex()


def _part_of(tenant: str, name: str) -> int:
    return zlib.crc32(f"{tenant}\0{name}".encode()) % PARTS


def _dealt(names: Sequence[Name]) -> list[list[int]]:
    """Return, per part, the places of its names."""
    dealt: list[list[int]] = [[] for _ in range(PARTS)]
    for at, (tenant, name) in enumerate(names):
        dealt[_part_of(tenant, name)].append(at)
    return dealt
