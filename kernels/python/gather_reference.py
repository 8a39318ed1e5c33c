"""Plain PyTorch for what the Triton kernel does: the definition that it is tested against."""

from __future__ import annotations

from typing import Any

from stoker.errors import InputError
from stoker.kernels.device import import_torch

METRICS = ("ip", "l2")


def gather_scores_reference(
    queries: Any, rows: Any, table: Any, row_ids: Any, *, metric: str
) -> Any:
    """Score rows that are reached through a page table.

    Args:
        queries: float32, shape (nq, dim), contiguous.
        rows: The slab as rows, float32 or float16, shape (frames, rows per page, dim).
        table: int32, shape (pages,): the frame of each page, -1 where it is not resident.
        row_ids: int32, shape (n,): row r is row ``r % rows_per_page`` of page
            ``r // rows_per_page``; each page number below ``len(table)``.
        metric: ``ip`` (inner product) or ``l2`` (squared distance, negated: larger is nearer).

    Returns:
        float32, shape (nq, n); -inf where the row's page is not resident.
    """
    torch = import_torch()
    require_metric(metric)
    per_page = rows.shape[1]
    frames = table[(row_ids // per_page).long()].long()
    resident = frames >= 0
    gathered = rows[frames.clamp(min=0), (row_ids % per_page).long()].to(torch.float32)
    if metric == "ip":
        scores = queries @ gathered.T
    else:
        scores = -((queries[:, None, :] - gathered[None, :, :]) ** 2).sum(dim=-1)
    return torch.where(resident[None, :], scores, float("-inf"))


def require_metric(metric: str) -> None:
    """Raise InputError for a metric that the kernels do not know."""
    if metric not in METRICS:
        raise InputError(f"metric: expected one of {', '.join(METRICS)}, found {metric!r}")
