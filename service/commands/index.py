"""`stoker index`: build an index from folders, JSONL, Parquet or .npy."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.service.indexing import IndexReport, Progress

_SKIPPED_SHOWN = 10


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "index",
        help="build an index from folders, JSONL, Parquet or .npy",
        description="Reads folders of Markdown, text, reStructuredText and HTML (cut into passages"
        " on headings and paragraphs), JSONL (plain or .gz; `id`, `text`, `metadata`, optional"
        " `vector`), Parquet with the same columns, and .npy matrices. Embeds what has no vector,"
        " builds an HNSW graph and seals it into pages. A bad row is an error that names file and"
        " line; what a folder holds and cannot be read is skipped and said.",
        epilog="example: stoker index ./docs --output ./my-index && stoker serve ./my-index",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help="files and folders")
    parser.add_argument("--output", "-o", metavar="DIR", required=True, help="the new index")
    parser.add_argument(
        "--model",
        help="embedding model: bundled, a folder or a hub name (default: service.embed_model,"
        " or bundled where that is empty)",
    )
    parser.add_argument(
        "--words", type=int, default=150, help="words in a passage cut from text (default: 150)"
    )
    parser.add_argument(
        "--vectors", metavar="FILE", help=".npy with a ready vector for every passage"
    )
    parser.add_argument(
        "--vector-ids",
        metavar="FILE",
        help="ids of its rows, one a line (default: ids.txt beside it)",
    )
    parser.add_argument(
        "--metric",
        choices=["cosine", "ip", "l2"],
        default="cosine",
        help="how vectors are compared: cosine, inner product or squared L2 (default: cosine)",
    )
    parser.add_argument(
        "--m", type=int, help="links per node (default: 16; 24 beyond a million vectors)"
    )
    parser.add_argument(
        "--ef-construction", type=int, default=200, help="width of the build (default: 200)"
    )
    parser.add_argument("--threads", type=int, help="default: one per processor")
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="count bad rows instead of stopping"
    )
    parser.add_argument(
        "--cache", metavar="FILE", help="embedding cache (default: in the user's cache folder)"
    )
    parser.add_argument("--no-cache", action="store_true", help="embed everything anew")


def run(args: argparse.Namespace) -> int:
    from stoker.errors import ConfigError
    from stoker.service.configuration import load_config
    from stoker.service.embedding import BUNDLED, Embedder, resolve_model
    from stoker.service.embedding_cache import EmbeddingCache
    from stoker.service.indexing import IndexPlan, build_index, default_cache_path
    from stoker.service.logging import configure_logging
    from stoker.service.model_record import ModelRecord, write_model_record
    from stoker.service.readers import ReadLimits

    configure_logging("warning")
    if args.words < 1:
        raise ConfigError(f"--words: expected at least 1, found {args.words}")
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads: expected at least 1, found {args.threads}")
    if args.vector_ids and not args.vectors:
        raise ConfigError("--vector-ids goes with --vectors")
    model = args.model or load_config().config.service.embed_model
    if model in ("", "off"):  # what a server does with text is not what building one needs
        model = BUNDLED
    plan = IndexPlan(
        paths=tuple(Path(path) for path in args.paths),
        output=Path(args.output),
        vectors_path=Path(args.vectors) if args.vectors else None,
        vector_ids_path=Path(args.vector_ids) if args.vector_ids else None,
        metric=args.metric,
        m=args.m,
        ef_construction=args.ef_construction,
        threads=args.threads,
        limits=ReadLimits(words=args.words, bad_rows_skipped=args.skip_bad_rows),
    )
    with contextlib.ExitStack() as stack:

        def embedder() -> Embedder:
            if args.no_cache:
                return Embedder(model)
            path = Path(args.cache) if args.cache else default_cache_path()
            return Embedder(model, cache=stack.enter_context(EmbeddingCache(path)))

        with _bar(quiet=args.json) as progress:
            report = build_index(plan, embedder=embedder, progress=progress)
        if report.embedded:
            # So that a server uses this model, and refuses another.
            folder, fingerprint = resolve_model(model)
            name = str(folder.resolve()) if folder is not None and model != BUNDLED else model
            write_model_record(plan.output, ModelRecord(name, fingerprint))
    if args.json:
        print(json.dumps(_document(report, model), indent=2))
    else:
        _print(report, model)
    return 0


@contextlib.contextmanager
def _bar(*, quiet: bool) -> Iterator[Progress | None]:
    """Draw progress on standard error; on a terminal it moves, in a log it stays silent."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("read", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total or None)

        yield progress


def _document(report: IndexReport, model: str) -> dict[str, Any]:
    document = dataclasses.asdict(report)
    document["model"] = model if report.embedded else None
    return document


def _print(report: IndexReport, model: str) -> None:
    read, build = report.read, report.build
    print(f"{build.path}: {build.count:,} vectors of {build.dim} dimensions, {build.metric}")
    print(
        f"read {read.passage_count:,} passages from {read.file_count:,} files"
        + (f", {report.embedded:,} embedded with {model}" if report.embedded else "")
        + f" in {report.read_s:.1f} s"
    )
    kinds = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in build.bytes_by_kind.items())
    recall = "" if build.recall is None else f"; recall@10 {build.recall:.3f} on held-out rows"
    print(f"built in {report.build_s:.1f} s: {build.total_bytes / 2**20:.1f} MiB ({kinds}){recall}")
    if report.unused_vectors:
        print(f"{report.unused_vectors:,} of the ready vectors belong to no passage")
    if read.skipped_count:
        print(f"skipped {read.skipped_count:,}:")
        for skip in read.skipped[:_SKIPPED_SHOWN]:
            print(f"  {skip.origin}: {skip.reason}")
        if read.skipped_count > _SKIPPED_SHOWN:
            print(f"  and {read.skipped_count - _SKIPPED_SHOWN:,} more (--json lists them)")
    print(f"next: stoker serve {build.path}")
