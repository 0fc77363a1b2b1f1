"""The timeline of a step to look at: Chrome trace JSON (Perfetto opens it), or a page with the picture.

Of a loop the first rounds are drawn, then one bar for the others, which are alike.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.preflight.prediction import Prediction
from launcher.preflight.timeline import Event
from recipes.errors import UserError

_DRAWN_ROUNDS = 2
_LANES = {
    "core": "TensorCore",
    "ici": "ICI: links of the slice",
    "dcn": "DCN: between slices",
    "host": "PCIe: host memory",
    "hbm": "copies beside",
}
_COLORS = {
    "matmul": "#3b6fb6",
    "attention": "#7a4fb3",
    "grouped matmul": "#2f8f8b",
    "elementwise": "#8fae3c",
    "copy": "#b9b9b9",
    "loop": "#e4e4e4",
    "wait": "#d1483b",
}
_EXCHANGE_COLOR = "#e0963a"
_WIDTH_PX, _LANE_PX, _LEFT_PX = 1600, 34, 190
_NARROWEST_PX = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of the picture."""

    lane: str
    label: str
    kind: str
    """Category, ``wait``, or ``loop`` for rounds that are not drawn."""
    start_s: float
    duration_s: float
    detail: str


def bars(events: Sequence[Event], offset_s: float = 0.0) -> Iterator[Bar]:
    """All bars of a timeline, loops opened."""
    for event in events:
        start_s = offset_s + event.start_s
        if not event.inside:
            if event.duration_s > 0:
                yield _bar(event, start_s)
            continue
        round_s, rounds = event.duration_s / event.op.rounds, event.op.rounds
        drawn = min(_DRAWN_ROUNDS, rounds)
        for number in range(drawn):
            yield from bars(event.inside, start_s + number * round_s)
        if rounds > drawn:
            yield Bar(
                lane="core",
                label=f"{rounds - drawn} more rounds",
                kind="loop",
                start_s=start_s + drawn * round_s,
                duration_s=(rounds - drawn) * round_s,
                detail=event.op.name,
            )


def chrome_trace(prediction: Prediction, title: str) -> str:
    """As https://ui.perfetto.dev and chrome://tracing read it; one thread a lane, microseconds."""
    numbers = {lane: number for number, lane in enumerate(_LANES)}
    named = [
        {"ph": "M", "pid": 0, "tid": numbers[lane], "name": "thread_name", "args": {"name": name}}
        for lane, name in _LANES.items()
    ]
    named.append({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}})
    complete = [
        {
            "ph": "X",
            "pid": 0,
            "tid": numbers[bar.lane],
            "name": bar.label,
            "cat": bar.kind,
            "ts": 1e6 * bar.start_s,
            "dur": 1e6 * bar.duration_s,
            "args": {"source": bar.detail},
        }
        for bar in bars(prediction.timeline.events)
    ]
    return json.dumps({"traceEvents": [*named, *complete], "displayTimeUnit": "ms"})


def html_page(prediction: Prediction, title: str, summary: str) -> str:
    """A page that needs nothing else: the picture, what it is of, and hints under the pointer."""
    drawn = list(bars(prediction.timeline.events))
    used = [lane for lane in _LANES if any(bar.lane == lane for bar in drawn)]
    scale = (_WIDTH_PX - _LEFT_PX) / max(prediction.timeline.duration_s, 1e-9)
    rows = "\n".join(_svg_bar(bar, used.index(bar.lane), scale) for bar in drawn)
    labels = "\n".join(
        f'<text x="4" y="{number * _LANE_PX + 22}">{html.escape(_LANES[lane])}</text>'
        for number, lane in enumerate(used)
    )
    legend = " ".join(
        f'<span style="background:{color}"></span>{html.escape(kind)}' for kind, color in _COLORS.items()
    )
    return _PAGE.format(
        title=html.escape(title),
        summary=html.escape(summary),
        legend=f'{legend} <span style="background:{_EXCHANGE_COLOR}"></span>exchange',
        width=_WIDTH_PX,
        height=len(used) * _LANE_PX + 24,
        axis=_axis(prediction.timeline.duration_s, scale, len(used) * _LANE_PX),
        labels=labels,
        rows=rows,
    )


def write(path: Path, prediction: Prediction, *, title: str, summary: str) -> None:
    """By the suffix of ``path``: ``.html`` the page, ``.json`` the trace.

    Raises:
      UserError: another suffix, or it cannot be written.
    """
    if path.suffix not in (".html", ".json"):
        raise UserError(
            f"--timeline {path}: the suffix says what is written",
            hint="end it with .html for a page, or with .json for https://ui.perfetto.dev",
        )
    is_page = path.suffix == ".html"
    text = html_page(prediction, title, summary) if is_page else chrome_trace(prediction, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", hint="give --timeline another place"
        ) from error


def _bar(event: Event, start_s: float) -> Bar:
    what = f"{event.category} {event.axes}".strip()
    return Bar(
        lane=event.lane,
        label=f"wait: {what}" if event.is_wait else what,
        kind="wait" if event.is_wait else event.category,
        start_s=start_s,
        duration_s=event.duration_s,
        detail=event.op.source or event.op.name,
    )


def _svg_bar(bar: Bar, lane: int, scale: float) -> str:
    x, width = _LEFT_PX + bar.start_s * scale, max(_NARROWEST_PX, bar.duration_s * scale)
    color = _COLORS.get(bar.kind, _EXCHANGE_COLOR)
    hint = html.escape(
        f"{bar.label}: {1e3 * bar.duration_s:.3f} ms at {1e3 * bar.start_s:.3f} ms\n{bar.detail}"
    )
    return (
        f'<rect x="{x:.2f}" y="{lane * _LANE_PX + 4}" width="{width:.2f}" height="{_LANE_PX - 8}"'
        f' fill="{color}"><title>{hint}</title></rect>'
    )


def _axis(duration_s: float, scale: float, top: int) -> str:
    marks = [duration_s * part / 10 for part in range(11)]
    return "\n".join(
        f'<text x="{_LEFT_PX + mark * scale - 12:.1f}" y="{top + 16}">{mark:.3g} s</text>' for mark in marks
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #222 }}
pre {{ background: #f6f6f6; padding: 12px; overflow-x: auto }}
svg {{ font: 12px system-ui, sans-serif; background: #fff }}
.legend span {{ display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 12px }}
.picture {{ overflow-x: auto }}
</style></head><body>
<h1>{title}</h1>
<pre>{summary}</pre>
<p class="legend">{legend}</p>
<div class="picture"><svg width="{width}" height="{height}">
{labels}
{axis}
{rows}
</svg></div>
</body></html>
"""
