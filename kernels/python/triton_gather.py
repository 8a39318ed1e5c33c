"""The Triton kernel of the GPU tier: rows through a page table, scored against queries.

The scores go to `torch.topk`; a top-k inside the kernel compiles for minutes and gains nothing at
these sizes. Runs in Triton's interpreter too (``TRITON_INTERPRET=1`` before the first import).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from stoker.errors import InputError, UnavailableError
from stoker.kernels.device import import_torch
from stoker.kernels.gather_reference import gather_scores_reference, require_metric

BLOCK_ROWS = 64
BLOCK_DIM = 64


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gather_scores_kernel(  # type: ignore[no-untyped-def]
    queries,
    rows,
    table,
    row_ids,
    scores,
    row_count,
    rows_per_page,
    frame_stride,
    dim,
    IS_L2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Score BLOCK_ROWS rows against one query: program (row block, query).

    ``frame_stride`` is in values. Rows of a page that is not resident are not read: their score
    is -inf. The loop over the dimension stays a loop; unrolled, it compiles for minutes.
    """
    block = tl.program_id(0)
    query = tl.program_id(1)
    offsets = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    within = offsets < row_count
    row = tl.load(row_ids + offsets, mask=within, other=0)
    frame = tl.load(table + row // rows_per_page, mask=within, other=-1)
    resident = frame >= 0
    # 64 bits: a slab of 8 GiB has more values than int32 counts.
    start = frame.to(tl.int64) * frame_stride + (row % rows_per_page).to(tl.int64) * dim
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for first in range(0, dim, BLOCK_DIM):
        column = first + tl.arange(0, BLOCK_DIM)
        inside = column < dim
        left = tl.load(queries + query * dim + column, mask=inside, other=0.0)
        right = tl.load(
            rows + start[:, None] + column[None, :],
            mask=resident[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        if IS_L2:
            gap = tl.where(inside[None, :], left[None, :] - right, 0.0)
            total -= tl.sum(gap * gap, axis=1)
        else:
            total += tl.sum(left[None, :] * right, axis=1)
    total = tl.where(resident, total, float("-inf"))
    tl.store(scores + query.to(tl.int64) * row_count + offsets, total, mask=within)


def interpreted() -> bool:
    """Return whether this process runs Triton kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gather_scores(queries: Any, rows: Any, table: Any, row_ids: Any, *, metric: str) -> Any:
    """Score rows through a page table, on the device that holds them.

    The arguments and the result are those of `gather_scores_reference`, which also does the work
    where there is neither a GPU nor the interpreter.

    Raises:
        InputError: a shape, a type or the metric is not as described.
    """
    torch = import_torch()
    require_metric(metric)
    if queries.ndim != 2 or rows.ndim != 3 or queries.shape[1] != rows.shape[2]:
        raise InputError(
            f"expected queries (nq, dim) and rows (frames, per page, dim), found "
            f"{tuple(queries.shape)} and {tuple(rows.shape)}"
        )
    if queries.dtype != torch.float32 or rows.dtype not in (torch.float32, torch.float16):
        raise InputError(
            f"expected float32 queries and float32 or float16 rows, found {queries.dtype} and "
            f"{rows.dtype}"
        )
    if table.dtype != torch.int32 or row_ids.dtype != torch.int32 or row_ids.ndim != 1:
        raise InputError("expected an int32 table and int32 row ids of shape (n,)")
    if not (queries.is_cuda or interpreted()):
        return gather_scores_reference(queries, rows, table, row_ids, metric=metric)
    query_count, dim = queries.shape
    row_count = row_ids.shape[0]
    scores = torch.empty((query_count, row_count), dtype=torch.float32, device=queries.device)
    if query_count == 0 or row_count == 0:
        return scores
    grid = (triton.cdiv(row_count, BLOCK_ROWS), query_count)
    gather_scores_kernel[grid](
        queries.contiguous(),
        rows,
        table,
        row_ids,
        scores,
        row_count,
        rows.shape[1],
        rows.stride(0),
        dim,
        # Triton wraps these itself; its annotation says otherwise.
        IS_L2=metric == "l2",  # pyright: ignore[reportArgumentType]
        BLOCK_ROWS=BLOCK_ROWS,  # pyright: ignore[reportArgumentType]
        BLOCK_DIM=BLOCK_DIM,  # pyright: ignore[reportArgumentType]
    )
    return scores


def gather_topk(
    queries: Any, rows: Any, table: Any, row_ids: Any, *, k: int, metric: str
) -> tuple[Any, Any]:
    """Return the best rows per query: scores float32 and row ids int32, shape (nq, k).

    Fewer than k resident rows leave -inf scores at the end, with row id -1.
    """
    torch = import_torch()
    if k < 1:
        raise InputError(f"k: expected at least 1, found {k}")
    scores = gather_scores(queries, rows, table, row_ids, metric=metric)
    found = min(k, row_ids.shape[0])
    best, position = torch.topk(scores, found, dim=1)
    ids = torch.where(best > float("-inf"), row_ids[position], -1)
    if found < k:
        pad = (0, k - found)
        best = torch.nn.functional.pad(best, pad, value=float("-inf"))
        ids = torch.nn.functional.pad(ids, pad, value=-1)
    return best, ids


def compile_for(capability: int, *, metric: str = "ip", row_type: str = "fp32") -> Any:
    """Compile the kernel ahead of time, on a machine that needs no GPU.

    Args:
        capability: 80 for sm_80, 90 for sm_90.
        metric: ``ip`` or ``l2``.
        row_type: ``fp32`` or ``fp16``.

    Returns:
        Triton's compiled kernel: ``asm["ptx"]``, ``asm["cubin"]``, ``metadata``.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    require_metric(metric)
    signature = {
        "queries": "*fp32",
        "rows": f"*{row_type}",
        "table": "*i32",
        "row_ids": "*i32",
        "scores": "*fp32",
        "row_count": "i32",
        "rows_per_page": "i32",
        "frame_stride": "i32",
        "dim": "i32",
        "IS_L2": "constexpr",
        "BLOCK_ROWS": "constexpr",
        "BLOCK_DIM": "constexpr",
    }
    constants = {
        "IS_L2": metric == "l2",
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_DIM": BLOCK_DIM,
    }
    # What the launcher finds at run time for our slabs: aligned pointers, strides and dim that are
    # multiples of 16. Without it every value is a load of its own.
    aligned = ("queries", "rows", "table", "row_ids", "scores", "frame_stride", "dim")
    hints = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        fn=gather_scores_kernel, signature=signature, constexprs=constants, attrs=hints
    )
    # Said outright, because Triton is about to change its default.
    options = {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resource_usage(compiled: Any, capability: int) -> dict[str, int]:
    """Ask the bundled ``ptxas`` what a compiled kernel needs: registers and spilled bytes.

    Raises:
        UnavailableError: the assembler is not there or does not take the code.
    """
    # Newer Tritons carry a second assembler for newer PTX; the first that takes the code reports.
    folder_of_tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assemblers = sorted(folder_of_tools.glob("ptxas*"))
    if not assemblers:
        raise UnavailableError(f"expected an assembler in {folder_of_tools}, found none")
    target = re.search(r"\.target\s+(\w+)", compiled.asm["ptx"])
    name = target.group(1) if target else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        flags = ["-v", f"--gpu-name={name}", str(source), "-o", "/dev/null"]
        report = ""
        for ptxas in assemblers:
            try:
                done = subprocess.run(
                    [str(ptxas), *flags], capture_output=True, text=True, timeout=60, check=False
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise UnavailableError(f"expected ptxas to take the kernel: {error}") from error
            report = done.stderr + done.stdout
            if done.returncode == 0:
                break
        else:
            raise UnavailableError(f"expected ptxas to take the kernel: {report[:200]}")
    figures = {
        "registers": r"Used (\d+) registers",
        "spill_store_bytes": r"(\d+) bytes spill stores",
        "spill_load_bytes": r"(\d+) bytes spill loads",
    }
    usage: dict[str, int] = {}
    for key, pattern in figures.items():
        found = re.search(pattern, report)
        if found is None:
            raise UnavailableError(f"expected {key} in ptxas's report, found: {report[:200]}")
        usage[key] = int(found.group(1))
    return usage
