"""What the disk refuses while a segment is still being written must end the sealing.

The system tells of such a failure once: the sync that meets it takes it from the last one.
"""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from stoker.index.build import build_segment
from stoker.index.paged_file import PagedFileWriter


def test_a_sync_that_fails_leaves_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_writer: PagedFileWriter) -> None:
        raise OSError(errno.EIO, "refused")

    monkeypatch.setattr(PagedFileWriter, "sync", refuse)
    vectors = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    with pytest.raises(OSError, match="refused"):
        build_segment(tmp_path / "s", vectors, threads=1)
    assert list(tmp_path.iterdir()) == []
