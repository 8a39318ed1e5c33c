"""The correctness gate: whether moved chunks are good enough for a model, by its own prompts.

Compares with full recompute: how far the next-token distributions are apart, how often the most
likely token is the same, and how much more the true continuation surprises the model. Below the
bar chunk reuse is off for that model; prefix reuse is exact and needs no gate. `gate_keeper` says
when to measure: when a model is first seen, and from time to time after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.chunk_reuse import DEFAULT_CHOICE, encode_chunk, place_chunks, run_placed
from stoker.kvcache.kv_file import sync_folder
from stoker.kvcache.language_model import LanguageModel
from stoker.kvcache.settings import KvcacheSettings

log = structlog.get_logger(__name__)


# As many as a short question has; half of a shorter continuation.
_SHOWN_TOKENS_MAX = 16


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

    def meets(self, settings: KvcacheSettings) -> bool:
        """Return whether all three measures meet the bar."""
        return (
            self.kl_mean <= settings.kv_gate_kl_max
            and self.agreement >= settings.kv_gate_agreement_min
            and self.loss_gain_ratio <= settings.kv_gate_loss_gain_max
        )


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
    choice: str = DEFAULT_CHOICE,
    seed: int = 0,
) -> GateReport:
    """Compare chunk reuse with full recompute on stored prompts.

    Each chunk is encoded behind the system text alone, then all are placed behind it in order, so
    that every chunk but the first stands where it was not computed. Where the choice looks at the
    question, it is shown the first tokens of the continuation, and no more of what is foretold.

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
        known = min(_SHOWN_TOKENS_MAX, len(follow) // 2)
        chunk_ids = [model.encode(chunk) for chunk in prompt.chunks]
        if not system or len(follow) < 2 or not all(chunk_ids) or not chunk_ids:
            raise InputError("expected a prompt with system text, chunks and a continuation")
        prefix = model.prefill(system)
        placed = place_chunks(
            model, prefix, [encode_chunk(model, prefix, ids) for ids in chunk_ids], follow,
            recompute_ratio=chosen.kv_recompute_ratio, choice=choice, known=known, rng=rng,
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
        allowed=False,
    )  # fmt: skip
    report = dataclasses.replace(report, allowed=report.meets(chosen))
    log.info(
        "kvcache.gate_measured", model=report.model_id, allowed=report.allowed, kl_mean=kl_mean,
        agreement=agreement, loss_gain_ratio=report.loss_gain_ratio, prompts=report.prompts,
    )  # fmt: skip
    return report


def read_gate_prompts(path: Path) -> list[GatePrompt]:
    """Read stored prompts: JSON lines with ``system``, ``chunks`` (a list) and ``continuation``.

    Raises:
        InputError: the file cannot be read, holds no prompt, or a line is none; it is named.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a file of prompts: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            texts = (found["system"], *found["chunks"], found["continuation"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}:{number}: expected a prompt: {error!r}") from error
        if len(texts) < 3 or not all(isinstance(text, str) and text for text in texts):
            raise InputError(
                f"{path}:{number}: expected texts as system, chunks and continuation, none empty"
            )
        prompts.append(GatePrompt(texts[0], texts[1:-1], texts[-1]))
    if not prompts:
        raise InputError(f"{path}: expected at least one prompt")
    return prompts


@dataclasses.dataclass(frozen=True)
class GateRecord:
    """What is kept of one model's measurements.

    Attributes:
        report: The last that came to an end; None where none has.
        measured_at_s: When that was, in Unix time; 0 without one.
        failed_at_s: When the last one failed that followed it; 0 where none did.
        allowed: Measurements so far that met the bar.
        refused: Those that did not.
        failed: Those that came to no end.
    """

    report: GateReport | None = None
    measured_at_s: float = 0.0
    failed_at_s: float = 0.0
    allowed: int = 0
    refused: int = 0
    failed: int = 0

    def after(self, report: GateReport, *, now_s: float) -> GateRecord:
        """Return what is to be kept once a measurement came to an end."""
        return dataclasses.replace(
            self,
            report=report,
            measured_at_s=now_s,
            failed_at_s=0.0,
            allowed=self.allowed + report.allowed,
            refused=self.refused + (not report.allowed),
        )

    def after_failure(self, *, now_s: float) -> GateRecord:
        """Return what is to be kept of one that did not; the verdict stands until it lapses."""
        return dataclasses.replace(self, failed_at_s=now_s, failed=self.failed + 1)


class ChunkGate:
    """Remembers, per model, whether chunks may be reused; off until it was measured.

    One thread of one process writes a model's record; any may read it.

    Args:
        folder: Where records are kept, one small file a model.
        settings: How long a verdict stands, and the share to recompute that it must be of.
        wall: Unix time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: KvcacheSettings | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._settings = settings or KvcacheSettings()
        self._wall = wall

    def _path(self, model_id: str) -> Path:
        if not model_id.isalnum():
            raise InputError(f"model_id: expected letters and digits, found {model_id!r}")
        return self._folder / f"gate-{model_id}.json"

    def keep(self, report: GateReport) -> None:
        """Store a report with its time, replacing the model's last; durable when this returns."""
        record = self.record_of(report.model_id).after(report, now_s=self._wall())
        self.store(report.model_id, record)

    def store(self, model_id: str, record: GateRecord) -> None:
        """Store a model's record; durable when this returns."""
        path = self._path(model_id)
        # Made only here: who reads may be on a volume that cannot be written to.
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        try:
            with scratch.open("w") as file:
                json.dump({"model_id": model_id, **dataclasses.asdict(record)}, file)
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
        sync_folder(self._folder)

    def record_of(self, model_id: str) -> GateRecord:
        """Return what is kept of a model; an empty record where nothing is that can be read."""
        path = self._path(model_id)
        try:
            document = json.loads(path.read_text())
            if document.pop("model_id") != model_id:
                return GateRecord()
            found = document.pop("report")
            report = None if found is None else GateReport(**found)
            record = GateRecord(report=report, **document)
            numbers = dataclasses.astuple(dataclasses.replace(record, report=None))[1:]
            if not all(isinstance(number, int | float) for number in numbers):
                return GateRecord()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return GateRecord()
        return record if report is None or report.model_id == model_id else GateRecord()

    def report_of(self, model_id: str) -> GateReport | None:
        """Return a model's last report, or None where there is none that can be read."""
        return self.record_of(model_id).report

    def allows(self, model_id: str) -> bool:
        """Return whether chunk reuse is on for a model."""
        return is_open(self.record_of(model_id), now_s=self._wall(), settings=self._settings)


def is_open(record: GateRecord, *, now_s: float, settings: KvcacheSettings) -> bool:
    """Return whether chunks may be reused: the last verdict says so, and still stands.

    A verdict is of one share to recompute and one way to choose, and lapses after twice
    ``kv_gate_every_s``: where the measurements that should have followed fail, reuse does not go on
    for ever.
    """
    report = record.report
    return (
        report is not None
        and report.allowed
        and report.recompute_ratio == settings.kv_recompute_ratio
        and report.choice == DEFAULT_CHOICE
        # Of a clock that was set back nothing is known but that it is wrong.
        and abs(now_s - record.measured_at_s) <= 2 * settings.kv_gate_every_s
    )
