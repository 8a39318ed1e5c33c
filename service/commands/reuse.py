"""`stoker reuse evaluate`: measure semantic lookup reuse and its error rate on labelled pairs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stoker.errors import InputError
from stoker.kvcache.reuse_evaluation import (
    Pair,
    ReuseEvaluation,
    evaluate_reuse,
    pair_of,
    with_vectors,
)
from stoker.kvcache.reuse_policy import Reason
from stoker.prefetch.traces import opened
from stoker.service.configuration import add_config_flags, config_from_args


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "reuse",
        help="measure semantic lookup reuse and its error rate",
        description="Runs the reuse policy over labelled pairs of questions as if they arrived one "
        "after another, and compares it with the best single cosine threshold in hindsight. The "
        "policy sees the truth only of the lookups that it chose to verify.",
        epilog='each line: {"a": "...", "b": "...", "same": true}, perhaps with "a_vec" and '
        '"b_vec"; without vectors the bundled model embeds the texts',
    )
    parser.add_argument("action", choices=["evaluate"], help="evaluate: run over a file of pairs")
    parser.add_argument(
        "--pairs",
        required=True,
        metavar="FILE.jsonl",
        help="the labelled pairs, perhaps packed by gzip or xz",
    )
    parser.add_argument(
        "--delta",
        type=float,
        metavar="D",
        help="largest share of wrong reuses (default: kvcache.reuse_delta, 0.01)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw of verifications")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args).config
    delta = config.kvcache.reuse_delta if args.delta is None else args.delta
    if not 0.0 < delta <= 1.0:
        raise InputError(f"--delta: expected a ratio in (0, 1], found {delta}")
    pairs = read_pairs(Path(args.pairs))
    from rich.console import Console
    from rich.progress import Progress

    from stoker.service.logging import configure_logging

    configure_logging("warning")
    console = Console(stderr=True)
    with Progress(console=console, disable=args.json or not console.is_terminal) as bar:
        embedding = bar.add_task("embedding", total=None)
        whole = with_vectors(pairs, lambda texts: _embed(texts, config, bar, embedding))
        bar.update(embedding, total=1, completed=1)
        replaying = bar.add_task("replaying", total=len(whole))
        found = evaluate_reuse(
            whole,
            delta=delta,
            settings=config.kvcache,
            seed=args.seed,
            progress=lambda done, total: bar.update(replaying, completed=done),
        )
        bar.update(replaying, completed=len(whole))
    print(json.dumps(found.to_json(), indent=2) if args.json else render(found))
    return 0


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of pairs.

    Raises:
        InputError: the file cannot be read, holds no pair, or a line is not one; the message
            names the line.
    """
    pairs = []
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                document = json.loads(text)
            except UnicodeDecodeError as error:
                raise InputError(f"{path}: line {number}: expected UTF-8: {error}") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number}: expected JSON: {error}") from error
            if not isinstance(document, dict):
                raise InputError(f"{path}: line {number}: expected an object")
            try:
                pairs.append(pair_of(document, line=number))
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
    if not pairs:
        raise InputError(f"{path}: expected at least one pair, found none")
    return pairs


def _embed(texts: list[str], config: Any, bar: Any, task: Any) -> Any:
    from stoker.service.embedding import Embedder

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    return Embedder(thread_count=1).embed(texts, progress=report)


_OUTCOMES = {
    Reason.REUSED: "reused",
    "exact": "reused: the same text",
    Reason.LEARNING: "searched: too little learnt yet",
    Reason.PROVING: "searched: spent on the proof",
    Reason.PROVING_AGAIN: "searched: spent on the proof after an error",
    Reason.UNSURE_PROVING: "searched: not sure enough to prove by",
    Reason.UNSURE: "searched: not sure enough to reuse",
    "similarity": "refused: too far away",
    "empty": "refused: nothing to read",
}


def render(found: ReuseEvaluation) -> str:
    """Return the outcome as plain lines."""
    document = found.to_json()
    fixed = found.fixed_same_bound
    percent = f"{found.confidence:.0%}"

    def share(value: object) -> str:
        return f"{value:.2%}" if isinstance(value, float) else "none"

    gain = document["gain_over_fixed"]
    exact = f"{found.exact_reuses} exact repeats among the reused"
    if found.exact_wrong:
        exact += f", {found.exact_wrong} of them labelled different: those labels contradict"
    lines = [
        f"pairs            {found.pairs} ({found.true_pairs} same, {found.false_pairs} different)",
        f"reused           {found.reused}: {share(document['reuse_rate_true'])} of the same, "
        f"{share(document['reuse_rate_false'])} of the different",
        f"wrong            {found.reused_false}, {share(document['false_share'])} of the reused; "
        f"at most {found.false_share_upper:.2%} at {percent}",
        f"proved           at most {found.bound:.2%} wrong (delta {found.delta:.2%}), valid at any "
        f"time",
        f"exact            {exact}",
        "first reuse      "
        + (f"at pair {found.first_reuse_at}" if found.first_reuse_at is not None else "never"),
        f"verified         {found.verified_reuses} of the reused by an extra search; "
        f"{found.verified_refusals} refusals by the search that follows anyway",
        "refused by       "
        + ", ".join(f"{guard} {count}" for guard, count in found.refusals.items()),
        f"fixed threshold  {fixed.reused_true} right reuses at the same bound, best in hindsight"
        + (f": ours has {gain:.2f} x as many" if isinstance(gain, float) else ": none keeps it"),
        f"the same, proved {found.fixed_proved.reused_true} right reuses where it, too, reuses "
        "only while a proof stands",
        *_account(found),
    ]
    return "\n".join(lines)


def _account(found: ReuseEvaluation) -> list[str]:
    """Return a table of what became of the pairs, most of the same first."""
    rows = sorted(found.account.items(), key=lambda row: (-row[1][0], row[0]))
    return [
        f"{'what became of them':<48} {'same':>7} {'different':>10}",
        *(
            f"  {_OUTCOMES.get(name, f'refused by {name}'):<46} {same:>7} {different:>10}"
            for name, (same, different) in rows
        ),
    ]
