"""The correctness gate: whether moved chunks are good enough for a model, by its own prompts.

Compares with full recompute: how far the next-token distributions are apart, how often the most
likely token is the same, and how much more the true continuation surprises the model. Below the
bar chunk reuse is off for that model; prefix reuse is exact and needs no gate.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.chunk_reuse import encode_chunk, place_chunks, run_placed
from stoker.kvcache.kv_file import sync_folder
from stoker.kvcache.language_model import LanguageModel
from stoker.kvcache.settings import KvcacheSettings

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class GatePrompt:
    """One stored prompt: what stands before, the passages, and text that truly follows."""

    system: str
    chunks: tuple[str, ...]
    continuation: str


@dataclasses.dataclass(frozen=True)
class GateReport:
    """What a model's moved chunks are worth.

    Attributes:
        model_id: Whose.
        prompts: How many were compared.
        positions: Next-token distributions that were compared.
        kl_mean: Mean divergence of the full run's distribution from ours, in nats.
        agreement: Share of positions with the same most likely token.
        loss_full: Mean next-token loss of the continuation with full recompute, in nats.
        loss_reused: The same with reuse.
        recompute_ratio: Share of chunk tokens that was computed again.
        choice: How they were chosen.
        allowed: Whether the bar is met.
    """

    model_id: str
    prompts: int
    positions: int
    kl_mean: float
    agreement: float
    loss_full: float
    loss_reused: float
    recompute_ratio: float
    choice: str
    allowed: bool

    @property
    def loss_gain_ratio(self) -> float:
        """How much larger the loss is with reuse, as a share of the full run's."""
        return self.loss_reused / self.loss_full - 1.0


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result


def measure_gate(
    model: LanguageModel,
    prompts: Sequence[GatePrompt],
    *,
    settings: KvcacheSettings | None = None,
    choice: str = "deviation",
    seed: int = 0,
) -> GateReport:
    """Compare chunk reuse with full recompute on stored prompts.

    Each chunk is encoded behind the system text alone, then all are placed behind it in order, so
    that every chunk but the first stands where it was not computed.

    Args:
        model: The model.
        prompts: At least one, with a continuation of at least two tokens.
        settings: The share to recompute and the bar.
        choice: As in `place_chunks`.
        seed: For the random choice.

    Raises:
        InputError: no prompt, or one without chunks or continuation.
    """
    if not prompts:
        raise InputError("prompts: expected at least one")
    chosen = settings or KvcacheSettings()
    rng = random.Random(seed)
    divergence: list[float] = []
    same: list[bool] = []
    losses: tuple[list[float], list[float]] = ([], [])
    for prompt in prompts:
        system, follow = model.encode(prompt.system), model.encode(prompt.continuation)
        chunk_ids = [model.encode(chunk) for chunk in prompt.chunks]
        if not system or len(follow) < 2 or not all(chunk_ids) or not chunk_ids:
            raise InputError("expected a prompt with system text, chunks and a continuation")
        prefix = model.prefill(system)
        placed = place_chunks(
            model, prefix, [encode_chunk(model, prefix, ids) for ids in chunk_ids], follow,
            recompute_ratio=chosen.kv_recompute_ratio, choice=choice, rng=rng,
        )  # fmt: skip
        whole = system + [token for ids in chunk_ids for token in ids] + follow
        full = _log_softmax(model.forward(whole, keep=len(follow)).logits)
        ours = _log_softmax(run_placed(model, placed).logits)
        divergence.extend((np.exp(full) * (full - ours)).sum(axis=-1).tolist())
        same.extend((full.argmax(axis=-1) == ours.argmax(axis=-1)).tolist())
        following = np.arange(len(follow) - 1), np.array(follow[1:])
        for kept, logs in zip(losses, (full, ours), strict=True):
            kept.extend((-logs[following]).tolist())
    kl_mean, agreement = float(np.mean(divergence)), float(np.mean(same))
    report = GateReport(
        model_id=model.model_id, prompts=len(prompts), positions=len(same), kl_mean=kl_mean,
        agreement=agreement, loss_full=float(np.mean(losses[0])),
        loss_reused=float(np.mean(losses[1])), recompute_ratio=chosen.kv_recompute_ratio,
        choice=choice,
        allowed=kl_mean <= chosen.kv_gate_kl_max and agreement >= chosen.kv_gate_agreement_min,
    )  # fmt: skip
    log.info(
        "kvcache.gate_measured", model=report.model_id, allowed=report.allowed, kl_mean=kl_mean,
        agreement=agreement, prompts=report.prompts,
    )  # fmt: skip
    return report


class ChunkGate:
    """Remembers, per model, whether chunks may be reused; off until it was measured.

    Args:
        folder: Where reports are kept, one small file a model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, model_id: str) -> Path:
        if not model_id.isalnum():
            raise InputError(f"model_id: expected letters and digits, found {model_id!r}")
        return self._folder / f"gate-{model_id}.json"

    def keep(self, report: GateReport) -> None:
        """Store a report, replacing the model's last; durable when this returns."""
        path = self._path(report.model_id)
        scratch = path.with_suffix(".tmp")
        with scratch.open("w") as file:
            json.dump(dataclasses.asdict(report), file)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
        sync_folder(self._folder)

    def report_of(self, model_id: str) -> GateReport | None:
        """Return a model's last report, or None where there is none that can be read."""
        path = self._path(model_id)
        try:
            document = json.loads(path.read_text())
            report = GateReport(**document)
        except (OSError, ValueError, TypeError):
            return None
        return report if report.model_id == model_id else None

    def allows(self, model_id: str) -> bool:
        """Return whether chunk reuse is on for a model."""
        report = self.report_of(model_id)
        return report is not None and report.allowed
