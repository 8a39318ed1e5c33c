"""Warm-ups of a running server: one at a time, in a thread, with progress and a kept receipt.

/readyz opens when the first has loaded all that it will. Its receipt, with what it predicts, is
done a moment later and written to the state folder. Once enough accesses have followed, the share
of them that the warm-up served is added to it, beside the prediction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from stoker.errors import InputError, StokerError, UnavailableError
from stoker.prefetch.coverage_curve import KNOWN, SPAN_ACCESSES_MIN, Coverage
from stoker.prefetch.held_back import HeldBack
from stoker.prefetch.protocols import ContentKey, WarmSource, units_offered
from stoker.prefetch.receipt import Receipt, StageMark
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.warm import run_warm
from stoker.prefetch.warm_control import PAUSED, WarmControl
from stoker.prefetch.warm_set import Accesses, WarmSet
from stoker.service.answers import WarmupStatus
from stoker.service.problems import DeadlinePassed, WarmupIdle, WarmupRunning
from stoker.service.turns import PATIENCE_S, Callers, Turns
from stoker.service.whole_file import replace_file

log = structlog.get_logger(__name__)

# As many as the prediction puts to the test at least: a standard error of a point and a half.
_MEASURED_ACCESSES: Final = SPAN_ACCESSES_MIN
# Rounds left out at most after one that found nothing: some minutes, at a round every 5 s.
_ROUNDS_SKIPPED_MAX: Final = 63
# Of a warm-up's deadline, for stepping aside: what is not planned by then is not loaded either.
_PATIENCE_RATIO: Final = 0.1
# Longest that a server's first warm-up waits in all for its first answer: a cold one takes about
# 0.1 s on a volume of 3,000 reads a second, and who waits for readiness should wait no more for it.
_FIRST_S: Final = 0.25
# What can be asked of a warm-up that runs.
STEERING: Final = ("pause", "resume", "reprioritise", "cancel")


@dataclass
class _Unmeasured:
    """A warm-up that ended at a Unix time, and what it made resident.

    Attributes:
        skips: How many calls of `WarmupRunner.measure` are still left out.
        skipped: How many were left out after the last look that found nothing.
    """

    since_s: float
    loaded: WarmSet
    skips: int = 0
    skipped: int = 0

    def found_nothing(self) -> None:
        """Look half as often from now on, within a bound."""
        self.skipped = min(2 * self.skipped + 1, _ROUNDS_SKIPPED_MAX)
        self.skips = self.skipped


class WarmupRunner:
    """Runs warm-ups. Safe from several threads.

    Invariants: at most one warm-up runs; `status` never goes back from "done" to "none", and
    `loaded_once` never from true to false.
    """

    def __init__(
        self,
        sources: Callable[[], Sequence[WarmSource]],
        demand: Callable[[], Mapping[ContentKey, float]],
        *,
        settings: PrefetchSettings,
        receipt_path: Path | None,
        finished: Callable[[Receipt], None] = lambda receipt: None,
        coverage: Callable[[], Coverage] = lambda: KNOWN,
        held_back: Callable[[], Sequence[HeldBack]] = tuple,
        accesses_since: Callable[[float], Accesses] = lambda since_s: Accesses(),
        callers: Callers | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to warm.

        Args:
            sources: Gives the rooms to warm, as they are when a warm-up starts.
            demand: Gives the heat; called in the warm-up's thread.
            receipt_path: Where the last receipt is kept; None keeps it in memory only.
            finished: Called with each receipt, in the warm-up's thread.
            coverage: Gives how many accesses a share of the demand serves, for the prediction;
                called after ``demand``, in the warm-up's thread.
            held_back: Gives the newest accesses, on which the prediction is tried; likewise.
            accesses_since: Gives the accesses later than a Unix time, for `measure`.
            callers: The requests that a warm-up lets by; None knows of none.
            wall: Unix seconds, by the clock that gives events their times.
        """
        self._sources = sources
        self._demand = demand
        self._settings = settings
        self._receipt_path = receipt_path
        self._finished = finished
        self._coverage = coverage
        self._held_back = held_back
        self._accesses_since = accesses_since
        self._wall = wall
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._callers = Callers() if callers is None else callers
        self._done = threading.Event()
        self._loaded = threading.Event()
        self._turns = Turns(self._callers)
        self._first_left_s = _FIRST_S
        self._thread: threading.Thread | None = None
        self._control = WarmControl()
        self._state = "none"
        self._mark: StageMark | None = None
        self._receipt: Receipt | None = None
        self._error = ""
        self._unmeasured: _Unmeasured | None = None

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last finished warm-up of this process."""
        with self._lock:
            return self._receipt

    @property
    def loaded_once(self) -> bool:
        """Whether a warm-up of this process has loaded all that it will, or has failed.

        Its receipt follows: what that predicts is worked out last, and no search waits for it.
        """
        return self._loaded.is_set()

    def start(
        self,
        *,
        budget_bytes: int | None,
        deadline_s: float | None,
        everything: bool = False,
    ) -> None:
        """Start a warm-up in the background.

        Args:
            budget_bytes: Bytes that may be loaded; None takes the setting's share of all, or no
                limit where ``everything`` is asked for.
            deadline_s: Seconds after which nothing more is loaded; None means no limit.

        Raises:
            WarmupRunning: one runs already.
            UnavailableError: the server is closing.
        """
        with self._lock:
            if self._stop.is_set():
                raise UnavailableError("the server is closing; no warm-up starts any more")
            if self._state == "running":
                raise WarmupRunning("a warm-up runs already", where="/v1/warmup")
            control = WarmControl()
            thread = threading.Thread(
                target=self._run,
                args=(control, budget_bytes, deadline_s, everything),
                name="warm-up",
                daemon=True,
            )
            self._done.clear()
            try:
                thread.start()
            except RuntimeError as error:  # the system gives us no thread
                self._done.set()
                raise UnavailableError(f"no warm-up can start: {error}") from error
            # The thread waits for the lock before it says how it ended.
            self._thread = thread
            self._state = "running"
            self._control = control
            self._mark = None
            self._error = ""
            self._unmeasured = None

    def steer(self, action: str) -> None:
        """Pause, resume, re-prioritise or cancel the running warm-up, from its next load on.

        Args:
            action: One of `STEERING`. "reprioritise" plans what is left by the heat as it is now.

        Raises:
            WarmupIdle: none runs.
        """
        with self._lock:
            if self._state != "running":
                raise WarmupIdle(f"no warm-up runs: nothing to {action}", where="/v1/warmup")
            control = self._control
        log.info("service.warmup_steered", action=action)
        if action == "reprioritise":
            control.reprioritise(self._demand)
        else:
            {"pause": control.pause, "resume": control.resume, "cancel": control.cancel}[action]()

    def wait(self, timeout_s: float) -> None:
        """Wait for the running warm-up.

        Raises:
            DeadlinePassed: it still runs after ``timeout_s``.
        """
        if not self._done.wait(timeout_s):
            raise DeadlinePassed(f"the warm-up still runs after {timeout_s:g} s")

    def wait_loaded(self, timeout_s: float) -> None:
        """Wait for what `loaded_once` tells.

        Raises:
            DeadlinePassed: it is not true after ``timeout_s``.
        """
        if not self._loaded.wait(timeout_s):
            raise DeadlinePassed(f"the warm-up still loads after {timeout_s:g} s")

    def status(self) -> WarmupStatus:
        """Return what a client is told."""
        with self._lock:
            mark = self._mark
            progress: dict[str, Any] | None = None
            if self._state == "running":
                progress = {
                    "stage": mark.stage if mark else -1,
                    "seconds": mark.seconds if mark else 0.0,
                    "bytes_read": mark.bytes_read if mark else 0,
                    "predicted_hit_ratio": mark.predicted_hit_ratio if mark else 0.0,
                    "pages": mark.pages if mark else 0,
                    "expected_recall": mark.expected_recall if mark else None,
                    "paused": self._control.state == PAUSED,
                }
            return WarmupStatus(
                state=self._state,
                progress=progress,
                receipt=self._receipt.to_dict() if self._receipt else None,
                error=self._error,
            )

    def measure(self, *, accesses_min: int = _MEASURED_ACCESSES) -> None:
        """Add to the receipt what the warm-up served, once enough accesses have followed it.

        What was warm cannot be told any more after a merge: the receipt is then left unmeasured.
        Asks all sources what lies where, so it is for a thread that nobody waits for. As long as
        nothing of what is asked for is in the index, it looks at every second, fourth, eighth call
        and so on, down to one in 64: the answer seldom changes, and each look reads the whole plan.

        Args:
            accesses_min: So many are enough; at least 1.
        """
        unmeasured = self._unmeasured
        if unmeasured is None:
            return
        if unmeasured.skips:
            unmeasured.skips -= 1
            return
        accesses = self._accesses_since(unmeasured.since_s)
        if accesses.total < accesses_min:
            return
        turns = Turns(self._callers)
        batches = [
            batch
            for one in self._sources()
            for batch in units_offered(one, accesses.by_key, turns.let_by)
        ]
        there = unmeasured.loaded.still_offered(batches)
        ratio = unmeasured.loaded.served(batches, accesses) if there else None
        if there and ratio is None:
            unmeasured.found_nothing()  # others were asked for until now: nothing that we have
            return
        with self._lock:
            if self._unmeasured is not unmeasured or self._receipt is None:
                return
            self._unmeasured = None
            receipt = self._receipt
            if ratio is not None:
                receipt = receipt.with_measured(ratio, accesses=accesses.total)
            self._receipt = receipt
        if ratio is None:
            log.info("service.warmup_unmeasured", reason="the index was laid out anew since")
            return
        log.info(
            "service.warmup_measured",
            predicted_hit_ratio=round(receipt.predicted_hit_ratio, 4),
            measured_hit_ratio=round(ratio, 4),
            accesses=accesses.total,
        )
        self._finished(receipt)
        self._keep(receipt)

    def stop(self, timeout_s: float) -> bool:
        """Let the running warm-up end at its next load; tells whether it did in time."""
        with self._lock:
            self._control.cancel()
            self._stop.set()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(
        self,
        control: WarmControl,
        budget_bytes: int | None,
        deadline_s: float | None,
        everything: bool,
    ) -> None:
        try:
            loaded = WarmSet()
            receipt = self._warm(control, budget_bytes, deadline_s, everything, loaded)
            unmeasured = _Unmeasured(self._wall(), loaded)
            with self._lock:
                self._state = "done"
                self._receipt = receipt
                self._unmeasured = unmeasured
            self._finished(receipt)
            self.rest()
            self._keep(receipt)
        except Exception as fault:
            # The server goes on with what is there; readiness and the status say that it failed.
            error = str(fault) if isinstance(fault, StokerError) else type(fault).__name__
            log.exception("service.warmup_failed", reason=error)
            with self._lock:
                self._state = "failed"
                self._error = error
            self._loaded.set()
        finally:
            self._done.set()

    def _warm(
        self,
        control: WarmControl,
        budget_bytes: int | None,
        deadline_s: float | None,
        everything: bool,
        loaded: WarmSet,
    ) -> Receipt:
        began = time.monotonic()
        patience_s = PATIENCE_S
        if deadline_s is not None:
            patience_s = min(patience_s, _PATIENCE_RATIO * deadline_s)
        self._turns = Turns(self._callers, patience_s=patience_s)
        demand = self._demand()
        self.rest()
        coverage = self._coverage() if demand else KNOWN
        self.rest()
        held_back = self._held_back() if demand else ()
        self.rest()
        sources = self._sources()
        if budget_bytes is None and not everything:
            total = sum(source.total_bytes() for source in sources)
            budget_bytes = self._settings.warm_budget_bytes(total)
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (time.monotonic() - began))
        return run_warm(
            sources,
            demand,
            budget_bytes=budget_bytes,
            deadline_s=deadline_s,
            round_bytes=self._settings.plan_round_bytes,
            coverage=coverage,
            held_back=held_back,
            progress=self._note,
            all_loaded=self._loaded.set,
            rest=self.rest,
            control=control,
            loaded=loaded,
        )

    def rest(self) -> None:
        """Let requests by, in the warm-up's thread, between two small steps of its work.

        Of a first warm-up that still loads only the server's first answer, because all others wait
        for what it loads; and nobody at a stop, which waits for it too.
        """
        if self._stop.is_set():
            return
        if self._loaded.is_set():
            self._turns.let_by()
        elif not self._callers.gaps:
            self._let_first_by()

    def _let_first_by(self) -> None:
        """Leave processor and disk to who asks a server that has not answered anybody yet.

        Else that answer, which reads what it needs itself, would come later than without a warm-up.
        """
        clock = self._callers.clock
        began = clock()
        if self._callers.count:
            self._callers.wait_gap(0, wait_s_max=self._first_left_s)
            self._first_left_s -= clock() - began

    def _note(self, mark: StageMark) -> None:
        with self._lock:
            self._mark = mark

    def _keep(self, receipt: Receipt) -> None:
        if self._receipt_path is None:
            return
        try:
            replace_file(self._receipt_path, receipt.to_json().encode(), b"\n")
        except OSError as error:
            log.warning(
                "service.receipt_unwritten", file=str(self._receipt_path), reason=str(error)
            )


def read_receipt(path: Path) -> Receipt | None:
    """Read the receipt that the last server kept; None where there is none that can be read."""
    try:
        return Receipt.from_json(path.read_bytes())
    except (OSError, InputError):
        return None
