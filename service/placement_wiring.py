"""The arena and the access entropy on live searches, beside the requests and never in their way.

A search offers what it retrieved to a bounded queue. A thread takes it from there between searches:
once none has begun or ended for a few milliseconds, and one request at a time, so that a search
that comes then waits for the interpreter no longer than for that. It keeps within a share of one
core. What has waited for seconds, because that share was spent or searches left no gap, is skipped
and counted, so the cost has a bound whatever the traffic; without a gap one request in 100 ms is
taken all the same. While requests are skipped all candidates see the same rest.

With ``act``, what the acting policy wants ahead is loaded once a second, at the priority under
demand, into free room of the page pool and the KV store, and only while the device has time for
it. Rooms offer no eviction, so nothing that is resident ever leaves for it. So is what a question
leads to beside what it found, where `prefetch.topics_ahead_max` says how many.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog

from stoker.errors import StokerError
from stoker.prefetch.cross_tier import CrossTierCondition, CrossTierState
from stoker.prefetch.entropy_streams import EntropyStreams
from stoker.prefetch.placement import StokerPolicy
from stoker.prefetch.protocols import (
    KIND_KV_BLOCK,
    KIND_REFINE,
    ContentKey,
    WarmSource,
)
from stoker.prefetch.question_area import QuestionArea
from stoker.prefetch.regime import Regime, regime_for
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.collection_index import CollectionIndex
from stoker.service.configuration import StokerConfig
from stoker.service.whole_file import replace_file

log = structlog.get_logger(__name__)

LEARNT_NAME = "placement.safetensors"
_ROOM_KEYS_MIN = 256  # so that a small or empty index has something to compare
_FORECAST_KEYS_MAX = 250_000
_TICK_S = 0.1
_GAP_TICK_S = 0.02  # while requests wait for a gap
# As long as a search that follows on an answer may take to come: after it, there is a gap.
_QUIET_S = 0.003
_WAIT_S_MAX = 5.0
# Between two requests, so that a search never waits for the interpreter longer than for one.
_PAUSE_S = 0.0002
_ACT_S = 1.0
_WINDOW_S = 60.0
_CREDIT_S_MAX = 0.5  # CPU seconds that quiet times may save up for a burst
_QUEUE_MAX = 4_096
_AHEAD_KEYS_MAX = 256
_AHEAD_BYTES_MAX = 4 << 20
_LOAD_DEADLINE_S = 0.25
# What belongs to single passages and is read when they are found. Links and codes are for every
# search, and full vectors are read so rarely that fetching them ahead would only use bandwidth.
_OWN_KINDS = frozenset({KIND_REFINE, KIND_KV_BLOCK})
NVME_IDLE_OVER = 0.65


Foreseen = Callable[[str, str, float], Mapping[ContentKey, float]]
"""(query, tenant, Unix seconds) -> accesses that the query's topics lead one to expect."""


class _Request(NamedTuple):
    tenant: str
    route: str | None
    session: str | None
    names: Sequence[str]
    query: str | None
    time_s: float
    offered_s: float


@dataclass(frozen=True)
class PlacementReport:
    """What has been seen and done so far; counts only grow.

    Attributes:
        acting: The policy that acts; "" before the first access.
        switches: Changes of it.
        accesses: Accesses that the candidates saw.
        skipped: Requests that they did not see: the queue or the share of CPU was full, or
            searches left no gap for seconds.
        cpu_s: CPU seconds of the thread.
        hits: Of the accesses, those that a cache of this room would have had.
        prefetch: What became of keys wanted ahead: useful, late, unused, polluting.
        loaded_bytes: Bytes loaded ahead, with ``act``.
        regimes: How many streams (tenants, and routes of them) have each regime.
        entropy_bits: Least, median and most entropy of a stream; empty before the first request.
        drifts: Times that a stream's entropy fell enough for its alarm.
        cross_tier: The condition of cross-tier prefetch, with what it was measured from.
    """

    acting: str
    switches: int
    accesses: int
    skipped: int
    cpu_s: float
    hits: int
    prefetch: dict[str, int]
    loaded_bytes: int
    regimes: dict[str, int]
    entropy_bits: dict[str, float]
    drifts: int
    cross_tier: CrossTierState


@dataclass
class _Totals:
    accesses: int = 0
    skipped: int = 0
    hits: int = 0
    cpu_s: float = 0.0
    loaded_bytes: int = 0
    drifts: int = 0
    ahead: dict[ContentKey, float] = field(default_factory=dict)


class LivePlacement:
    """Runs candidates and entropy on live accesses. `offer` and `report` are for any thread.

    Invariants: the queue is bounded; the thread spends at most ``cpu_ratio_max`` of one core, and
    once as much again as `_CREDIT_S_MAX` says; nothing that it does can fail a search.
    """

    def __init__(
        self,
        settings: PrefetchSettings,
        *,
        room_keys: int,
        act: bool,
        cpu_ratio_max: float,
        sources: Callable[[], Sequence[WarmSource]] = tuple,
        demand_wait_us: Callable[[], int] = lambda: 0,
        searched_s: Callable[[], float] = lambda: -math.inf,
        gpu_counts: Callable[[], tuple[int, int] | None] = lambda: None,
        foreseen: Foreseen = lambda query, tenant, now_s: {},
        monotonic: Callable[[], float] = time.monotonic,
        learnt_path: Path | None = None,
        cpu_time: Callable[[], float] = time.thread_time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start empty.

        Args:
            settings: Those of placement.
            room_keys: Passages that the policies may hold.
            act: Whether the session forecast competes too, and what the acting policy wants ahead
                is loaded.
            cpu_ratio_max: Share of one core that the thread may use.
            sources: The rooms to load from.
            demand_wait_us: Gives how long searches have waited for reads so far.
            searched_s: Gives when a search last began, on the clock ``monotonic``.
            gpu_counts: Gives (hits, loads) of the GPU tier; None where there is none.
            foreseen: Gives what a question leads to, asked for with ``act`` where the settings
                have a ``topics_ahead_max``.
            learnt_path: Where what Q-learning has learnt is kept; None keeps it nowhere.

        Raises:
            UnavailableError: Q-learning is to compete, and torch is not installed.
        """
        # The session forecast takes as much CPU as all other candidates together, and only
        # it wants anything ahead: it competes where that is loaded.
        self._policy = StokerPolicy(
            room_keys, settings, forecast_capacity_max=_FORECAST_KEYS_MAX if act else 0
        )
        self._entropy = EntropyStreams()
        self._act = act
        self._cpu_ratio_max = cpu_ratio_max
        self._sources = sources
        self._demand_wait_us = demand_wait_us
        self._searched_s = searched_s
        self._gpu_counts = gpu_counts
        self._foreseen = foreseen
        self._area: QuestionArea | None = None
        if act and settings.topics_ahead_max:
            self._area = QuestionArea(_AHEAD_KEYS_MAX, per_question_max=settings.topics_ahead_max)
        self._monotonic = monotonic
        self._cpu_time = cpu_time
        self._pause = pause
        self._learnt_path = learnt_path
        self._queue: deque[_Request] = deque()
        self._lock = threading.Lock()  # of policy, entropy and totals
        self._totals = _Totals()
        self._condition = CrossTierCondition()
        self._ticked_s = monotonic()
        self._acted_s = self._windowed_s = self._renewed_s = self._taken_s = self._ticked_s
        self._offered_s = self._renew_next_s = -math.inf
        self._credit_s = _CREDIT_S_MAX
        self._refused = 0  # by a full queue; written by searches, one wrong count does no harm
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._restore()

    def offer(
        self,
        tenant: str,
        route: str | None,
        session: str | None,
        names: Sequence[str],
        time_s: float,
        *,
        query: str | None = None,
    ) -> None:
        """Take what a search retrieved, best first, and its text if it had one; never waits."""
        if not names:
            return
        if len(self._queue) >= _QUEUE_MAX:
            self._refused += 1
            return
        self._offered_s = self._monotonic()
        text = None if self._area is None else query
        self._queue.append(_Request(tenant, route, session, names, text, time_s, self._offered_s))

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="placement", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread and save what was learnt; tells whether that was done in time."""
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._save()
        return True

    def _run(self) -> None:
        while not self._stop.wait(_GAP_TICK_S if self._queue else _TICK_S):
            try:
                self.tick()
            except Exception:
                # Searches do not depend on this; a fault of ours ends it for this server, loudly.
                log.exception("service.placement_failed")
                return

    def tick(self) -> None:
        """Take in what was offered, as far as searches and the share of CPU leave room for it."""
        now = self._monotonic()
        began = self._cpu_time()
        elapsed, self._ticked_s = max(0.0, now - self._ticked_s), now
        self._credit_s = min(_CREDIT_S_MAX, self._credit_s + elapsed * self._cpu_ratio_max)
        left = self._credit_s
        state = self._condition.observe(
            now, demand_wait_us=self._demand_wait_us(), gpu=self._gpu_counts()
        )
        skipped = 0
        while self._queue and now - self._queue[0].offered_s > _WAIT_S_MAX:
            self._queue.popleft()
            skipped += 1
        # First what the last ticks took in: else requests could use up the share for ever.
        due = now >= self._renew_next_s and (self._gap() or now - self._renewed_s >= _ACT_S)
        if left > 0.0 and due:
            self._renew(now)
        while self._queue and left - (self._cpu_time() - began) > 0.0:
            if not self._gap() and now - self._taken_s < _TICK_S:
                break
            self._taken_s = now
            with self._lock:
                self._take(self._queue.popleft())
            self._pause(_PAUSE_S)
        gap = self._gap() and left - (self._cpu_time() - began) > 0.0
        if now - self._windowed_s >= _WINDOW_S:
            self._windowed_s = now
            self._close_window()
            self._save()
        if self._act and gap and now - self._acted_s >= _ACT_S:
            self._acted_s = now
            if state.nvme_idle_ratio > NVME_IDLE_OVER:
                self._load_ahead()
        spent = self._cpu_time() - began
        self._credit_s -= spent
        with self._lock:
            self._totals.cpu_s += spent
            self._totals.skipped += skipped

    def _renew(self, now: float) -> None:
        """Renew the content; where that takes long, then less often: for half the share of CPU."""
        began = self._cpu_time()
        with self._lock:
            self._want([move.key for move in self._policy.renew() if move.ahead])
        self._renewed_s = now
        self._renew_next_s = now + 2.0 * (self._cpu_time() - began) / self._cpu_ratio_max

    def _gap(self) -> bool:
        """Whether no search has begun or ended just now."""
        return self._monotonic() - max(self._searched_s(), self._offered_s) >= _QUIET_S

    def _take(self, request: _Request) -> None:
        policy, totals, tenant = self._policy, self._totals, request.tenant
        session = None if request.session is None else (tenant, request.session)
        for name in request.names:
            decision = policy.access((tenant, name), session=session, time_s=request.time_s)
            totals.accesses += 1
            totals.hits += decision.hit
            if decision.ahead:
                self._want([key for key, _ in decision.ahead])
        # The content is renewed once for many requests: that takes time with all that is known.
        policy.close_request(renew=False)
        self._entropy.count(tenant, request.route, request.names)
        if self._area is not None:
            self._foresee(self._area, request)

    def _foresee(self, area: QuestionArea, request: _Request) -> None:
        """End what was brought in for earlier questions, and want what this one leads to."""
        retrieved = {(request.tenant, name) for name in request.names}
        for key in retrieved:
            area.access(key, request.time_s)
        if request.query:
            expected = self._foreseen(request.query, request.tenant, request.time_s)
            self._want(area.bring(expected, request.time_s, retrieved=retrieved, kept=self._policy))

    def _want(self, keys: Sequence[Hashable]) -> None:
        """Note what the acting policy wants ahead; the newest count."""
        if not self._act:
            return
        ahead = self._totals.ahead
        for key in map(_content_key, keys):
            ahead.pop(key, None)
            ahead[key] = 1.0
        while len(ahead) > _AHEAD_KEYS_MAX:
            del ahead[next(iter(ahead))]

    def _close_window(self) -> None:
        with self._lock:
            drifted = self._entropy.close_window()
            self._totals.drifts += len(drifted)
        if drifted:
            log.info(
                "service.hot_spot_formed", streams=len(drifted), factor_max=max(drifted.values())
            )

    def _load_ahead(self) -> None:
        """Load what the wanted passages alone need, into free room, within a bound of bytes."""
        with self._lock:
            wanted, self._totals.ahead = self._totals.ahead, {}
        if not wanted:
            return
        left = _AHEAD_BYTES_MAX
        loaded = 0
        try:
            for source in self._sources():
                for batch in source.unit_batches(wanted):
                    # Every page of an index has a little of each key's walks; the key's own have
                    # more than the least.
                    least = float(batch.benefit.min()) if len(batch.benefit) else 0.0
                    own = batch.units[: int(np.count_nonzero(batch.benefit > least))]
                    own = own[: left // batch.unit_bytes]
                    if batch.kind not in _OWN_KINDS or not len(own):
                        continue
                    outcome = source.load_units(
                        batch.kind, own, sticky=False, deadline_s=_LOAD_DEADLINE_S
                    )
                    loaded += outcome.bytes_read
                    left -= outcome.bytes_read
        except StokerError as error:
            log.warning("service.load_ahead_failed", reason=str(error))
        with self._lock:
            self._totals.loaded_bytes += loaded

    def explain(self, tenant: str, name: str) -> dict[str, Any]:
        """Return why a passage is kept or not.

        Returns:
            ``acting``, the policy that decides; ``forecast``, the terms of its forecast (accesses
            by the next request), largest first, empty where none runs; ``qlearning``, state,
            values and prices, or None where that is off or knows nothing of it.
        """
        key = (tenant, name)
        with self._lock:
            learned = self._policy.learned
            return {
                "acting": self._policy.active,
                "forecast": self._policy.explain(key),
                "qlearning": None if learned is None else learned.explain(key),
            }

    def _restore(self) -> None:
        """Take over what Q-learning had learnt before the last stop; without it, begin anew."""
        learned = self._policy.learned
        if learned is None or self._learnt_path is None:
            return
        try:
            learned.learner.restore(self._learnt_path.read_bytes())
        except FileNotFoundError:
            return
        except (StokerError, OSError) as error:
            log.warning("service.placement_unrestored", reason=str(error))

    def _save(self) -> None:
        """Write what Q-learning has learnt: the old file or the new one, whatever happens."""
        learned = self._policy.learned
        if learned is None or self._learnt_path is None:
            return
        with self._lock:
            data = learned.learner.to_bytes()
        try:
            replace_file(self._learnt_path, data)
        except OSError as error:
            log.warning("service.placement_unsaved", reason=str(error))

    def regime(self, tenant: str, route: str | None = None) -> Regime | None:
        """Return how to cache a stream; None where nothing was retrieved yet."""
        with self._lock:
            return self._entropy.regime(tenant, route)

    def report(self) -> PlacementReport:
        """Return what has been seen and done so far."""
        with self._lock:
            policy, totals = self._policy, self._totals
            bits = sorted(self._entropy.all_bits().values())
            regimes = Counter(regime_for(value).name.lower() for value in bits)
            accounted = Counter(policy.prefetch.to_dict())
            if self._area is not None:
                accounted.update(self._area.account.to_dict())
            return PlacementReport(
                acting=policy.active if totals.accesses else "",
                switches=len(policy.switches),
                accesses=totals.accesses,
                skipped=totals.skipped + self._refused,
                cpu_s=totals.cpu_s,
                hits=totals.hits,
                prefetch={k: accounted[k] for k in ("useful", "late", "unused", "polluting")},
                loaded_bytes=totals.loaded_bytes,
                regimes={name.name.lower(): regimes[name.name.lower()] for name in Regime},
                entropy_bits=(
                    {"least": bits[0], "median": bits[len(bits) // 2], "most": bits[-1]}
                    if bits
                    else {}
                ),
                drifts=totals.drifts,
                cross_tier=self._condition.state,
            )

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of all that may act."""
        return (*dict.fromkeys((*self._policy.arena.names, "forecast")),)


def open_placement(
    config: StokerConfig, index: CollectionIndex, state_dir: Path, *, foreseen: Foreseen
) -> LivePlacement | None:
    """Return live placement over an index as the settings say; None where it is off.

    The policies get room for as many passages as a warm-up may load of the index.
    """
    service = config.service
    if service.placement == "off":
        return None
    room = max(_ROOM_KEYS_MIN, int(index.count * config.prefetch.warm_budget_ratio))
    return LivePlacement(
        config.prefetch,
        room_keys=room,
        act=service.placement == "act",
        cpu_ratio_max=service.placement_cpu_ratio_max,
        sources=index.warm_sources,
        demand_wait_us=index.demand_wait_us,
        searched_s=index.searched_s,
        foreseen=foreseen,
        learnt_path=state_dir / LEARNT_NAME,
    )


def _content_key(key: Hashable) -> ContentKey:
    assert isinstance(key, tuple)
    tenant, name = key
    return tenant, name
