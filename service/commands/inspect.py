"""`stoker inspect`: what an index folder holds, and what a server over it has learned."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.service.configuration import add_config_flags, config_from_args

if TYPE_CHECKING:
    from stoker.index.settings import IndexSettings

_MIB = float(1 << 20)
_POOL_BYTES = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what an index folder holds",
        description="Shows an index folder: generation, segments, counts, bytes by kind of page, "
        "calibration, documents, and the heat and last receipt of a server over it. Reads only; "
        "a server may use the folder meanwhile.",
        epilog="example: stoker inspect ./my-index --checksums",
    )
    parser.add_argument("index", metavar="INDEX", help="folder that `stoker index` made")
    parser.add_argument(
        "--checksums",
        action="store_true",
        help="read every page and check it (`stoker verify` says more about what is damaged)",
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    from stoker.service.logging import configure_logging

    configure_logging("warning")
    settings = config_from_args(args)
    path = Path(args.index)
    facts = _index_facts(path, settings.config.index, checksums=args.checksums)
    facts["state"] = _state_facts(path, settings.config)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 5 if facts["damaged"] else 0


def _index_facts(path: Path, settings: IndexSettings, *, checksums: bool) -> dict[str, Any]:
    from stoker.index.collection import Collection
    from stoker.index.manifest import Manifest
    from stoker.index.segment import Segment
    from stoker.service.model_record import read_model_record

    # Opened as a server would open it: the budget decides which codes walks compare.
    with Collection(path, "r", settings=settings) as served:
        navigation_bits = served.resident().navigation_bits
    with Collection(path, "r", memory_bytes=_POOL_BYTES) as collection:
        record = read_model_record(path)
        residency = collection.resident()
        facts: dict[str, Any] = {
            "path": str(path),
            "generation": collection.generation,
            "change_offset": collection.change_offset,
            "documents": collection.count,
            "changed_rows": collection.delta_rows,
            "dim": collection.dim,
            "metric": collection.metric,
            "model": None if record is None else record.model,
            "page_bytes_by_kind": {k.kind: k.pages * k.page_bytes for k in residency.kinds},
            "memory_bytes": settings.memory_bytes,
            "navigation_bits": navigation_bits,
            "segments": [],
            "damaged": {},
            "checksums": "not checked",
        }
        bare = (path / "manifest.json").is_file()
        for name in collection.segment_names:
            folder = path if bare else path / "segments" / name
            manifest = Manifest.read(folder)
            calibration = manifest.calibration
            facts["segments"].append(
                {
                    "name": name,
                    "count": manifest.count,
                    "levels": [level.count for level in manifest.levels],
                    "bytes": manifest.total_bytes,
                    "m": manifest.m,
                    "ef_construction": manifest.ef_construction,
                    "vector_dtype": manifest.vector_dtype,
                    "id_kind": manifest.id_kind,
                    "hot_rows": manifest.hot_rows,
                    "builder": manifest.builder,
                    "calibration": None if calibration is None else dataclasses.asdict(calibration),
                }
            )
            if checksums:
                with Segment.open(folder, memory_bytes=_POOL_BYTES) as segment:
                    damaged = segment.damaged_pages()
                if damaged:
                    facts["damaged"][name] = damaged
        if checksums:
            facts["checksums"] = "damaged" if facts["damaged"] else "every page is whole"
    return facts


def _state_facts(path: Path, config: Any) -> dict[str, Any]:
    from stoker.errors import StokerError
    from stoker.service.engine_opening import HEAT_NAME, RECEIPT_NAME, state_folder
    from stoker.service.heat_sink import HeatSink
    from stoker.service.snapshot_file import read_snapshot
    from stoker.service.warmup import read_receipt

    folder = state_folder(path, config.service)
    facts: dict[str, Any] = {"path": str(folder), "heat": None, "receipt": None}
    try:
        snapshot = read_snapshot(folder / HEAT_NAME)
        if snapshot is not None:
            header, body = snapshot
            sink = HeatSink.open(body, config.prefetch)
            hottest = sorted(sink.demand(time.time()).items(), key=lambda item: -item[1])[:10]
            facts["heat"] = {
                "keys": sink.key_count,
                "saved_s": header["time_s"],
                "offsets": dict(header["offsets"]),
                "hottest": [
                    {"tenant": tenant, "id": chunk, "demand": round(demand, 3)}
                    for (tenant, chunk), demand in hottest
                ],
            }
    except StokerError as error:
        facts["heat"] = {"error": str(error)}
    receipt = read_receipt(folder / RECEIPT_NAME)
    if receipt is not None:
        facts["receipt"] = receipt.to_dict()
    return facts


def _compared(bits: int) -> str:
    """What walks compare, by its bits a dimension."""
    return f"vectors of {bits} bits a dimension" if bits > 4 else f"{bits}-bit codes"


def _print(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{facts['path']}: {facts['documents']:,} documents, {facts['dim']} dimensions, "
        f"{facts['metric']}; generation {facts['generation']}, change {facts['change_offset']}, "
        f"{facts['changed_rows']:,} rows not sealed yet"
    )
    console.print(f"embedding model: {facts['model'] or 'not recorded'}")
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("segment", "rows", "levels", "MiB", "vectors", "ids", "recall@k (low)"):
        table.add_column(column, justify="left" if column in ("segment", "levels") else "right")
    for segment in facts["segments"]:
        calibration = segment["calibration"]
        recall = "not calibrated"
        if calibration:
            recall = f"{calibration['recall_mean'][-1]:.3f} ({calibration['recall_low'][-1]:.3f})"
        table.add_row(
            segment["name"],
            f"{segment['count']:,}",
            " ".join(f"{count:,}" for count in segment["levels"]),
            f"{segment['bytes'] / _MIB:,.1f}",
            segment["vector_dtype"],
            segment["id_kind"],
            recall,
        )
    console.print(table)
    kinds = ", ".join(f"{k} {v / _MIB:,.1f}" for k, v in facts["page_bytes_by_kind"].items())
    console.print(f"MiB of pages by kind: {kinds}")
    budget = facts["memory_bytes"]
    console.print(
        f"with {f'{budget / _MIB:,.1f} MiB of memory' if budget else 'memory for all of it'}, "
        f"walks compare {_compared(facts['navigation_bits'])}"
    )
    console.print(f"checksums: {facts['checksums']}")
    for name, files in facts["damaged"].items():
        for file, pages in files.items():
            shown = ", ".join(map(str, pages[:10])) + (" …" if len(pages) > 10 else "")
            console.print(f"  damaged: {name}/{file}: pages {shown}")
    _print_state(console, facts["state"])


def _print_state(console: Any, state: dict[str, Any]) -> None:
    heat = state["heat"]
    if heat is None:
        console.print(f"heat: none in {state['path']}")
    elif "error" in heat:
        console.print(f"heat: unusable: {heat['error']}")
    else:
        age_s = max(0.0, time.time() - heat["saved_s"])
        console.print(f"heat: {heat['keys']:,} chunks, saved {age_s:,.0f} s ago; hottest:")
        for entry in heat["hottest"]:
            console.print(f"  {entry['demand']:10.2f}  {entry['tenant']}/{entry['id']}")
    receipt = state["receipt"]
    if receipt is None:
        console.print("last warm-up: no receipt")
    else:
        console.print(
            f"last warm-up: {receipt['state']}, {receipt['bytes_read'] / _MIB:,.1f} MiB in "
            f"{receipt['seconds']:.2f} s, predicted hit ratio {receipt['predicted_hit_ratio']:.3f}"
        )
