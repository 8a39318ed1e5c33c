"""The page-gather kernel: in the interpreter, and compiled ahead of time for sm_80 and sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import InputError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.models


def test_interpreted_kernel_equals_float64() -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted_gather.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("metric", "row_type"), [("ip", "fp32"), ("l2", "fp16")])
def test_kernel_compiles_ahead_of_time_without_spills(
    capability: int, metric: str, row_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from stoker.kernels.triton_gather import compile_for, resource_usage

    compiled = compile_for(capability, metric=metric, row_type=row_type)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    usage = resource_usage(compiled, capability)
    assert usage["spill_store_bytes"] == usage["spill_load_bytes"] == 0
    assert usage["registers"] <= 128


def test_cpu_takes_the_reference_path() -> None:
    pytest.importorskip("triton")
    from stoker.kernels.triton_gather import gather_topk, interpreted

    assert not interpreted()
    rows = torch.eye(4).reshape(2, 2, 4)
    table = torch.tensor([1, -1], dtype=torch.int32)
    row_ids = torch.arange(4, dtype=torch.int32)
    scores, ids = gather_topk(torch.eye(4)[3:], rows, table, row_ids, k=6, metric="ip")
    assert ids.tolist() == [[1, 0, -1, -1, -1, -1]]
    assert scores[0, :2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("wrong", ["metric", "dim", "type", "table", "k"])
def test_wrong_arguments_are_the_callers(wrong: str) -> None:
    pytest.importorskip("triton")
    from stoker.kernels.triton_gather import gather_topk

    queries = torch.zeros(1, 5 if wrong == "dim" else 4)
    rows = torch.zeros(2, 2, 4, dtype=torch.float64 if wrong == "type" else torch.float32)
    table = torch.zeros(2, dtype=torch.int64 if wrong == "table" else torch.int32)
    with pytest.raises(InputError):
        gather_topk(
            queries,
            rows,
            table,
            torch.zeros(1, dtype=torch.int32),
            k=0 if wrong == "k" else 1,
            metric="cosinus" if wrong == "metric" else "ip",
        )
