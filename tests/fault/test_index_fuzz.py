"""Invented bytes for the reader of every file: the kept corpus always, a fuzzer as long as asked.

``STOKER_TEST_FUZZ_S`` gives each reader so many seconds of coverage-guided fuzzing (default: none,
in CI five: a minute in all). What it finds is kept in ``tests/golden/fuzz`` once it is mended.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("fuzz_readers.py")
CORPUS = HARNESS.parents[1] / "golden" / "fuzz"
READERS = sorted(path.name for path in CORPUS.iterdir())
SECONDS = int(os.environ.get("STOKER_TEST_FUZZ_S", "5" if os.environ.get("CI") else "0"))


@pytest.mark.parametrize("reader", READERS)
def test_the_kept_corpus_breaks_nothing(reader: str) -> None:
    files = sorted(map(str, (CORPUS / reader).iterdir()))
    run = subprocess.run(
        [sys.executable, str(HARNESS), reader, "--replay", *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(SECONDS == 0, reason="STOKER_TEST_FUZZ_S is not set")
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("reader", READERS)
def test_invented_bytes_break_nothing(reader: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(CORPUS / reader, corpus)
    run = subprocess.run(
        [
            sys.executable,
            str(HARNESS),
            reader,
            f"-max_total_time={SECONDS}",
            "-max_len=8192",
            "-timeout=30",
            "-rss_limit_mb=4096",
            f"-artifact_prefix={tmp_path}/found-",
            str(corpus),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=SECONDS + 120,
    )
    found = [path.read_bytes() for path in tmp_path.glob("found-*")]
    assert run.returncode == 0, f"{found!r}\n{run.stderr[-3000:]}"
