"""The manifest of a sealed segment: one JSON file that says what the other files hold.

It is written last, so a folder without a valid manifest is not a segment.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

import stoker.kernels._core as _core
from stoker.index.calibrated import Calibration, calibration_from_json, wrong_with
from stoker.index.coarse_basis import BasisLayout
from stoker.index.generation import NewerFormat
from stoker.index.json_values import is_count, is_int
from stoker.index.paged_file import PAGE_BYTES_MAX, SegmentFileCorrupt, SegmentVersionUnknown
from stoker.index.row_length import LENGTH2_MAX

FORMAT: Final = "stoker-segment"
VERSION: Final = 5
_VERSIONS_READ: Final = (1, 2, 3, 4, 5)
NAME: Final = "manifest.json"
# Zero bytes behind a page's last links record, so that an id is one unaligned 8-byte read.
LINK_PADDING: Final = 8
_BYTES_MAX: Final = 16 << 20
FILES: Final = {
    "links": "links.stk",
    "codes": "codes.stk",
    "refine": "refine.stk",
    "vectors": "vectors.stk",
    "ids": "ids.stk",
    "transform": "transform.stk",
    "coarse": "coarse.stk",
    "ranges": "ranges.stk",
}
# Files that a segment may do without: older versions did, and so do vectors too short for the first
# and segments too small for the second.
OPTIONAL: Final = ("coarse", "ranges")
# Of ranges.stk: what a group's record has behind its code.
GROUP_TAIL_BYTES: Final = 8
# Raises with what is wrong, where it is: (holds, what).
_Need = Callable[[bool, str], None]


@dataclasses.dataclass(frozen=True)
class LevelLayout:
    """One level's links in links.stk; see FORMAT.md."""

    count: int
    m: int
    id_bits: int
    record_bytes: int
    per_page: int
    first_page: int
    page_count: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything that opening a segment needs to know; field by field in FORMAT.md."""

    metric: str
    dim: int
    count: int
    m: int
    ef_construction: int
    vector_dtype: str
    page_bytes: int
    seed: int
    entry_row: int
    levels: tuple[LevelLayout, ...]
    code_record_bytes: int
    code_per_page: int
    refine_record_bytes: int
    refine_per_page: int
    vector_record_bytes: int
    id_kind: str
    id_by_row_dtype: str
    id_text_bytes: int
    file_crcs: dict[str, int]
    total_bytes: int
    builder: str
    hot_rows: int
    calibration: Calibration | None
    coarse_record_bytes: int = 0
    coarse_per_page: int = 0
    coarse_wide_blocks: int = 0
    coarse_directions: int = 0
    coarse_fine: int = 0
    coarse_blocks: int = 0
    row_length2: float = 0.0
    range_groups: int = 0
    range_pieces: int = 0

    @property
    def basis(self) -> BasisLayout:
        """How transform.stk and coarse codes hold a basis."""
        return BasisLayout(
            self.coarse_directions, self.coarse_wide_blocks, self.coarse_fine, self.coarse_blocks
        )

    @property
    def walks_vectors(self) -> bool:
        """Whether a vector is no longer than its second code: walks then compare vectors."""
        return self.vector_record_bytes <= self.refine_record_bytes

    @property
    def has_coarse(self) -> bool:
        """Whether there are 2-bit codes, to navigate under a small budget."""
        return self.coarse_record_bytes > 0

    @property
    def has_ranges(self) -> bool:
        """Whether there is a table of groups of near rows, for searches that cannot walk yet."""
        return self.range_groups > 0

    @property
    def group_record_bytes(self) -> int:
        """Bytes of a group's record in that table."""
        return self.code_record_bytes + GROUP_TAIL_BYTES

    @property
    def files(self) -> dict[str, str]:
        """Name of each file that this segment has, by part."""
        absent = {"coarse": not self.has_coarse, "ranges": not self.has_ranges}
        return {part: name for part, name in FILES.items() if not absent.get(part)}

    def write(self, folder: Path) -> None:
        """Write the manifest and fsync it. The caller publishes the folder."""
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        body["crc32c"] = _crc_of(body)
        path = folder / NAME
        with open(path, "xb") as file:
            file.write(json.dumps(body, indent=1, sort_keys=True).encode())
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check a segment's manifest.

        Raises:
            SegmentFileCorrupt: missing, not JSON, a field missing or out of range, or damaged.
            SegmentVersionUnknown: of a version that is not known, and damaged.
            NewerFormat: whole, and written by a newer Stoker.
        """
        path = folder / NAME
        try:
            if path.stat().st_size > _BYTES_MAX:
                raise SegmentFileCorrupt(f"{path}: larger than {_BYTES_MAX} bytes", path=path)
            body = orjson.loads(path.read_bytes())
        except OSError as error:
            raise SegmentFileCorrupt(
                f"{folder}: not a segment: {NAME} cannot be read ({error.strerror})", path=path
            ) from error
        except ValueError as error:
            raise SegmentFileCorrupt(f"{path}: not JSON: {error}", path=path) from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise SegmentFileCorrupt(f"{path}: expected format {FORMAT!r}", path=path)
        stated, version = body.pop("crc32c", None), body.get("version")
        whole = _is_whole(body, stated)
        if version not in _VERSIONS_READ:
            known = f"{_VERSIONS_READ[0]} to {VERSION}"
            if whole and isinstance(version, int) and version > VERSION:
                raise NewerFormat(path, version, known)
            raise SegmentVersionUnknown(
                f"{path}: format version {version!r}, this Stoker reads {known}, and "
                f"{'older ones never were' if whole else 'it fails its checksum'}"
            )
        if not whole:
            raise SegmentFileCorrupt(f"{path}: fails its checksum", path=path)
        try:
            manifest = _from_json(body)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SegmentFileCorrupt(f"{path}: unusable field: {error}", path=path) from error
        _check(manifest, path)
        return manifest


def _crc_of(body: dict[str, Any]) -> int:
    return _crc(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _is_whole(body: dict[str, Any], stated: Any) -> bool:
    """Tell whether ``body`` has the checksum that it states.

    `orjson` gives the same bytes in a fifteenth of the time, but for tiny numbers and letters
    beyond ASCII. It reads deeper nests than it writes; no manifest has any.
    """
    try:
        quick = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return False
    return bool(stated == _crc(quick) or stated == _crc_of(body))


def _crc(raw: bytes) -> int:
    return int(_core.crc32c(np.frombuffer(raw, np.uint8)))


def _from_json(body: dict[str, Any]) -> Manifest:
    # What a version did not have yet.
    if body["version"] < 5:
        body = {**body, "row_length2": 0.0, "range_groups": 0, "range_pieces": 0}
    if body["version"] < 4:
        body = {**body, "coarse_fine": 0, "coarse_blocks": 0}
    if body["version"] < 3:
        body = {**body, "coarse_wide_blocks": 0, "coarse_directions": 0}
    if body["version"] < 2:
        body = {**body, "coarse_record_bytes": 0, "coarse_per_page": 0}
    fields = {f.name: body[f.name] for f in dataclasses.fields(Manifest)}
    fields["levels"] = tuple(LevelLayout(**level) for level in fields["levels"])
    raw = fields["calibration"]
    fields["calibration"] = None if raw is None else calibration_from_json(dict(raw))
    return Manifest(**fields)


def _check(manifest: Manifest, path: Path) -> None:
    """Refuse what no writer writes, before any number is used to address memory."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise SegmentFileCorrupt(f"{path}: {what}", path=path)

    need(manifest.metric in ("ip", "cosine", "l2"), f"metric {manifest.metric!r}")
    need(is_count(manifest.dim) and 1 <= manifest.dim <= 4096, f"dim {manifest.dim!r}")
    need(is_count(manifest.count), f"count {manifest.count!r}")
    need(manifest.vector_dtype in ("float32", "float16"), f"dtype {manifest.vector_dtype!r}")
    need(
        is_count(manifest.page_bytes)
        and 4096 <= manifest.page_bytes <= PAGE_BYTES_MAX
        and manifest.page_bytes % 4096 == 0,
        f"page_bytes {manifest.page_bytes!r}",
    )
    need(is_count(manifest.entry_row), f"entry_row {manifest.entry_row!r}")
    _check_coarse(manifest, need)
    length2 = manifest.row_length2
    need(
        isinstance(length2, float)
        and 0 <= length2 < LENGTH2_MAX
        and (manifest.metric != "l2" or not length2),
        f"row_length2 {length2!r}",
    )
    need(manifest.id_kind in ("int", "str"), f"id_kind {manifest.id_kind!r}")
    need(manifest.id_by_row_dtype in ("<u4", "<i8", "<u8"), f"{manifest.id_by_row_dtype!r}")
    need(
        is_int(manifest.id_text_bytes) and 0 <= manifest.id_text_bytes < 1 << 48,
        f"id_text_bytes {manifest.id_text_bytes!r}",
    )
    _check_levels(manifest, need)
    need(manifest.levels[0].count == manifest.count, "level 0 does not hold every row")
    for name in ("code_record_bytes", "code_per_page", "refine_record_bytes", "refine_per_page"):
        need(is_count(getattr(manifest, name)) and getattr(manifest, name) >= 1, name)
    for name in ("m", "ef_construction", "vector_record_bytes", "hot_rows"):
        need(is_count(getattr(manifest, name)), f"{name} {getattr(manifest, name)!r}")
    for name in ("seed", "total_bytes"):
        value = getattr(manifest, name)
        need(is_int(value) and 0 <= value < 1 << 64, f"{name} {value!r}")
    _check_ranges(manifest, need)
    need(
        isinstance(manifest.file_crcs, dict)
        and set(manifest.file_crcs) == set(manifest.files)
        and all(map(is_count, manifest.file_crcs.values())),
        "file_crcs does not name the segment's files",
    )
    if manifest.calibration is not None:
        what = wrong_with(manifest.calibration, has_coarse=manifest.has_coarse)
        need(what is None, f"calibration: {what}")


def _check_coarse(manifest: Manifest, need: _Need) -> None:
    """Refuse sizes of coarse codes and of their basis that contradict each other."""
    for name in (
        "coarse_record_bytes",
        "coarse_per_page",
        "coarse_wide_blocks",
        "coarse_directions",
        "coarse_fine",
        "coarse_blocks",
    ):
        need(is_count(getattr(manifest, name)), f"{name} {getattr(manifest, name)!r}")
    need(
        manifest.has_coarse == (manifest.coarse_per_page > 0),
        f"coarse_per_page {manifest.coarse_per_page!r}",
    )
    need(
        (manifest.coarse_wide_blocks > 0) == (manifest.coarse_directions > 0)
        and (manifest.has_coarse or not manifest.coarse_directions)
        and manifest.coarse_directions <= manifest.dim
        and manifest.coarse_fine <= manifest.coarse_directions
        and (manifest.coarse_directions > 0 or not manifest.coarse_blocks)
        and (manifest.coarse_blocks > 0 or not manifest.coarse_fine),
        f"coarse_directions {manifest.coarse_directions!r}, "
        f"coarse_wide_blocks {manifest.coarse_wide_blocks!r}, "
        f"coarse_fine {manifest.coarse_fine!r}, coarse_blocks {manifest.coarse_blocks!r}",
    )


def _check_ranges(manifest: Manifest, need: _Need) -> None:
    """Refuse a table of groups that no segment has."""
    groups, pieces = manifest.range_groups, manifest.range_pieces
    need(is_count(groups) and groups <= manifest.count, f"range_groups {groups!r}")
    need(
        is_count(pieces) and groups <= pieces <= manifest.count and (groups > 0 or pieces == 0),
        f"range_pieces {pieces!r}",
    )
    if groups > 0:
        # Their records are codes, which walks over vectors do not compare.
        need(not manifest.walks_vectors, f"range_groups {groups}: walks compare vectors")
        need(
            manifest.group_record_bytes <= manifest.page_bytes,
            f"code_record_bytes {manifest.code_record_bytes}: a group's record does not fit a page",
        )


def _check_levels(manifest: Manifest, need: _Need) -> None:
    """Refuse links that would not fit their pages, or pages that would not hold their rows."""
    need(0 < len(manifest.levels) <= 64, f"{len(manifest.levels)} levels")
    for number, level in enumerate(manifest.levels):
        for field in dataclasses.fields(level):
            need(is_count(getattr(level, field.name)), f"levels[{number}].{field.name}")
        need(level.per_page >= 1, f"levels[{number}].per_page is 0")
        need(level.m < 1 << 16, f"levels[{number}].m {level.m}")
        need(1 <= level.id_bits <= 32, f"levels[{number}].id_bits {level.id_bits}")
        need(
            level.record_bytes >= 2 + -(-level.m * level.id_bits // 8)
            and level.per_page * level.record_bytes + LINK_PADDING <= manifest.page_bytes,
            f"levels[{number}]: {level.per_page} records of {level.record_bytes} bytes, "
            f"{level.m} links each, do not fit a page",
        )
        need(
            level.count <= level.page_count * level.per_page
            and level.first_page + level.page_count < 1 << 32,
            f"levels[{number}]: {level.count} rows are not in pages {level.first_page} to "
            f"{level.first_page + level.page_count}",
        )
