"""Settings of the prefetch room: heat, forecasts, plans."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from stoker.errors import ConfigError

DECAY_KINDS = ("exponential", "hyperbolic")
TOPICS_OFF = "off"


def _setting(default: Any, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class PrefetchSettings:
    """Everything in this room that a user may change; each default states its reason."""

    heat_weight_frequency: float = _setting(
        0.5, "Weight of decayed frequency in the heat score; the strongest single forecast. Ratio."
    )
    heat_weight_recency: float = _setting(
        0.3, "Weight of recency exp(-dt/tau) in the heat score; follows bursts. Ratio."
    )
    heat_weight_pagerank: float = _setting(
        0.2, "Weight of graph PageRank in the heat score; lifts what hot chunks lead to. Ratio."
    )
    heat_tau_s: float = _setting(
        3600.0, "Time constant of recency: an hour covers one visit and its return. Seconds."
    )
    heat_jump_s_max: float = _setting(
        3600.0,
        "An event further than this ahead of all before it is counted at the newest believed time "
        "until heat_jump_events of them come in a row: one broken clock must not age everything. "
        "Seconds.",
    )
    heat_jump_events: int = _setting(
        8,
        "Events in a row that agree and are odd until a silence, e.g. a night, or another clock is "
        "believed. Count.",
    )
    heat_silence_s_max: float = _setting(
        604800.0,
        "A jump of more than this is no silence but another clock: nothing ages by it, and its "
        "events count as now. Not below service.event_retention_s: partitions of a log that is "
        "caught up with may be so far apart. Seconds.",
    )
    heat_decay: str = _setting(
        "hyperbolic",
        "Decay of the frequency: hyperbolic keeps a long tail, which a daily rhythm needs; "
        "exponential forgets faster. (The logarithmic law has no running count.)",
    )
    heat_half_life_s: float = _setting(
        86400.0,
        "Age at which an access counts half. A day: of one, six and 24 hours it made the best "
        "warm sets on a real RAG trace (bench_prefetch_heat). Seconds.",
    )
    heat_fast_threshold: float = _setting(
        0.85, "Scores above it are loaded now into the fastest tier. Score in [0, 1]."
    )
    heat_queue_threshold: float = _setting(
        0.6, "Scores from here up to the fast threshold enter the prefetch queue. Score in [0, 1]."
    )
    heat_keys_max: int = _setting(
        1_000_000,
        "Content keys tracked; beyond it the coldest leave for the tail, where an estimate of them "
        "stays. Count.",
    )
    heat_tail_buckets: int = _setting(
        1 << 20,
        "Counters per hash of the tail's sketch, 32 bytes each, taken once keys had to leave: as "
        "many as keys tracked, so that a key asked for once is rarely mistaken for more. Count.",
    )
    heat_result_weight: float = _setting(
        2.0, "What a used result counts, when a retrieved one counts 1: use is stronger evidence."
    )
    graph_edges_per_key_max: int = _setting(
        16, "Out-edges kept per key; the weakest goes first. Bounds memory and tick time. Count."
    )
    graph_edge_half_life_s: float = _setting(
        86400.0, "Age at which a co-retrieval or transition counts half: a day. Seconds."
    )
    graph_window_chunks: int = _setting(
        2, "Each chunk of an event is linked with so many that follow it; more costs time. Count."
    )
    graph_transition_chunks: int = _setting(
        3, "First chunks of a session's last turn that are linked to as many of the next. Count."
    )
    graph_sessions_max: int = _setting(
        20_000, "Sessions whose last turn is remembered; the oldest go first. Count."
    )
    graph_session_gap_s: float = _setting(
        1800.0, "Silence after which a session's next event is no transition. Seconds."
    )
    pagerank_damping: float = _setting(
        0.85, "Probability of following an edge rather than restarting; the usual value. Ratio."
    )
    pagerank_tolerance: float = _setting(
        1e-6, "L1 change below which PageRank has converged. Probability mass."
    )
    pagerank_exact_keys_max: int = _setting(
        20_000,
        "Up to so many keys PageRank is solved anew each tick; beyond, it is tracked. Count.",
    )
    pagerank_tick_edges_max: int = _setting(
        1_000_000, "Edges that a tick may walk to bring PageRank up to date: about 20 ms. Count."
    )
    plan_round_bytes: int = _setting(
        16 << 20,
        "A warm-up's load calls are cut at this size, so that a deadline hits evenly. Bytes.",
    )
    placement_swap_gain: float = _setting(
        1.1,
        "A key is fetched ahead only if expected so many times more than the one that makes "
        "room; higher reads less and hits a little less. Ratio, >= 1.",
    )
    placement_area_ratio: float = _setting(
        0.5, "Share of the room that keys fetched ahead and not asked for yet may take. Ratio."
    )
    placement_mini_capacity: int = _setting(
        65_536, "Up to this capacity the arena's caches see every key; beyond, a sample. Count."
    )
    placement_switch_cost: float = _setting(
        0.08,
        "How much of what a resident key brings in one stay a change of policy must win "
        "back per key that it moves; lower changes more often. Ratio.",
    )
    placement_refetch_per_miss: int = _setting(
        16,
        "Keys fetched ahead per miss after a change of policy, until content follows: what is left "
        "of the old policy's content costs hits, and 16 pages are a small read. Count.",
    )
    placement_qlearning: bool = _setting(
        False,
        "Whether Q-learning competes in the arena too; off, because it needs torch and costs more "
        "than all other candidates together.",
    )
    topics_entities: str = _setting(
        TOPICS_OFF,
        "What finds entities in queries: bundled (a small English pipeline), a folder or an "
        "installed package of a spaCy pipeline, or off. Off, because on the data measured it does "
        "not help plans; needs the extra entities. A pipeline may run code: name only one you "
        "trust.",
    )
    topics_terms: bool = _setting(
        False,
        "Whether terms of queries are nodes too; off, because on the data measured it does not "
        "help plans. Needs scikit-learn, extra models.",
    )
    topics_share: float = _setting(
        0.1, "Share of demand that hot entities and terms take over, where on. Ratio."
    )
    topics_half_life_s: float = _setting(
        21600.0, "Age at which a node's mention counts half: topics of a working day. Seconds."
    )
    topics_nodes_max: int = _setting(
        5_000,
        "Entities and terms kept; those not asked for longest go first. With 32 edges each 27 MiB, "
        "and 0.15 s of CPU to see what they lift. Count.",
    )
    topics_edges_per_node_max: int = _setting(
        32, "Chunks that a node leads to; those asked for longest ago go first. Count."
    )
    topics_text_length_max: int = _setting(
        2_000, "Characters of a query that are read: a bound on time. Count."
    )
    topics_ahead_max: int = _setting(
        0,
        "Passages that a question leads to beside those that it found, and that are then fetched "
        "ahead, with service.placement act and topics on. 0, because on the data measured up to a "
        "tenth of them is asked for. Count.",
    )
    warm_budget_ratio: float = _setting(
        0.2, "Share of a source's bytes that a warm-up may load when no budget is given. Ratio."
    )
    warm_budget_bytes_min: int = _setting(
        1 << 20,
        "Bytes that it may load all the same, however small the index: a fifth of a few pages "
        "holds no stage whole, and this much takes a disk a few milliseconds. Bytes.",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first setting that cannot be."""
        for name in ("heat_weight_frequency", "heat_weight_recency", "heat_weight_pagerank"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        total = self.heat_weight_frequency + self.heat_weight_recency + self.heat_weight_pagerank
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise ConfigError(
                f"heat_weight_frequency + heat_weight_recency + heat_weight_pagerank must be 1, "
                f"got {total!r}"
            )
        for name in (
            "heat_tau_s",
            "heat_half_life_s",
            "heat_jump_s_max",
            "heat_silence_s_max",
            "graph_edge_half_life_s",
            "graph_session_gap_s",
            "pagerank_tolerance",
            "topics_half_life_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"{name} must be finite and > 0, got {value!r}")
        if self.heat_silence_s_max < self.heat_jump_s_max:
            raise ConfigError(
                f"heat_silence_s_max must be >= heat_jump_s_max ({self.heat_jump_s_max!r}), got "
                f"{self.heat_silence_s_max!r}"
            )
        if self.heat_decay not in DECAY_KINDS:
            raise ConfigError(f"heat_decay must be one of {DECAY_KINDS}, got {self.heat_decay!r}")
        if not 0.0 <= self.heat_queue_threshold <= self.heat_fast_threshold <= 1.0:
            raise ConfigError(
                "heat_queue_threshold must be <= heat_fast_threshold, both in [0, 1], got "
                f"{self.heat_queue_threshold!r} and {self.heat_fast_threshold!r}"
            )
        for name in (
            "heat_keys_max",
            "heat_tail_buckets",
            "graph_edges_per_key_max",
            "graph_window_chunks",
            "heat_jump_events",
            "graph_sessions_max",
            "pagerank_exact_keys_max",
            "pagerank_tick_edges_max",
            "plan_round_bytes",
            "placement_mini_capacity",
            "topics_nodes_max",
            "topics_edges_per_node_max",
            "topics_text_length_max",
        ):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        if not self.graph_transition_chunks >= 0:
            raise ConfigError(
                f"graph_transition_chunks must be >= 0, got {self.graph_transition_chunks!r}"
            )
        if not self.heat_result_weight >= 0.0:
            raise ConfigError(f"heat_result_weight must be >= 0, got {self.heat_result_weight!r}")
        if not self.placement_swap_gain >= 1.0:
            raise ConfigError(f"placement_swap_gain must be >= 1, got {self.placement_swap_gain!r}")
        if not 0.0 <= self.placement_area_ratio <= 1.0:
            raise ConfigError(
                f"placement_area_ratio must be in [0, 1], got {self.placement_area_ratio!r}"
            )
        if not self.topics_entities.strip():
            raise ConfigError("topics_entities must be off, bundled, a folder or a package, got ''")
        if not 0.0 <= self.topics_share <= 1.0:
            raise ConfigError(f"topics_share must be in [0, 1], got {self.topics_share!r}")
        for name in ("placement_switch_cost", "placement_refetch_per_miss", "topics_ahead_max"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        if not 0.0 < self.pagerank_damping < 1.0:
            raise ConfigError(f"pagerank_damping must be in (0, 1), got {self.pagerank_damping!r}")
        if self.warm_budget_bytes_min < 0:
            raise ConfigError(
                f"warm_budget_bytes_min must be >= 0, got {self.warm_budget_bytes_min!r}"
            )
        if not 0.0 < self.warm_budget_ratio <= 1.0:
            raise ConfigError(
                f"warm_budget_ratio must be in (0, 1], got {self.warm_budget_ratio!r}"
            )

    def warm_budget_bytes(self, total_bytes: int) -> int:
        """Bytes that a warm-up of ``total_bytes`` may load when no budget is given."""
        share = int(total_bytes * self.warm_budget_ratio)
        return max(share, min(total_bytes, self.warm_budget_bytes_min))
