"""The standard library's documentation, as passages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import UnavailableError
from stoker.service.corpus_stdlib import stdlib_passages


def test_every_python_gives_thousands_of_passages_in_a_fixed_order_and_imports_nothing() -> None:
    passages = list(stdlib_passages())
    # Read once more where sets and dictionaries of strings have another order.
    code = (
        "import json, sys\n"
        "from stoker.service.corpus_stdlib import stdlib_passages\n"
        "import sysconfig; sysconfig.get_paths()\n"
        "before = set(sys.modules)\n"
        "ids = [passage.id for passage in stdlib_passages()]\n"
        "print(json.dumps([ids, sorted(set(sys.modules) - before)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    again, imported = json.loads(done.stdout)
    assert [p.id for p in passages] == again
    assert imported == []
    assert len(passages) > 4_000
    assert len({p.id for p in passages}) == len(passages)
    assert len({p.text for p in passages}) == len(passages)
    assert max(len(p.text.split()) for p in passages) < 140
    ids = [p.id for p in passages]
    assert ids[0].startswith("python/asyncio")
    assert "python/str.split#0" in ids
    assert any(i.startswith("python/topics/") for i in ids)
    by_id = {p.id: p for p in passages}
    joined = by_id["python/json.loads#0"]
    assert joined.text.startswith("json.loads(s, cls, object_hook")
    assert joined.metadata["module"] == "json"


def test_private_names_copies_and_broken_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        '"""The module says what it does."""\n'
        "def _hidden():\n    'This is not shown to anyone.'\n"
        "class Shown:\n"
        "    'A class that can be seen.'\n"
        "    def method(self, a, *rest, b=1, **more):\n        'Does a thing with a.'\n"
        "if True:\n    def under_if():\n        'Defined on some platforms only.'\n"
        "def short():\n    'Too short.'\n"
    )
    (tmp_path / "copy_of_good.py").write_text((tmp_path / "good.py").read_text())
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "binary.py").write_bytes(b"\0\xff")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "inner.py").write_text('"""A test that nobody should read."""')
    texts = [p.text for p in stdlib_passages(root=tmp_path) if p.metadata["module"] == "good"]
    assert texts == [
        "module good: The module says what it does.",
        "class good.Shown: A class that can be seen.",
        "good.Shown.method(a, *rest, b, **more): Does a thing with a.",
        "good.under_if(): Defined on some platforms only.",
    ]


def test_a_python_without_sources_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no library sources"):
        list(stdlib_passages(root=tmp_path))
