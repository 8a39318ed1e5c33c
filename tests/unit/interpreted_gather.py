"""Runs the Triton kernel in the interpreter against float64 PyTorch: a program of its own.

The interpreter must be chosen before the first import of Triton, and other tests import it too.
Prints one line per case; fails by exit code.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from stoker.kernels.gather_reference import gather_scores_reference
from stoker.kernels.triton_gather import gather_scores, gather_topk, interpreted

CASES = [
    # dim, rows per page, frames, pages, rows asked for, queries, type, metric
    (384, 10, 9, 6, 150, 3, torch.float32, "ip"),
    (384, 10, 9, 6, 64, 1, torch.float16, "ip"),
    (100, 7, 4, 12, 65, 2, torch.float32, "l2"),
    (96, 3, 4, 5, 1, 2, torch.float16, "l2"),
    (8, 1, 1, 3, 200, 1, torch.float32, "ip"),
]


def run_case(case: tuple[int, int, int, int, int, int, torch.dtype, str]) -> None:
    dim, per_page, frames, pages, asked, query_count, dtype, metric = case
    rows = torch.nn.functional.normalize(torch.randn(frames, per_page, dim), dim=-1).to(dtype)
    queries = torch.nn.functional.normalize(torch.randn(query_count, dim), dim=-1)
    table = torch.full((pages,), -1, dtype=torch.int32)
    resident = torch.randperm(pages)[: min(frames, pages)]
    table[resident] = torch.randperm(frames)[: len(resident)].to(torch.int32)
    row_ids = torch.randint(0, pages * per_page, (asked,), dtype=torch.int32)
    expected = torch.empty(query_count, asked, dtype=torch.float64)
    for index, row in enumerate(row_ids.tolist()):
        frame = int(table[row // per_page])
        vector = rows[frame, row % per_page].double()
        if metric == "ip":
            expected[:, index] = queries.double() @ vector
        else:
            expected[:, index] = -((queries.double() - vector) ** 2).sum(dim=1)
        if frame < 0:
            expected[:, index] = float("-inf")
    found = gather_scores(queries, rows, table, row_ids, metric=metric)
    plain = gather_scores_reference(queries, rows, table, row_ids, metric=metric)
    finite = torch.isfinite(expected)
    for name, scores in (("kernel", found), ("reference", plain)):
        assert torch.equal(torch.isfinite(scores), finite), (name, case)
        if finite.any():
            worst = float((scores[finite].double() - expected[finite]).abs().max())
            assert worst < 1e-6, (name, case, worst)
    best, ids = gather_topk(queries, rows, table, row_ids, k=5, metric=metric)
    assert best.shape == ids.shape == (query_count, 5)
    for query in range(query_count):
        wanted = torch.sort(found[query], descending=True).values[:5]
        assert torch.equal(best[query][: len(wanted)], wanted), case
        assert all((row == -1) == (score == float("-inf")) for row, score in zip(
            ids[query].tolist(), best[query].tolist(), strict=True
        )), case  # fmt: skip
    print(case)


if __name__ == "__main__":
    assert interpreted()
    torch.manual_seed(11)
    for each in CASES:
        run_case(each)
