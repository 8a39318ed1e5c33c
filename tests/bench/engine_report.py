"""The engine benchmark's results as Markdown."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine_bars import bars
from engine_figures import Rows, disk_of, error_of, middle, number, speed_at, spread, table

NOISE_CORES = 0.15


def render(results: dict[str, Any]) -> str:
    """All parts that were run."""
    lines = _head(results)
    for name, part in (
        ("warm", _warm),
        ("cold", _cold),
        ("budget", _budget),
        ("growth", _growth),
        ("ordering", _ordering),
        ("sealing", _sealing),
    ):
        if results.get(name):
            lines += part(results)
    lines += bars(results)
    return "\n".join(lines)


def _head(results: dict[str, Any]) -> list[str]:
    m, c = results["machine"], results["corpus"]
    packages = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"# Index engine, {c['count']:,} x {c['dim']}",
        "",
        f"{m['processor']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {m['kernel']}, Python {m['python']}, {m['simd']}.",
        f"{packages}.",
        "",
        f"{c['real']:,} vectors are real, the others generated near neighbours ({c['pads']}).",
    ]
    if "real_set" in c:
        lines += ["", *_alike(c["real_set"], c["generated_set"])]
    lines += [_quiet(results), ""]
    built = results["build_s"]
    lines += table(
        ["index", "MB", "build s"],
        [[peer, number(results["bytes"][peer] / 1e6), number(s)] for peer, s in built.items()],
    )
    return lines


def _alike(real: dict[str, Any], made: dict[str, Any]) -> list[str]:
    rows = [
        [name, number(real[key], digits), number(made[key], digits)]
        for name, key, digits in (
            ("intrinsic dimension (two nearest neighbours)", "intrinsic_dimension", 1),
            ("cosine distance to the nearest, median", "distance_1st", 3),
            ("to the tenth", "distance_10th", 3),
        )
    ]
    for share in real["hit_curve"]:
        rows.append(
            [
                f"share of answers on the most answered {float(share):.0%}",
                number(real["hit_curve"][share], 3),
                number(made["hit_curve"][share], 3),
            ]
        )
    return table(["as many vectors of each", "real", "generated"], rows)


def _quiet(results: dict[str, Any]) -> str:
    others, stolen = _busy(results, "others_cores"), _busy(results, "stolen_cores")
    if not others:
        return ""
    loud = sum(value > NOISE_CORES for value in others)
    return (
        f"While measuring, others used {np.median(others):.2f} cores (median; most "
        f"{max(others):.2f}) and the host withheld {np.median(stolen):.2f} (most "
        f"{max(stolen):.2f}). "
        + (
            f"**{loud} of {len(others)} measurements were disturbed: take the times as noise.**"
            if loud
            else "The machine was quiet."
        )
    )


def _busy(node: Any, key: str) -> list[float]:
    if isinstance(node, dict):
        own = [float(node[key])] if key in node else []
        return own + [value for child in node.values() for value in _busy(child, key)]
    if isinstance(node, list):
        return [value for child in node for value in _busy(child, key)]
    return []


def _warm(results: dict[str, Any]) -> list[str]:
    rows = []
    for peer in results["peers"]:
        one, two = (results["warm"].get(f"{peer}/{n}", {}) for n in (1, 2))
        if "rows" not in one:
            rows.append([peer, str(one.get("error")), *[""] * 6])
            continue
        cells = [speed_at(one["rows"], t, c) for c in ("batch", "single") for t in (0.95, 0.99)]
        both = speed_at(two.get("rows", []), 0.99, "batch")
        gain = both / cells[1] if both and cells[1] else None
        peak = one["memory"]["peak_rss_bytes"] / 1e6
        rows.append([peer, *map(number, cells), number(both), number(gain, 2), number(peak)])
    return [
        "## Everything resident: queries a second at equal recall@10, medians of repeats",
        "",
        *table(
            [
                "engine",
                "batch, 0.95",
                "0.99",
                "one by one, 0.95",
                "0.99",
                "two threads, 0.99",
                "gain",
                "peak MB",
            ],
            rows,
        ),
    ]


def _cold(results: dict[str, Any]) -> list[str]:
    part = results["cold"]
    lines = ["## Cold: the first queries of a fresh process, one by one", ""]
    lines += [
        "Files dropped from the operating system's cache, checked page by page; read-ahead "
        f"{results['machine'].get('read_ahead')}. Medians over repeats (lowest-highest). Opening "
        "does not count imports. Engines aim at recall 0.95 as tuned when resident; Stoker is "
        "told so (`recall_target`) and chooses by itself. `told`: nothing loaded, as `cold`, but "
        "told what the volume gives (`volume_iops`, `volume_bytes_s`).",
        "",
    ]
    devices = []
    for name, d in part["device"].items():
        if "error" in d:
            devices.append([name, str(d["error"]), *[""] * 5])
            continue
        devices.append(
            [
                name,
                number(d["random_4k_p50_ms"], 3),
                number(d["random_4k_p99_ms"], 3),
                number(d["random_4k_again_p50_ms"], 3),
                number(d["random_4k_iops"]),
                number(d["sequential_mb_s"]),
                number(d["new_memory_mb_s"]),
            ]
        )
    lines += table(
        [
            "disk",
            "4 KiB p50 ms",
            "p99 ms",
            "again p50 ms",
            "one by one /s",
            "1 MiB MB/s",
            "new memory MB/s",
        ],
        devices,
    )
    lines.append(
        "Where reading the same places again is much faster, the host caches, and cold is no "
        "colder than that.\n"
    )
    rows = []
    for name, runs in part["runs"].items():
        error = error_of(runs)
        if error:
            rows.append([name, error, *[""] * 7])
            continue
        rows.append(
            [
                name,
                spread(runs, "open_ms", digits=0),
                spread(runs, "first_answer_ms", digits=0),
                spread(runs, "p50_ms", digits=2),
                spread(runs, "p99_ms", digits=1),
                number(middle(runs, "recall"), 3),
                number(middle(runs, "reads_per_query"), 1),
                number((middle(runs, "bytes_in_all") or 0) / 1e6),
                number((middle(runs, "memory", "peak_rss_bytes") or 0) / 1e6),
            ]
        )
    lines += table(
        [
            "engine/how opened/disk",
            "open ms",
            "first answer ms",
            "p50 ms",
            "p99 ms",
            "recall",
            "reads a query",
            "MB read",
            "peak MB",
        ],
        rows,
    )
    for volume, runs in part["moments"].items():
        lines += _moments(volume, runs, part["device"].get(disk_of(volume), {}))
    return lines


def _moments(volume: str, runs: Rows, device: dict[str, Any]) -> list[str]:
    if error_of(runs):
        return [f"Stoker's moments on {volume}: {error_of(runs)}", ""]
    nav = "navigation"
    size = middle(runs, nav, "bytes") or 0.0
    taken = size / 1e6 / device["sequential_mb_s"] if device.get("sequential_mb_s") else 0.0
    seconds = middle(runs, nav, "seconds") or 0.0
    lines = [
        f"### Stoker's moments on {volume}",
        "",
        f"1. Open {spread(runs, 'open_ms')} ms; open to first answer "
        f"{spread(runs, 'first_answer_ms')} ms, completeness "
        f"{number(middle(runs, 'first', 'completeness'), 2)}, recall "
        f"{number(middle(runs, 'first', 'recall'), 2)}.",
        f"2. Navigation set {size / 1e6:,.1f} MB, {100 * (middle(runs, nav, 'share') or 0):.1f} % "
        f"of the index; resident after {spread(runs, nav, 'seconds', digits=3)} s, "
        f"{seconds / taken if taken else 0:.2f} x its bytes over the device's bandwidth "
        f"({taken:.3f} s). Meanwhile {number(middle(runs, nav, 'asked_meanwhile'))} queries were "
        f"answered, p99 {spread(runs, nav, 'meanwhile_p99_ms')} ms, recall "
        f"{number(middle(runs, nav, 'meanwhile', 'recall'), 3)}.",
        "3. From then on:",
        "",
    ]
    settled = [key for key in runs[0] if key.startswith("settled_")]
    rows = [
        [
            key.removeprefix("settled_"),
            number(middle(runs, key, "recall"), 3),
            f"{number(middle(runs, key, 'rounds_p50'), 1)} / "
            f"{number(middle(runs, key, 'rounds_p99'), 1)}",
            f"{number(middle(runs, key, 'pages_p50'), 1)} / "
            f"{number(middle(runs, key, 'pages_p99'), 1)}",
            spread(runs, key, "p50_ms", digits=2),
            spread(runs, key, "p99_ms", digits=2),
        ]
        for key in settled
    ]
    header = ["recall_target", "recall@10", "rounds p50/p99", "pages p50/p99", "p50 ms", "p99 ms"]
    return lines + table(header, rows)


def _budget(results: dict[str, Any]) -> list[str]:
    part, settings = results["budget"], results["settings"]
    lines = [
        "## Under a budget: one thread, one query after the other, then all in one call",
        "",
        f"Budgets are shares of {part['index_bytes'] / 1e6:,.0f} MB, the bytes of Stoker's index, "
        "and the same bytes for every engine. The memory limit (cache of files included) adds what "
        "a process of the engine holds with no index, "
        f"{', '.join(f'{p} {b / 1e6:,.0f} MB' for p, b in part['constants'].items())}, and "
        f"{part['slack_bytes'] / 1e6:,.0f} MB. Allowed on top, in their favour: "
        f"{_extras(part['extra'])}. "
        "Skewed: Zipf 1.0 over the vectors that queries are near, a twentieth of all ranks change "
        f"holders every {settings['epoch_queries']} queries; Stoker is warmed by what it answered "
        f"to the {settings['learnt']:,} queries before, DiskANN chooses its cache by the last "
        f"2,000 of them. {settings['settle']:,} queries pass unmeasured. {_limits(part)}",
        "",
    ]
    keys = [key.split("/") for key in part["runs"]]
    for stream, target, volume in dict.fromkeys((k[1], k[2], k[4]) for k in keys):
        shares = sorted({k[3] for k in keys if k[3] != "1.0"}, key=float)
        base = part["runs"].get(f"stoker/{stream}/{target}/1.0/{volume}", [])
        resident = middle(base, "qps")
        lines += [f"### {stream}, recall {target}, disk: {volume}", ""]
        if resident:
            lines += [
                f"Stoker, everything resident: {spread(base, 'qps', digits=0)} queries/s, in one "
                f"call {spread(base, 'batch', 'qps', digits=0)}.",
                "",
            ]
        rows = []
        for share in shares:
            for peer in dict.fromkeys(k[0] for k in keys):
                runs = part["runs"].get(f"{peer}/{stream}/{target}/{share}/{volume}")
                if runs is not None:
                    rows.append(_budget_row(part, peer, share, runs, base))
        header = [
            "budget, engine",
            "queries/s",
            "of resident",
            "recall",
            "p50 ms",
            "p99 ms",
            "CPU us",
            "in one call",
            "of resident",
            "recall",
            "CPU us",
            "KB a query",
            "reads a query",
            "hits",
            "peak MB (limit)",
            "beyond budget + imports MB",
        ]
        lines += table(header, rows)
    return lines


def _extras(extra: dict[str, int]) -> str:
    given = [f"{peer} {size / 1e6:,.0f} MB" for peer, size in extra.items() if size]
    return ", ".join(given) or "nothing"


def _limits(part: dict[str, Any]) -> str:
    limited = [run for runs in part["runs"].values() for run in runs if "limit_bytes" in run]
    wanted = [run for runs in part["runs"].values() for run in runs if run.get("notes", [])[1:]]
    if limited and not wanted:
        return "The limit is a memory control group's, so it is hard."
    reasons = {note for run in wanted for note in run["notes"][1:]}
    return f"**No hard memory limit was set: {'; '.join(sorted(reasons)) or 'none asked for'}.**"


def _budget_row(part: dict[str, Any], peer: str, share: str, runs: Rows, base: Rows) -> list[str]:
    name = f"{float(share):.0%} {peer}"
    error = error_of(runs)
    if error:
        return [name, error, *[""] * 14]

    def of_resident(*path: str) -> str:
        speed, resident = middle(runs, *path), middle(base, *path)
        return f"{speed / resident:.2f}" if peer == "stoker" and resident and speed else ""

    hits = middle(runs, "hit_ratio")
    peak, limit = middle(runs, "memory", "peak_rss_bytes"), middle(runs, "limit_bytes")
    return [
        name,
        spread(runs, "qps", digits=0),
        of_resident("qps"),
        number(middle(runs, "recall"), 3),
        spread(runs, "p50_ms", digits=2),
        spread(runs, "p99_ms", digits=1),
        number(middle(runs, "cpu_us")),
        spread(runs, "batch", "qps", digits=0),
        of_resident("batch", "qps"),
        number(middle(runs, "batch", "recall"), 3),
        number(middle(runs, "batch", "cpu_us")),
        number((middle(runs, "bytes_per_query") or 0) / 1e3, 1),
        number(middle(runs, "reads_per_query"), 1),
        "" if hits is None else f"{hits:.4f}",
        f"{(peak or 0) / 1e6:,.0f} ({limit / 1e6:,.0f})" if limit else number((peak or 0) / 1e6),
        number(((peak or 0) - float(share) * part["index_bytes"] - part["constants"][peer]) / 1e6),
    ]


def _growth(results: dict[str, Any]) -> list[str]:
    rows = [
        [f"{r['peer']}, {r['count']:,} x {r['dim']}", r["error"], "", "", ""]
        if "error" in r
        else [
            f"{r['peer']}, {r['count']:,} x {r['dim']}",
            number(r["us_0.95"], 1),
            number(r["us_0.99"], 1),
            number(r["build_s"]),
            number(r["peak_rss_bytes"] / 1e6),
        ]
        for r in results["growth"]["rows"]
    ]
    lines = ["## Growth: microseconds a query at equal recall, everything resident", ""]
    lines += table(["engine, vectors", "0.95", "0.99", "build s", "peak MB"], rows)
    for fit in results["growth"]["fits"]:
        lines.append(
            f"- {fit['peer']}, {fit['dim']} dimensions, recall {fit['what'][3:]}: "
            f"{fit['us_per_doubling']:+.1f} us per doubling (R2 {fit['r2']:.2f}); "
            f"time ~ n^{fit['exponent']:.2f}"
        )
    return [*lines, ""]


def _sealing(results: dict[str, Any]) -> list[str]:
    rows = []
    for run in results["sealing"]:
        if "error" in run:
            rows.append([run["error"], *[""] * 6])
            continue
        size = run["bytes"] / 1e6
        rows.append(
            [
                number(size),
                number(run["seal_s"], 2),
                number(size / run["seal_s"]),
                number(size / run["write_s"]),
                number(run["calibrate_s"], 2),
                number(run["peak_bytes"]["sealing"] / 1e6),
                number(run["peak_bytes"]["calibrating"] / 1e6),
            ]
        )
    header = ["MB", "seal s", "MB/s", "disk writes MB/s", "calibrate s"]
    return [
        "## Sealing: a graph that is linked already becomes a segment",
        "",
        "Own memory above what the process held before, MB: while sealing, while calibrating.",
        "",
        *table([*header, "memory sealing", "memory calibrating"], rows),
    ]


def _ordering(results: dict[str, Any]) -> list[str]:
    rows = []
    for name, found in results["ordering"].items():
        touched = found["touched"]
        row = [name, touched.get("error") or number(touched["pages_mean"], 1)]
        row.append(number(middle([touched], "pages_p50"), 1))
        row.append(number(middle([touched], "recall"), 3))
        for limited in found["limited"].values():
            if "error" in limited:
                row += [limited["error"], *[""] * 4]
                continue
            row += [
                f"{limited['hit_ratio']:.5f}",
                number(limited["misses_per_query"], 2),
                number(limited["reads_per_query"], 2),
                number(limited["qps"]),
                number(limited["recall"], 3),
            ]
        rows.append(row)
    header = ["order of rows", "pages touched, mean", "p50", "recall"]
    for share in next(iter(results["ordering"].values()))["limited"]:
        header.append(f"hit ratio, {float(share):.0%}")
        header += ["misses a query", "reads a query", "queries/s", "recall"]
    return [
        "## Orderings: one graph sealed four times; skewed queries, `recall_target` 0.95",
        "",
        "Pages touched: by single queries with nothing resident. The others: with a share of the "
        "bytes as budget, warmed by heat from earlier queries.",
        "",
        *table(header, rows),
    ]
