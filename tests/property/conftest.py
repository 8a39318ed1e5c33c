"""What property tests of sealed segments share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.index.manifest import Manifest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings


@pytest.fixture
def opened() -> Callable[..., Segment]:
    """Opens a segment's folder with all of it in memory: ``opened(path, bits, manifest)``.

    Walks compare codes of so many bits, if given; a manifest stands in for the folder's own.
    """

    def whole(path: Path, bits: int = 0, manifest: Manifest | None = None) -> Segment:
        settings = IndexSettings(navigation_bits=bits)
        segment = Segment(path, manifest or Manifest.read(path), 0, settings)
        for batch in segment.unit_batches():
            segment.load_units(batch.kind, batch.units)
        return segment

    return whole
