"""What the HTTP API answers, as typed records: written by the routes, read by the SDK.

Only the standard library is imported here, so that a client stays light. Reading is lenient
towards newer servers: unknown members are left out, never an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self


class Answer:
    """Base of the records: to and from JSON members by field name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON members."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read JSON members, leaving out those that this version does not know.

        Raises:
            TypeError, KeyError, ValueError: it is no object, or lacks what this version needs.
        """
        return cls(**cls._known(data))

    @classmethod
    def _known(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(data, Mapping):
            raise TypeError(f"expected an object, found {type(data).__name__}")
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return {name: value for name, value in data.items() if name in known}


@dataclass(frozen=True)
class SearchResult(Answer):
    """One result.

    Attributes:
        score: In the index's metric: inner product or cosine (higher is nearer), or squared L2
            distance (lower is nearer).
        text: None where it was not asked for, or none is kept.
    """

    id: str
    score: float
    text: str | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Completeness(Answer):
    """How complete a search was; a search is never silently narrower.

    Attributes:
        work_ratio: Share of the search's work that was done, 0 to 1: below 1 where pages were
            damaged, or not resident and could not be read in time.
        recall_bound: Lower bound on recall@k, as calibrated when the index was sealed.
        expected_recall: The engine's own estimate of recall@k for this very query.
        exact_share: Share of the results whose score comes from the full vector.
        deadline_hit: Whether the deadline cut the work short.
        scanned: Whether a segment compared every row that could be in the answer, instead of
            walking its graph, as small segments do that no walk serves and filters that leave few
            rows. False of a server that does not say.
    """

    work_ratio: float
    recall_bound: float
    expected_recall: float
    exact_share: float
    deadline_hit: bool
    scanned: bool = False


@dataclass(frozen=True)
class ReuseDecision(Answer):
    """What semantic lookup reuse did.

    Attributes:
        decision: "reused", "searched" (a guard refused, or nothing fitted) or "off".
        reason: Which guard spoke, or why it is off.
        group_key: ``win:<start>|grp:<group>|sig:<hash>``: searches by text of the last seconds that
            ask for the same have one group, ``-`` stands for none. Empty unless the server is set
            to say it (``kvcache.group_keys_enabled``), and for a search by vector.
    """

    decision: str
    reason: str = ""
    group_key: str = ""


@dataclass(frozen=True)
class Timings(Answer):
    """Where the time of a search went, ms. ``total_ms`` includes waiting for a thread."""

    total_ms: float
    queue_ms: float = 0.0
    embed_ms: float = 0.0
    reuse_ms: float = 0.0
    search_ms: float = 0.0
    documents_ms: float = 0.0


@dataclass(frozen=True)
class SearchAnswer(Answer):
    """The answer of POST /v1/search.

    Attributes:
        results: Best first.
        completeness: How complete the search was; never silently narrower.
        reuse: What semantic lookup reuse did.
        pages_read: Pages that this search read from storage; 0 when all was resident.
        bytes_read: Bytes of those pages.
        timings: Where the time went.
        generation: The generation of the index that answered.
        tenant: Whose documents were searched.
        request_id: The request, as in the server's log.
        prompt_order: The results' ids in the order that shares the longest prompt prefix with
            earlier answers; empty unless the server is set to say it.
    """

    results: tuple[SearchResult, ...]
    completeness: Completeness
    reuse: ReuseDecision
    pages_read: int
    bytes_read: int
    timings: Timings
    generation: int
    tenant: str
    request_id: str
    prompt_order: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the JSON members."""
        members = cls._known(data)
        members["prompt_order"] = tuple(data.get("prompt_order", ()))
        members["results"] = tuple(map(SearchResult.from_dict, data["results"]))
        members["completeness"] = Completeness.from_dict(data["completeness"])
        members["reuse"] = ReuseDecision.from_dict(data["reuse"])
        members["timings"] = Timings.from_dict(data["timings"])
        return cls(**members)


@dataclass(frozen=True)
class WriteAnswer(Answer):
    """The answer of a document write; what it counts is on disk.

    Attributes:
        count: Documents that were written or deleted.
        generation: The generation that they were written to.
        request_id: The request, as in the server's log.
    """

    count: int
    generation: int
    tenant: str
    request_id: str


@dataclass(frozen=True)
class EventsAnswer(Answer):
    """The answer of POST /v1/events; what it counts is durable in the event log."""

    accepted: int
    request_id: str


WarmupAction = Literal["pause", "resume", "reprioritise", "cancel"]
"""What can be asked of a warm-up that runs."""


@dataclass(frozen=True)
class WarmupStatus(Answer):
    """The answer of GET, POST and PATCH /v1/warmup.

    Attributes:
        state: "none", "running", "done" or "failed".
        progress: While it runs: "paused", and of the last stage that ended "stage", "seconds",
            "bytes_read", "pages", "predicted_hit_ratio" (not tried yet on the newest accesses,
            as the receipt's is) and "expected_recall" (of answers from memory alone; None where
            nobody has measured it).
        receipt: Of the last finished warm-up, as `stoker.Receipt.to_json` writes it; else None.
        error: Why the last one failed; empty where it did not.
        request_id: The request, as in the server's log.
    """

    state: str
    progress: Mapping[str, Any] | None = None
    receipt: Mapping[str, Any] | None = None
    error: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class Readiness(Answer):
    """The answer of GET /readyz.

    Attributes:
        ready: Whether traffic should come.
        waiting_for: What is missing: "warm-up", "embedding-model"; why no more traffic should come:
            "draining", "index-replaced"; empty when ready.
        parts: Optional parts, each "on" or why it is off.
    """

    ready: bool
    waiting_for: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the JSON members."""
        if not isinstance(data["ready"], bool):  # another server's "false" would be true
            raise TypeError(f"ready: expected true or false, found {data['ready']!r:.40}")
        return cls(
            ready=data["ready"],
            waiting_for=tuple(data.get("waiting_for", ())),
            parts=dict(data.get("parts", {})),
        )
