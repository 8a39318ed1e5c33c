"""Lookup reuse on pairs of other shapes than banking77's stream; all made here, by seed.

``python tests/bench/bench_kvcache_reuse_shapes.py --shape templates --seed 2`` (1 to 3 minutes,
most of it embedding). Shapes:

* ``templates``: 400 families of requests for one product, said in many ways; half of the pairs ask
  the same, the others another action, object or name;
* ``claims``: scifact's claims in other words around them; near misses say the opposite;
* ``turns``: mtrag's questions as asked and as rewritten for their context, and said politely;
* ``differences``: requests with one clear difference each, by kind: a number, a place, who to whom,
  with and without, a date, a version, a negation;
* ``helpdesk``: tickets of twelve topics, some asked far more often; near misses change one slot;
* ``amounts``: one amount or time in two spellings, beside another amount, beside another thing;
* ``headings``, ``python-headings``: headings of documentation asked for in two ways, beside those
  that share most words (of PostgreSQL and Kafka; of Python);
* ``titles``: titles of scifact's papers, asked for in the same way;
* ``languages``, ``languages-2``: templates in German, French, Spanish; Italian, Portuguese, Dutch;
* ``random``: banking77's questions, partners drawn at random and from near misses, so that a
  question's neighbours say nothing about its pair.

Arrivals are shuffled by ``--order``; below 0 they come as they were made. What it prints beside
ours is the best single cosine threshold in hindsight, which knows every truth and pays for no
proof.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np

from stoker.kvcache.reuse_evaluation import Pair, evaluate_reuse, with_vectors

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import banking77_rows
from kvcache_pair_kinds import Labelled, amounts, headings, helpdesk, languages, titles

ASKS = (
    "how do i {x}", "how can i {x}", "what is the way to {x}", "i want to {x}, how",
    "please tell me how to {x}", "can you explain how to {x}", "steps to {x}", "need help to {x}",
    "is there a way to {x}", "what should i do to {x}", "show me how to {x}", "guide me to {x}",
)  # fmt: skip
ACTIONS = (
    "delete|remove|erase", "create|make|set up", "rename|change the name of",
    "export|save a copy of", "share|give others access to", "restore|bring back|recover",
    "archive|put away", "copy|duplicate|clone", "list|see all of|show", "lock|protect",
    "unlock|unprotect", "import|load", "schedule|plan", "cancel|call off",
    "enable|turn on|switch on", "disable|turn off|switch off",
)  # fmt: skip
OBJECTS = (
    "the {n} report", "a {n} topic", "my {n} account", "the {n} dashboard", "the {n} backup",
    "a {n} user", "the {n} invoice", "my {n} calendar", "the {n} index", "the {n} table",
    "a {n} ticket", "the {n} workspace",
)  # fmt: skip
NAMES = (
    "sales", "billing", "team", "monthly", "draft", "shared", "old", "main", "private", "customer",
    "test", "partner", "travel", "payroll", "support", "project", "legal", "vendor",
)  # fmt: skip
DEEDS = (
    "deploy", "restore", "migrate", "configure", "monitor", "archive", "replicate", "scale",
    "audit", "patch", "restart", "resize", "index", "publish", "encrypt", "throttle",
)  # fmt: skip
THINGS = (
    "database", "billing report", "message queue", "payment gateway", "search cluster",
    "customer portal", "backup job", "audit log", "web server", "build pipeline", "mail relay",
    "license server", "feature flag", "access policy", "storage bucket", "data warehouse",
)  # fmt: skip
PLACES = ("Berlin", "Madrid", "Oslo", "Tokyo", "Dublin", "Prague", "Lima", "Cairo")
FIRMS = ("Acme", "Globex", "Initech", "Umbrella", "Hooli", "Stark")
VERSIONS = ("1.2.3", "1.20.3", "2.0.1", "2.0.10", "3.1", "3.10")
AROUND = (
    "is it true that {x}?", "does the evidence show that {x}?", "we ask whether {x}", "{x}",
    "{x}, right?", "studies say {x}", "can you verify that {x}?", "I read that {x}.",
)  # fmt: skip
OPPOSITES = {
    "increases": "decreases", "reduces": "raises", "increase": "decrease", "decrease": "increase",
    "decreases": "increases", "inhibits": "promotes", "promotes": "inhibits",
    "causes": "prevents", "lower": "higher", "higher": "lower", "high": "low", "low": "high",
    "reduced": "increased", "increased": "reduced", "is": "is not", "are": "are not",
    "can": "cannot", "has": "has not", "have": "have not",
}  # fmt: skip
POLITE = ("please tell me: {x}", "hello, {x}", "{x} thanks", "i would like to know {x}")


def templates(rng: random.Random, count: int) -> list[Labelled]:
    families = [(a, o, n) for a in ACTIONS for o in OBJECTS for n in NAMES]
    rng.shuffle(families)
    families = families[:400]

    def said(family: tuple[str, str, str]) -> str:
        action, thing, name = family
        words = f"{rng.choice(action.split('|'))} {thing.format(n=name)}"
        return rng.choice(ASKS).format(x=words)

    pairs: list[Labelled] = []
    while len(pairs) < count:
        one = action, thing, name = rng.choice(families)
        draw = rng.random()
        if draw < 0.5:
            other = one
        elif draw < 0.62:
            other = (rng.choice(ACTIONS), thing, name)
        elif draw < 0.74:
            other = (action, thing, rng.choice(NAMES))
        elif draw < 0.84:
            other = (action, rng.choice(OBJECTS), name)
        else:
            other = rng.choice(families)
        a, b = said(one), said(other)
        if a != b:
            pairs.append((a, b, one == other))
    return pairs


def differences(rng: random.Random, count: int, *, same_ratio: float = 0.5) -> list[Labelled]:
    def pair() -> tuple[str, str]:
        begin = f"{rng.choice(DEEDS)} the {rng.choice(THINGS)}"
        kind = rng.randrange(7)
        if kind == 0:
            one, other = rng.sample(range(2, 90), 2)
            return f"{begin} to {one} nodes", f"{begin} to {other} nodes"
        if kind == 1:
            here, there = rng.sample(PLACES, 2)
            return f"{begin} in {here}", f"{begin} in {there}"
        if kind == 2:
            giver, taker = rng.sample(FIRMS, 2)
            return f"{begin} from {giver} to {taker}", f"{begin} from {taker} to {giver}"
        if kind == 3:
            return f"{begin} with downtime", f"{begin} without downtime"
        if kind == 4:
            day = rng.randrange(1, 28)
            month = f"{rng.randrange(2015, 2025)}-{rng.randrange(1, 13):02}"
            return f"{begin} of {month}-{day:02}", f"{begin} of {month}-{day + 1:02}"
        if kind == 5:
            one_version, other_version = rng.sample(VERSIONS, 2)
            return f"{begin} version {one_version}", f"{begin} version {other_version}"
        return begin, f"not {begin}"

    pairs: list[Labelled] = []
    while len(pairs) < count:
        said, other = pair()
        same = rng.random() < same_ratio
        if not same and rng.random() < 0.3:
            other = pair()[0]  # nothing alike
        one_ask, other_ask = rng.sample(ASKS, 2)
        other = said if same else other
        if same or said != other:
            pairs.append((one_ask.format(x=said), other_ask.format(x=other), same))
    return pairs


def claims(rng: random.Random, data: Path) -> list[Labelled]:
    with (data / "scifact/queries.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"].rstrip(". ") for line in file]
    pairs: list[Labelled] = []
    for text in texts:
        for _ in range(3):
            words = (text[0].lower() + text[1:]).split()
            turned = [place for place, word in enumerate(words) if word in OPPOSITES]
            draw, other, same = rng.random(), " ".join(words), True
            if draw >= 0.7 or (draw >= 0.55 and not turned):
                other = rng.choice(texts)
                same = other == text
            elif draw >= 0.55:
                place, same = rng.choice(turned), False
                other = " ".join([*words[:place], OPPOSITES[words[place]], *words[place + 1 :]])
            one, two = rng.sample(AROUND, 2)
            pairs.append((one.format(x=" ".join(words)), two.format(x=other), same))
    return pairs


def turns(rng: random.Random, data: Path) -> list[Labelled]:
    def read(path: Path) -> dict[str, str]:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return {row["_id"]: row["text"].removeprefix("|user|: ").strip() for row in rows}

    pairs: list[Labelled] = []
    for domain in ("clapnq", "cloud", "fiqa", "govt"):
        folder = data / "mtrag/human" / domain
        asked = read(folder / f"{domain}_lastturn.jsonl")
        rewritten = {
            key: text for key, text in read(folder / f"{domain}_rewrite.jsonl").items()
            if key in asked
        }  # fmt: skip
        for key, text in rewritten.items():
            if asked[key] != text:
                pairs.append((asked[key], text, True))
            talk = [other for other in rewritten if other.split("<")[0] == key.split("<")[0]]
            other = rng.choice(talk)
            if other != key:
                pairs.append((rewritten[other], text, False))
            pairs += [(text, words.format(x=text), True) for words in POLITE if rng.random() < 0.6]
    return pairs


def at_random(rng: random.Random, data: Path, count: int) -> list[Labelled]:
    rows = banking77_rows(data)
    kinds: dict[str, list[str]] = {}
    for text, kind in rows:
        kinds.setdefault(kind, []).append(text)
    pairs: list[Labelled] = []
    while len(pairs) < count:
        text, kind = rng.choice(rows)
        words = set(text.casefold().split())
        if rng.random() < 0.4:
            other, other_kind = rng.choice(kinds[kind]), kind
        else:  # of forty, the one that shares most words
            other, other_kind = max(
                rng.sample(rows, 40), key=lambda row: len(words & set(row[0].casefold().split()))
            )
        if other != text:
            pairs.append((text, other, kind == other_kind))
    return pairs


def build(shape: str, data: Path, *, seed: int, order: int, count: int) -> list[Pair]:
    from stoker.service.embedding import Embedder

    rng = random.Random(seed)
    makers = {
        "templates": lambda: templates(rng, count),
        "differences": lambda: differences(rng, count),
        "claims": lambda: claims(rng, data),
        "turns": lambda: turns(rng, data),
        "helpdesk": lambda: helpdesk(rng, count),
        "amounts": lambda: amounts(rng, ASKS, count),
        "headings": lambda: headings(rng, data, ("postgresql15", "kafka"), count),
        "python-headings": lambda: headings(rng, data, ("python311",), count),
        "titles": lambda: titles(rng, data, count),
        "languages": lambda: languages(rng, ("de", "fr", "es"), count),
        "languages-2": lambda: languages(rng, ("it", "pt", "nl"), count),
        "random": lambda: at_random(rng, data, count),
    }
    labelled = makers[shape]()
    if order >= 0:
        random.Random(order).shuffle(labelled)
    bare = [Pair(a, b, same, None, None) for a, b, same in labelled]
    embedder = Embedder(thread_count=1, batch_size=64)
    return with_vectors(bare, lambda texts: np.asarray(embedder.embed(texts)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared/data")
    parser.add_argument(
        "--shape",
        required=True,
        choices=[
            "templates", "differences", "claims", "turns", "helpdesk", "amounts", "headings",
            "python-headings", "titles", "languages", "languages-2", "random",
        ],
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the pairs")
    parser.add_argument("--order", type=int, default=0, help="of their arrival; -1: as made")
    parser.add_argument(
        "--count", type=int, default=4_000, help="pairs, where the shape has no end"
    )
    parser.add_argument("--delta", type=float, default=0.01)
    chosen = parser.parse_args()
    made = build(
        chosen.shape, chosen.data, seed=chosen.seed, order=chosen.order, count=chosen.count
    )
    print(json.dumps(evaluate_reuse(made, delta=chosen.delta).to_json(), indent=1))
