"""`stoker import`: take over an index or vectors that another library wrote."""

from __future__ import annotations

import argparse
import json
from typing import Any

_FORMATS = ("hnswlib", "faiss", "usearch", "npy", "parquet", "fvecs", "bvecs")
_MIB = float(1 << 20)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "import",
        help="take over an index that another library built",
        description="Makes an index of a file that another library wrote, without embedding "
        "anything again. The graph of an hnswlib file and of a faiss HNSW index is taken as it is; "
        "vectors of faiss Flat and IVF, usearch, .npy, Parquet, .fvecs and .bvecs are linked anew. "
        "What a file no longer has, such as vectors that were quantised away, is refused with the "
        "reason.",
        epilog="example: stoker import old.hnsw ./my-index --metric cosine. exit codes: 0 ok, "
        "3 cannot be taken, 4 no room, 5 the file is damaged",
    )
    parser.add_argument("file", metavar="FILE", help="what to take over")
    parser.add_argument("index", metavar="INDEX", help="folder to make; must not exist")
    parser.add_argument(
        "--format", choices=_FORMATS, help="what the file is; by default it is recognised"
    )
    parser.add_argument(
        "--metric",
        choices=("ip", "cosine", "l2"),
        help="how vectors are compared; needed where the file does not say (hnswlib, .npy, "
        "Parquet)",
    )
    parser.add_argument(
        "--ids", metavar="FILE.npy", help="ids of the vectors; by default the file's, or 0, 1, ..."
    )
    parser.add_argument("--vector-column", default="vector", metavar="NAME", help="of Parquet")
    parser.add_argument("--id-column", default="id", metavar="NAME", help="of Parquet")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of Parquet")
    parser.add_argument(
        "--m", type=int, help="links per node where linked anew (16; 24 beyond a million vectors)"
    )
    parser.add_argument(
        "--ef-construction",
        type=int,
        default=200,
        metavar="N",
        help="candidates looked at where linked anew (200); more is slower and better",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="by default all processors")


def run(args: argparse.Namespace) -> int:
    import dataclasses

    from stoker.index.foreign import import_foreign, read_foreign
    from stoker.service.logging import configure_logging
    from stoker.service.step_bars import step_bars

    configure_logging("warning")
    with step_bars(quiet=args.json) as report:
        foreign = read_foreign(
            args.file,
            format=args.format,
            vector_column=args.vector_column,
            id_column=args.id_column,
            text_column=args.text_column,
        )
        if args.ids is not None:
            foreign = dataclasses.replace(foreign, ids=_ids(args.ids))
        made = import_foreign(
            args.index,
            foreign,
            metric=args.metric,
            m=args.m,
            ef_construction=args.ef_construction,
            threads=args.threads,
            progress=report,
        )
    if args.json:
        print(json.dumps({"index": args.index, **made.to_json()}, indent=2))
        return 0
    how = "its graph was taken" if made.graph == "taken" else "linked anew"
    print(
        f"{args.index}: {made.count:,} vectors of {made.dim} dimensions ({made.metric}) from "
        f"{made.format}; {how}; {made.build['total_bytes'] / _MIB:,.1f} MiB"
    )
    if made.documents:
        print(f"texts and metadata of {made.documents:,} documents")
    for note in made.notes:
        print(f"note: {note}")
    return 0


def _ids(path: str) -> Any:
    import numpy as np

    from stoker.errors import InputError

    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--ids: {path}: cannot be read as .npy: {error}") from error
    return ids.astype(object) if ids.dtype.kind == "U" else ids
