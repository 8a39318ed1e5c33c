"""What terms and entities of queries are worth, on data that has texts.

    python tests/bench/bench_prefetch_topics.py

Three questions; the first two are asked before every turn, for the passages that it retrieves:

* Warm set: how many are among the first N by decayed demand, and by demand of which hot nodes take
  over a share, as plans do with `topics_entities` and `topics_terms` on.
* Foreseen: how many are among ten passages by demand, and among ten by what the nodes of the
  question lead to (`QueryTopics.expected`), filled up by demand.
* Ahead: the hit ratio of the live policy with the whole room, and with a share of the room given to
  what earlier questions lead to (`QuestionArea`), and how many of those are asked for.

Texts: MTRAG-UN (real times); the human conversations of MT-RAG with their judged passages, a turn
of each conversation in turn, and SciFact's claims in their order with the ten abstracts nearest by
TF-IDF (both 40 s apart: made); BANKING77's test questions in a shuffled order, an intent as the
passage. The last shows customers' language, where names are rare; its warm sets decide nothing,
because each intent comes 40 times: what came often comes less often later.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import structlog
from bench_prefetch_heat import DATA, TENANT

from stoker.errors import UnavailableError
from stoker.prefetch.entities import Entities
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.placement import StokerPolicy
from stoker.prefetch.question_area import QuestionArea
from stoker.prefetch.topics import Node, Terms, TopicHeat, blend

STEP_S = 40.0
SHARES = (0.1, 0.3)
ROOMS = (20, 50, 100)
FORESEEN = 10
AREAS = ((0.0, 1), (0.1, 4), (0.2, 8))  # share of the room, passages a question brings in
AREA_ROOMS = (100, 400)
KINDS = ("terms", "entities", "terms and entities")
MTRAG = DATA / "mtrag"


def event(number: int, time_s: float, question: str, chunks: Sequence[str]) -> Event:
    """Return one search."""
    key = f"e{number}"
    return Event(key, SEARCH_PERFORMED, time_s, TENANT, None, None, question, tuple(chunks), {})


def mtrag_un() -> list[Event]:
    """Return MTRAG-UN's turns in the order of their times."""
    turns = []
    for line in (MTRAG / "un" / "reference.jsonl").read_text(encoding="utf-8").splitlines():
        task = json.loads(line)
        contexts = task.get("contexts") or []
        if not contexts:
            continue
        question = [turn["text"] for turn in task["input"] if turn["speaker"] == "user"][-1]
        created = max(float(_seconds(turn)) for turn in task["input"])
        turns.append((created, question, [str(c["document_id"]) for c in contexts]))
    turns.sort(key=lambda turn: turn[0])
    return [event(i, *turn) for i, turn in enumerate(turns)]


def _seconds(turn: dict[str, Any]) -> float:
    value = (turn.get("metadata") or {}).get("created_at", 0)
    if isinstance(value, str):
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return float(value)


def mtrag_human() -> list[Event]:
    """Return MT-RAG's human turns with their judged passages: first turns first."""
    turns = []
    for domain in sorted(path for path in (MTRAG / "human").iterdir() if path.is_dir()):
        judged: dict[str, list[str]] = defaultdict(list)
        for row in (domain / "qrels_dev.tsv").read_text().splitlines()[1:]:
            turn, passage, _ = row.split("\t")
            judged[turn].append(f"{domain.name}:{passage}")
        questions = (domain / f"{domain.name}_lastturn.jsonl").read_text(encoding="utf-8")
        for line in questions.splitlines():
            row = json.loads(line)
            conversation, number = row["_id"].rsplit("<::>", 1)
            text = row["text"].removeprefix("|user|:").strip()
            turns.append((int(number), conversation, text, judged[row["_id"]]))
    turns.sort(key=lambda turn: turn[:2])
    return [event(i, i * STEP_S, text, chunks) for i, (_, _, text, chunks) in enumerate(turns)]


def scifact() -> list[Event]:
    """Return SciFact's claims with the ten abstracts that TF-IDF puts nearest."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    folder = DATA / "scifact"
    read = [
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("corpus.jsonl", "queries.jsonl")
    ]
    documents, claims = read
    vectors = TfidfVectorizer(stop_words="english", sublinear_tf=True)
    rows = vectors.fit_transform([f"{doc['title']} {doc['text']}" for doc in documents])
    near = (vectors.transform([claim["text"] for claim in claims]) @ rows.T).toarray()
    best = np.argsort(-near, axis=1, kind="stable")[:, :10]
    return [
        event(i, i * STEP_S, claim["text"], [documents[j]["_id"] for j in best[i].tolist()])
        for i, claim in enumerate(claims)
    ]


def banking() -> list[Event]:
    """Return BANKING77's test questions, shuffled, each with its intent."""
    with (DATA / "banking77" / "test.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    order = np.random.default_rng(7).permutation(len(rows)).tolist()
    return [
        event(i, i * STEP_S, rows[at]["text"], [rows[at]["category"]]) for i, at in enumerate(order)
    ]


TEXTS = {
    "MTRAG-UN": mtrag_un,
    "MT-RAG, human": mtrag_human,
    "SciFact, TF-IDF": scifact,
    "BANKING77": banking,
}


class Kind:
    """One kind of node over a stream: its heat, and what it says before each turn.

    Args:
        name: Of `KINDS`.
        node_half_life_s: Of its heat.
        entities: That have read some of the texts before; None for those that have read none.
    """

    def __init__(
        self,
        name: str,
        *,
        node_half_life_s: float = 6 * 3600.0,
        entities: Entities | None = None,
    ) -> None:
        self._terms = Terms() if "terms" in name else None
        self._entities = (entities or Entities()) if "entities" in name else None
        self._heat = TopicHeat(node_half_life_s=node_half_life_s)
        self.named = 0

    def nodes(self, question: str) -> list[Node]:
        """Return the nodes of a question that is not taken yet."""
        found = [] if self._entities is None else self._entities.of(question)
        return found + ([] if self._terms is None else self._terms.peek(question))

    def lift(self, now_s: float) -> dict[tuple[str, str], float]:
        """Return what hot nodes lead to."""
        return self._heat.lift(now_s)

    def expected(self, question: str, now_s: float) -> dict[tuple[str, str], float]:
        """Return what the question leads to."""
        return self._heat.expected(self.nodes(question), now_s)

    def take(self, turn: Event) -> None:
        """Take the turn into the heat."""
        nodes = self.nodes(turn.query or "")
        self.named += bool(nodes)
        if self._terms is not None:
            self._terms.of(turn.query or "")
        self._heat.observe(nodes, [(TENANT, chunk) for chunk in turn.chunk_ids], turn.time_s)


def best(scores: dict[tuple[str, str], float], count: int) -> list[tuple[str, str]]:
    """Return the keys of the highest scores, ties by key."""
    return heapq.nsmallest(count, scores, key=lambda key: (-scores[key], key))


def worth(turns: Sequence[Event], kind: Kind, *, every: int = 1) -> dict[str, Any]:
    """Return shares of retrieved passages: of warm sets by room and share, and foreseen.

    Args:
        turns: Searches with texts, in time order.
        kind: The nodes, empty.
        every: Ask before every so many turns; all are taken.
    """
    graph = HeatGraph()
    warm = {(share, room): 0 for share in (0.0, *SHARES) for room in ROOMS}
    by_demand = by_nodes = asked = known = 0
    kind.nodes("Loads what reads entities.")
    reading_s = 0.0
    for at, turn in enumerate(turns):
        keys = [(TENANT, chunk) for chunk in turn.chunk_ids]
        if at % every == 0:
            demand, lift = graph.demand(turn.time_s), kind.lift(turn.time_s)
            asked += len(keys)
            for share in (0.0, *SHARES):
                first = best(blend(demand, lift, share=share), max(ROOMS))
                for room in ROOMS:
                    warm[share, room] += len(set(first[:room]) & set(keys))
            began = time.thread_time()
            expected = kind.expected(turn.query or "", turn.time_s)
            reading_s += time.thread_time() - began
            known += len(keys) if expected else 0
            filled = best(demand, FORESEEN)
            chosen = list(dict.fromkeys([*best(expected, FORESEEN), *filled]))[:FORESEEN]
            by_demand += len(set(filled) & set(keys))
            by_nodes += len(set(chosen) & set(keys))
        graph.apply([turn])
        kind.take(turn)
    return {
        "turns": len(turns),
        "named": kind.named / max(1, len(turns)),
        "warm": {f"{s:.0%} of {r}": n / max(1, asked) for (s, r), n in warm.items()},
        "known": known / max(1, asked),
        "foreseen": (by_demand / max(1, asked), by_nodes / max(1, asked)),
        "expected_ms": 1e3 * reading_s / max(1, -(-len(turns) // every)),
    }


def ahead(
    turns: Sequence[Event], kind: Kind, *, room: int, share: float, per_question: int
) -> dict[str, float]:
    """Return the hit ratio with a share of the room for what questions lead to, and its use."""
    area_room = int(room * share)
    policy = StokerPolicy(room - area_room)
    area = QuestionArea(max(1, area_room), per_question_max=per_question)
    hits = accesses = 0
    for turn in turns:
        keys = [(TENANT, chunk) for chunk in turn.chunk_ids]
        for key in keys:
            kept = policy.access(key, session=turn.session, time_s=turn.time_s).hit
            hits += area.access(key, turn.time_s) or kept
            accesses += 1
        policy.close_request()
        if area_room:
            expected = kind.expected(turn.query or "", turn.time_s)
            area.bring(expected, turn.time_s, retrieved=keys, kept=policy)
        kind.take(turn)
    counts = area.account
    return {
        "hit_ratio": hits / max(1, accesses),
        "useful": counts.useful / max(1, counts.issued_total),
    }


def run(
    texts: Mapping[str, Sequence[Event]], *, node_half_life_s: float = 6 * 3600.0
) -> list[dict[str, Any]]:
    """Measure every kind on every text; kinds whose library is not installed are left out."""
    rows = []
    # Reading is by far the dearest, and what a text is about is the same whatever came before. Only
    # where it is timed nothing was read before.
    read: Entities | None = None
    for text, turns in texts.items():
        for name in KINDS:
            try:
                kind = Kind(name, node_half_life_s=node_half_life_s)
            except UnavailableError as error:
                print(f"{name}: left out: {error}")
                continue
            every = 1 if len(turns) < 1_000 else 5
            if read is None and "entities" in name:
                read = Entities()
            areas = {
                (room, share): ahead(
                    turns,
                    Kind(name, entities=read),
                    room=room,
                    share=share,
                    per_question=per_question,
                )
                for room in AREA_ROOMS
                for share, per_question in AREAS
            }
            found = worth(turns, kind, every=every)
            rows.append({"text": text, "kind": name, "areas": areas, **found})
    return rows


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown tables: warm sets, what questions foresee, what is worth fetching ahead."""
    shares = ("0%", *(f"{share:.0%}" for share in SHARES))
    heads = [f"room {room}: none; {'; '.join(shares[1:])}" for room in ROOMS]
    out = [f"| text | nodes | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
    for row in rows:
        cells = [
            "; ".join(f"{row['warm'][f'{share} of {room}']:.4f}" for share in shares)
            for room in ROOMS
        ]
        out.append(f"| {row['text']} | {row['kind']} | {' | '.join(cells)} |")
    out += [
        "",
        f"| text | nodes | questions with one | passages of questions with a known one | passages "
        f"in {FORESEEN} by demand; by nodes | CPU a question, ms |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        by_demand, by_nodes = row["foreseen"]
        out.append(
            f"| {row['text']} | {row['kind']} | {row['named']:.3f} | {row['known']:.3f} | "
            f"{by_demand:.4f}; {by_nodes:.4f} | {row['expected_ms']:.2f} |"
        )
    heads = [f"room {room}: {'; '.join(f'{s:.0%}' for s, _ in AREAS)}" for room in AREA_ROOMS]
    out += [
        "",
        f"| text | nodes | hits with a share ahead, {' | '.join(heads)} | asked for, of those |",
        f"|---|---|{'---:|' * len(heads)}---:|",
    ]
    for row in rows:
        cells = [
            "; ".join(f"{row['areas'][room, share]['hit_ratio']:.4f}" for share, _ in AREAS)
            for room in AREA_ROOMS
        ]
        asked = [row["areas"][room, s]["useful"] for room in AREA_ROOMS for s, _ in AREAS if s]
        used = f"{min(asked):.3f} to {max(asked):.3f}"
        out.append(f"| {row['text']} | {row['kind']} | {' | '.join(cells)} | {used} |")
    return "\n".join(out) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--half-life", type=float, default=6 * 3600.0, help="of a node's heat in plans, seconds"
    )
    parser.add_argument("--text", choices=list(TEXTS), action="append", help="only this one")
    args = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if not DATA.is_dir():
        print(f"no texts: {DATA} is not there")
        return 0
    texts = {name: TEXTS[name]() for name in args.text or TEXTS}
    print(render(run(texts, node_half_life_s=args.half_life)), flush=True)
    print(f"{platform.platform()}; python {' '.join(sys.argv)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
