"""Time to the first token, with a passage's KV computed again and with it reused.

The measurement behind `stoker demo --llm`: the same model, the same prompts, one process. A reuse
counts only if its greedy answer is token for token that of the full run.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from stoker.errors import InputError
from stoker.kvcache.language_model import Forward, LanguageModel
from stoker.kvcache.passages import PassageStore
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.small_model import prepared_small_model

TENANT = "demo"
QUESTION = "\n\nQuestion: What does the text above say?\nAnswer:"


@dataclasses.dataclass(frozen=True)
class FirstTokenRow:
    """One prompt: a passage as prefix, then a question.

    Attributes:
        passage_tokens: Tokens whose KV is reused.
        question_tokens: Tokens that are computed either way.
        recompute_s: Time to the first token without reuse.
        memory_s: With the KV in host memory.
        file_s: With the KV in a file: read and checked.
        logit_gap_max: Largest difference of the question's logits between the two ways.
        same_answer: Whether the greedy answers are token for token the same.
        answer: The answer's text.
    """

    passage_tokens: int
    question_tokens: int
    recompute_s: float
    memory_s: float
    file_s: float
    logit_gap_max: float
    same_answer: bool
    answer: str


@dataclasses.dataclass(frozen=True)
class FirstTokenReport:
    """What was measured over all prompts; medians, since the machine is shared."""

    model: str
    token_bytes: int
    stored_bytes: int
    prepare_s: float
    rows: tuple[FirstTokenRow, ...]

    @property
    def recompute_s(self) -> float:
        """Median time to the first token without reuse."""
        return statistics.median(row.recompute_s for row in self.rows)

    @property
    def memory_s(self) -> float:
        """Median time to the first token with the KV in memory."""
        return statistics.median(row.memory_s for row in self.rows)

    @property
    def file_s(self) -> float:
        """Median time to the first token with the KV in a file."""
        return statistics.median(row.file_s for row in self.rows)

    @property
    def speedup(self) -> float:
        """How many times sooner the first token comes with the KV in memory."""
        return statistics.median(row.recompute_s / row.memory_s for row in self.rows)

    @property
    def exact(self) -> bool:
        """Whether every answer was token for token the same."""
        return all(row.same_answer for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """Return plain values for ``--json``."""
        return {
            "model": self.model,
            "token_bytes": self.token_bytes,
            "stored_bytes": self.stored_bytes,
            "prepare_s": self.prepare_s,
            "recompute_s": self.recompute_s,
            "memory_s": self.memory_s,
            "file_s": self.file_s,
            "speedup": self.speedup,
            "exact": self.exact,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def render(self) -> str:
        """Return a plain table for people."""
        lines = ["passage tokens   recomputed   from memory   from file   same answer"]
        for row in self.rows:
            lines.append(
                f"{row.passage_tokens:14d}   {row.recompute_s * 1e3:7.0f} ms   "
                f"{row.memory_s * 1e3:8.0f} ms   {row.file_s * 1e3:6.0f} ms   "
                f"{'yes' if row.same_answer else 'NO'}"
            )
        lines.append(f"first token {self.speedup:.1f} x sooner with the passage's KV in memory")
        return "\n".join(lines)


def measure_first_token(
    texts: Sequence[str],
    *,
    question: str = QUESTION,
    tokens_max: int = 1024,
    answer_tokens: int = 12,
    folder: Path | None = None,
    model: LanguageModel | None = None,
    settings: KvcacheSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FirstTokenReport:
    """Measure time to first token for each text as the prompt's prefix.

    The KV goes through the real store: written as a file, read back and checked. About 10 s a
    text of 1,000 tokens on one core; the model's first conversion takes 15 s more.

    Args:
        texts: Passages; each is cut to ``tokens_max`` tokens, and must have at least one.
        question: What follows every passage.
        tokens_max: Tokens of a passage that are used.
        answer_tokens: Greedy tokens that are compared; 1 compares the first only.
        folder: Where KV files are kept; a temporary folder by default.
        model: An already loaded model; the packaged small one by default.
        settings: Budgets of the store.
        progress: Called with (texts done, texts in all).

    Raises:
        UnavailableError: torch, transformers or the model's package is missing.
        InputError: no text, or one without words.
    """
    if not texts:
        raise InputError("texts: expected at least one")
    started = time.perf_counter()
    loaded = model or LanguageModel(prepared_small_model())
    question_ids = loaded.encode(question)
    loaded.forward(question_ids)  # the first pass of a process sets up kernels
    prepare_s = time.perf_counter() - started
    limits = settings or KvcacheSettings()
    with tempfile.TemporaryDirectory(prefix="stoker-kv-") as scratch:
        place = folder or Path(scratch)
        rows = []
        for number, text in enumerate(texts):
            ids = loaded.encode(text)[:tokens_max]
            if not ids:
                raise InputError(f"text {number}: expected words, found none")
            rows.append(
                _measure_one(
                    loaded, place, f"text-{number}", ids, question_ids, answer_tokens, limits
                )
            )
            if progress is not None:
                progress(number + 1, len(texts))
        stored = _open_store(loaded, place, limits).counts().disk_bytes
    return FirstTokenReport(
        model=str(loaded.config.architectures[0] if loaded.config.architectures else "model"),
        token_bytes=loaded.token_bytes,
        stored_bytes=stored,
        prepare_s=prepare_s,
        rows=tuple(rows),
    )


def _open_store(model: LanguageModel, folder: Path, settings: KvcacheSettings) -> PassageStore:
    return PassageStore(
        folder,
        model_id=model.model_id,
        memory_bytes_max=settings.kv_bytes_max,
        disk_bytes_max=settings.kv_disk_bytes_max,
    )


def _measure_one(
    model: LanguageModel,
    folder: Path,
    name: str,
    ids: list[int],
    question_ids: list[int],
    answer_tokens: int,
    settings: KvcacheSettings,
) -> FirstTokenRow:
    count = len(question_ids)
    started = time.perf_counter()
    full = model.forward(ids + question_ids, keep=count)
    recompute_s = time.perf_counter() - started
    full_answer = _answer(model, full, answer_tokens)

    # The full run has just computed the passage's KV: keeping it costs no second pass.
    _open_store(model, folder, settings).put(TENANT, name, model.kv_of(full.cache, ids))

    store = _open_store(model, folder, settings)  # opened afresh: nothing in memory
    timings = []
    for _ in ("file", "memory"):
        started = time.perf_counter()
        kv = store.get(TENANT, name, ids)
        assert kv is not None, "it was just stored"
        reused = model.forward(question_ids, cache=model.cache_of(kv), keep=count)
        timings.append(time.perf_counter() - started)
    gap = float(np.abs(full.logits - reused.logits).max())
    answer = _answer(model, reused, answer_tokens)
    return FirstTokenRow(
        passage_tokens=len(ids),
        question_tokens=count,
        recompute_s=recompute_s,
        memory_s=timings[1],
        file_s=timings[0],
        logit_gap_max=gap,
        same_answer=answer == full_answer,
        answer=model.decode(answer),
    )


def _answer(model: LanguageModel, step: Forward, tokens: int) -> list[int]:
    first = int(np.argmax(step.logits[-1]))
    if tokens <= 1 or first == model.config.eos_token_id:
        return [first]
    return [first, *model.generate([first], tokens=tokens - 1, cache=step.cache)]
