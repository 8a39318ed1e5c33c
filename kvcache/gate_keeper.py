"""Measures a model's chunk reuse when it is first seen and again later, beside the requests.

`chunk_gate` says what a measurement is and remembers it. Here is when: after so many uses, after so
much time, and at once where there is no verdict. Requests ask `GateKeeper.allows`, which neither
measures nor reads a file; a thread of its own does both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from stoker.errors import InputError
from stoker.kvcache.chunk_gate import ChunkGate, GateRecord, GateReport, is_open
from stoker.kvcache.chunk_reuse import place_chunks, run_placed
from stoker.kvcache.language_model import Forward, Kv, LanguageModel
from stoker.kvcache.rotation import window_of
from stoker.kvcache.settings import KvcacheSettings

log = structlog.get_logger(__name__)

_LOOK_S = 60.0  # between two looks at the clock: a wall clock may be set, so no longer sleep


def due_reason(
    record: GateRecord, *, uses: int, now_s: float, settings: KvcacheSettings
) -> str | None:
    """Say why a model is to be measured now, or None.

    Args:
        record: What is known of it.
        uses: How often chunks were asked for since the last measurement, allowed or not: a model
            whose reuse is off comes back by the same two ways.
        now_s: Unix time.
        settings: The two bounds, and how long a failure is left alone.

    Returns:
        ``first``: there is no verdict; ``settings``: it is of another share to recompute;
        ``time``; ``uses``.
    """
    if record.failed_at_s and 0.0 <= now_s - record.failed_at_s < settings.kv_gate_retry_s:
        return None
    report = record.report
    if report is None:
        return "first"
    if report.recompute_ratio != settings.kv_recompute_ratio:
        return "settings"
    # A clock that was set back says nothing of a verdict's age: then it is measured anew.
    if not 0.0 <= now_s - record.measured_at_s < settings.kv_gate_every_s:
        return "time"
    return "uses" if uses >= settings.kv_gate_uses_max else None


class GateKeeper:
    """Keeps one model's verdict fresh. Safe from several threads.

    Invariants: nothing is allowed before the first measurement, after one below the bar, or when
    the last is older than twice ``kv_gate_every_s``. Uses are counted in memory: a restart counts
    anew, and the bound in time holds all the same.

    Args:
        gate: Where verdicts are kept.
        model_id: The model.
        measure: Measures it; runs in the keeper's thread, so it needs a model of its own
            (`LanguageModel` is not thread-safe). Whatever it raises is counted and logged.
        settings: The schedule.
        wall: Unix time.
    """

    def __init__(
        self,
        gate: ChunkGate,
        *,
        model_id: str,
        measure: Callable[[], GateReport],
        settings: KvcacheSettings | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._gate = gate
        self._model_id = model_id
        self._measure = measure
        self._settings = settings or KvcacheSettings()
        self._wall = wall
        self._lock = threading.Lock()
        self._record = gate.record_of(model_id)
        self._uses = 0
        self._measuring = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def model_id(self) -> str:
        """The model whose gate this is."""
        return self._model_id

    def allows(self) -> bool:
        """Count a use and return whether chunks may be reused for it."""
        with self._lock:
            self._uses += 1
            uses, record = self._uses, self._record
        now_s = self._wall()
        if due_reason(record, uses=uses, now_s=now_s, settings=self._settings):
            self._wake.set()
        return is_open(record, now_s=now_s, settings=self._settings)

    def measure_if_due(self) -> str | None:
        """Measure now if the schedule says so; returns the reason, or None. Blocks meanwhile."""
        with self._measuring:
            with self._lock:
                uses, before = self._uses, self._record
            now_s = self._wall()
            reason = due_reason(before, uses=uses, now_s=now_s, settings=self._settings)
            if reason is None:
                return None
            was_open = is_open(before, now_s=now_s, settings=self._settings)
            record = self._measured(before, reason)
            with self._lock:
                self._record = record
                self._uses -= uses  # those that came meanwhile count towards the next
            now_open = is_open(record, now_s=self._wall(), settings=self._settings)
            if now_open != was_open:
                log.warning(
                    "kvcache.gate_switched", model=self._model_id, open=now_open, reason=reason
                )
            return reason

    def _measured(self, before: GateRecord, reason: str) -> GateRecord:
        try:
            report = self._measure()
            if report.model_id != self._model_id:
                raise InputError(f"expected a report on {self._model_id}, found {report.model_id}")
            record = before.after(report, now_s=self._wall())
        except Exception as error:  # a model may raise anything; the verdict lapses in time
            log.warning(
                "kvcache.gate_failed", model=self._model_id, reason=reason, error=repr(error)
            )
            record = before.after_failure(now_s=self._wall())
        try:
            self._gate.store(self._model_id, record)
        except OSError as error:  # it holds in this process; another one measures anew
            log.warning("kvcache.gate_unwritten", model=self._model_id, error=repr(error))
        return record

    def start(self) -> None:
        """Begin to measure in a thread, at once where there is no verdict."""
        self._thread = threading.Thread(target=self._run, name="chunk-gate", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop; tells whether the thread ended in time (a measurement is not cut short)."""
        self._stopped = True
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            self.measure_if_due()
            if not self._stopped:
                self._wake.wait(_LOOK_S)


def run_chunks(
    keeper: GateKeeper,
    model: LanguageModel,
    prefix: Kv,
    chunks: Sequence[Kv],
    question_ids: Sequence[int],
    *,
    settings: KvcacheSettings | None = None,
) -> Forward:
    """Run a prompt of stored chunks: with their KV where the gate is open, else computed in full.

    Args:
        keeper: The model's gate.
        model: The model that computed prefix and chunks.
        prefix: The system prompt's KV from position 0; its reuse is exact and needs no gate.
        chunks: From `encode_chunk`, in the order of the prompt.
        question_ids: What follows; at least one token.
        settings: The share to recompute.

    Returns:
        Logits of all question positions, and a cache with the whole prompt, to generate from.

    Raises:
        InputError: no question, more tokens than the model takes, or the keeper is another
            model's.
    """
    if keeper.model_id != model.model_id:
        raise InputError(f"expected the gate of {model.model_id}, found that of {keeper.model_id}")
    if not question_ids:
        raise InputError("question_ids: expected at least one token")
    chosen = settings or KvcacheSettings()
    total = len(prefix.token_ids) + sum(len(chunk.token_ids) for chunk in chunks)
    if keeper.allows() and total + len(question_ids) <= window_of(model):
        return run_placed(
            model,
            place_chunks(
                model, prefix, chunks, question_ids, recompute_ratio=chosen.kv_recompute_ratio
            ),
        )
    ids = [token for chunk in chunks for token in chunk.token_ids.tolist()]
    cache = model.cache_of(prefix) if len(prefix.token_ids) else None
    return model.forward([*ids, *question_ids], cache=cache, keep=len(question_ids))
