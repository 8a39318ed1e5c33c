"""The cold starts as one self-contained HTML page: plots of latency over time, tables, the facts.

The plots are SVG written here; the page loads nothing from anywhere. Times are seconds since the
process was started, latencies milliseconds on a logarithmic scale.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from stoker.service.coldstart.job import MODE_LABELS, MODES
from stoker.service.coldstart.measure import ColdRun, VolumeSkipped
from stoker.service.coldstart.summary import Check, ModeRow, Spread

# Okabe and Ito's palette: told apart with any colour vision; shapes differ as well.
_COLOURS = {"none": "#D55E00", "all": "#0072B2", "stoker": "#009E73"}
Scale = Callable[[float], float]
_WIDTH, _HEIGHT = 860, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 20, 40, 56

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #666; --line: #d9d9d9; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #a5a5a5; --line: #3a3a3a; --page: #161616; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .9rem; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
.wide { overflow-x: auto; } .soft { color: var(--soft); font-size: .85rem; }
.held { color: #007a55; } .missed { color: #c0392b; font-weight: 600; }
@media (prefers-color-scheme: dark) { .held { color: #3ecf9b; } .missed { color: #ff7b6b; } }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); }
pre { overflow-x: auto; font-size: .8rem; border: 1px solid var(--line); padding: .8rem; }
"""


def render_html(
    *,
    title: str,
    runs: Sequence[ColdRun],
    rows: Sequence[ModeRow],
    checks: Sequence[Check],
    sentences: Sequence[str],
    facts: Mapping[str, str],
    notes: Sequence[str],
    skipped: Sequence[VolumeSkipped] = (),
    receipt_text: str = "",
) -> str:
    """Return the whole page.

    Args:
        facts: Name and value of what was measured: machine, sizes, settings.
        notes: What a reader must know to judge the figures.
        receipt_text: Stoker's receipt, as printed.
    """
    parts = [f"<h1>{_text(title)}</h1>"]
    parts += [f"<p><strong>{_text(sentence)}</strong></p>" for sentence in sentences]
    volumes = list(dict.fromkeys(row.volume.name for row in rows))
    for name in volumes:
        own = [row for row in rows if row.volume.name == name]
        label = own[0].volume.label
        parts.append(f"<h2>On {_text(label)}</h2>")
        parts.append(_plot([run for run in runs if run.volume.name == name]))
        parts.append(_table(own))
    for skip in skipped:
        parts.append(
            f"<p class='soft'>Not measured on {_text(skip.volume.label)}: {_text(skip.reason)}</p>"
        )
    if checks:
        parts.append("<h2>What is promised, and what was measured</h2>")
        parts.append(_check_table(checks))
    if receipt_text:
        parts.append("<h2>Stoker's receipt of its last warm-up</h2>")
        parts.append(f"<pre>{_text(receipt_text)}</pre>")
    parts.append("<h2>How it was measured</h2><ul>")
    parts += [f"<li>{_text(note)}</li>" for note in notes]
    parts.append("</ul><table class='words'>")
    parts += [f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in facts.items()]
    parts.append("</table>")
    body = "\n".join(parts)
    return (
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _text(value: str) -> str:
    return html.escape(value)


def _table(rows: Sequence[ModeRow]) -> str:
    heads = (
        *("mode", "first answer, s", "ready, s", "p50, ms", "p99, ms", "p99 of single starts, ms"),
        "read before ready, MiB",
        *("read in all, MiB", "pages per query", "recall@10"),
    )
    out = ["<div class='wide'><table><tr>", *(f"<th>{_text(head)}</th>" for head in heads), "</tr>"]
    for row in rows:
        cells = (
            _cell(row.first_answer_s, 3),
            _cell(row.ready_s, 3),
            f"{row.p50_ms:,.2f}",
            f"{row.p99_ms:,.2f}",
            _cell(row.p99_runs_ms, 2),
            _cell(row.ready_bytes, 1, scale=2**20) + f" <span class='soft'>{row.ready_ratio:.0%}"
            "</span>",
            _cell(row.total_bytes, 1, scale=2**20),
            _cell(row.pages_per_query, 1),
            _cell(row.recall, 3),
        )
        out.append(
            f"<tr><td>{_text(row.label)}</td>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
        )
    out.append("</table></div>")
    repeats = rows[0].repeats
    out.append(
        f"<p class='soft'>Medians of {repeats} cold starts each"
        + (", lowest to highest below." if repeats > 1 else ".")
        + "</p>"
    )
    return "".join(out)


def _cell(spread: Spread, digits: int, *, scale: float = 1.0) -> str:
    text = f"{spread.median / scale:,.{digits}f}"
    low, high = f"{spread.low / scale:,.{digits}f}", f"{spread.high / scale:,.{digits}f}"
    if low != high:
        text += f"<br><span class='soft'>{low}–{high}</span>"
    return text


def _check_table(checks: Sequence[Check]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("promise", "where", "measured", ""))
    out = [f"<div class='wide'><table class='words'><tr>{heads}</tr>"]
    for check in checks:
        word = "held" if check.held else "missed"
        out.append(
            f"<tr><td>{_text(check.name)}</td><td>{_text(check.volume)}</td>"
            f"<td>{_text(check.text)}</td><td class='{word}'>{word}</td></tr>"
        )
    out.append("</table></div>")
    return "".join(out)


def _plot(runs: Sequence[ColdRun]) -> str:
    """Draw each mode's median run: a mark per query, where it was answered and how long it took."""
    chosen = [_middle([run for run in runs if run.record.mode == mode]) for mode in MODES]
    shown = [run for run in chosen if run is not None]
    if not shown:
        return ""
    x_max = max(run.record.answered_s[-1] for run in shown) * 1.03
    latencies = [value * 1e3 for run in shown for value in run.record.latency_s]
    y_low = 10 ** math.floor(math.log10(max(min(latencies), 1e-3)))
    y_high = 10 ** math.ceil(math.log10(max(*latencies, y_low * 10)))

    def x(seconds: float) -> float:
        return _LEFT + seconds / x_max * (_WIDTH - _LEFT - _RIGHT)

    def y(milliseconds: float) -> float:
        share = math.log10(max(milliseconds, y_low) / y_low) / math.log10(y_high / y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    out = [
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' "
        "aria-label='Latency of each query over time since process start'>"
    ]
    out += _axes(x, y, x_max, y_low, y_high)
    for place, run in enumerate(shown):
        mode = run.record.mode
        colour = _COLOURS[mode]
        pairs = zip(run.record.answered_s, run.record.latency_s, strict=True)
        marks = "".join(_mark(mode, x(when), y(took * 1e3)) for when, took in pairs)
        out.append(f"<g fill='{colour}' fill-opacity='.7' stroke='none'>{marks}</g>")
        ready = x(run.record.ready_s)
        out.append(
            f"<line x1='{ready:.1f}' x2='{ready:.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM}' "
            f"stroke='{colour}' stroke-dasharray='4 3'><title>{MODE_LABELS[mode]} ready after "
            f"{run.record.ready_s:.2f} s</title></line>"
        )
        legend_y = 22
        legend_x = _LEFT + 8 + place * 262
        out.append(f"<g fill='{colour}'>{_mark(mode, legend_x, legend_y - 4, size=5)}</g>")
        out.append(
            f"<text x='{legend_x + 12}' y='{legend_y}'>{MODE_LABELS[mode]}"
            f" (ready after {run.record.ready_s:.2f} s)</text>"
        )
    out.append("</svg>")
    return "".join(out)


def _middle(runs: Sequence[ColdRun]) -> ColdRun | None:
    if not runs:
        return None
    ranked = sorted(runs, key=lambda run: run.record.answered_s[-1])
    return ranked[(len(ranked) - 1) // 2]


def _mark(mode: str, x: float, y: float, *, size: float = 3.0) -> str:
    if mode == "none":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{size * 0.8:.1f}'/>"
    if mode == "all":
        side = size * 1.6
        return (
            f"<rect x='{x - side / 2:.1f}' y='{y - side / 2:.1f}' width='{side:.1f}'"
            f" height='{side:.1f}'/>"
        )
    return (
        f"<path d='M{x:.1f} {y - size:.1f} L{x + size:.1f} {y + size * 0.8:.1f}"
        f" L{x - size:.1f} {y + size * 0.8:.1f} Z'/>"
    )


def _axes(x: Scale, y: Scale, x_max: float, y_low: float, y_high: float) -> Iterable[str]:
    floor, ceiling = _HEIGHT - _BOTTOM, _TOP
    step = _nice_step(x_max / 8)
    tick = 0.0
    while tick <= x_max:
        at = f"{x(tick):.1f}"
        yield f"<line class='grid' x1='{at}' x2='{at}' y1='{ceiling}' y2='{floor}'/>"
        yield f"<text x='{at}' y='{floor + 18}' text-anchor='middle'>{tick:g}</text>"
        tick = round(tick + step, 10)
    level = y_low
    while level <= y_high * 1.001:
        yield (
            f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y(level):.1f}'"
            f" y2='{y(level):.1f}'/>"
        )
        yield f"<text x='{_LEFT - 8}' y='{y(level) + 4:.1f}' text-anchor='end'>{level:g}</text>"
        level *= 10
    yield f"<line class='axis' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{floor}' y2='{floor}'/>"
    yield f"<line class='axis' x1='{_LEFT}' x2='{_LEFT}' y1='{ceiling}' y2='{floor}'/>"
    middle_x = (_LEFT + _WIDTH - _RIGHT) / 2
    yield (
        f"<text x='{middle_x}' y='{_HEIGHT - 14}' text-anchor='middle'>"
        "time since process start, s (dashed: ready)</text>"
    )
    middle_y = (floor + ceiling) / 2
    yield (
        f"<text transform='translate(18 {middle_y}) rotate(-90)' text-anchor='middle'>"
        "latency of one query, ms (log scale)</text>"
    )


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-6)))
    return next(power * part for part in (1, 2, 5, 10) if power * part >= rough)
