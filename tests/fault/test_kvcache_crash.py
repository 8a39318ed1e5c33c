"""Kill a writer of KV at any moment: what it acknowledged is there, and no file lies."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.kvcache.language_model import Kv
from stoker.kvcache.passages import PassageStore

pytest.importorskip("safetensors")
pytestmark = pytest.mark.models

WRITER = """
import sys
from pathlib import Path
import numpy as np
from stoker.kvcache.language_model import Kv
from stoker.kvcache.passages import PassageStore

store = PassageStore(Path(sys.argv[1]), model_id="m", memory_bytes_max=1 << 20,
                     disk_bytes_max=1 << 30)
for number in range(100_000):
    chunk = number % 7
    values = np.full((2, 2, 200, 16), number, np.float32)
    store.put("t", str(chunk), Kv(np.full(200, number, np.int32), values, -values))
    print(chunk, number, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_kill_leaves_no_entry_that_lies(seed: int, tmp_path: Path) -> None:
    acknowledged: dict[str, int] = {}
    stop_after = random.Random(seed).randint(3, 60)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for count, line in enumerate(writer.stdout, start=1):
            chunk, number = line.split()
            acknowledged[chunk] = int(number)
            if count == stop_after:
                writer.send_signal(signal.SIGKILL)
                break
        for line in writer.stdout:  # lines that were under way
            if line.endswith("\n"):
                chunk, number = line.split()
                acknowledged[chunk] = int(number)
    store = PassageStore(tmp_path, model_id="m", memory_bytes_max=1 << 20, disk_bytes_max=1 << 30)
    store.check()
    assert not list((tmp_path / "m").glob(".tmp-*"))
    for chunk, number in acknowledged.items():
        # One more write of the same chunk may have been published without its line.
        found = None
        for candidate in (number, number + 7):
            again = PassageStore(
                tmp_path, model_id="m", memory_bytes_max=1 << 20, disk_bytes_max=1 << 30
            )
            entry = again._entries[again._by_key[("t", chunk)]]
            kv = again._read(entry.unit)
            assert isinstance(kv, Kv)
            if kv.token_ids[0] == candidate:
                found = kv
                np.testing.assert_array_equal(kv.keys, np.float32(candidate))
                np.testing.assert_array_equal(kv.values, np.float32(-candidate))
        assert found is not None, f"seed {seed}, chunk {chunk}: {number} was acknowledged"
