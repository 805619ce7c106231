"""A picture of the barrier's way through the subtasks of an epoch. Pure: spans in, SVG out."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape

from arroyo_dagster.model import Span

_COLORS = {
    "read": "#7aa6da",
    "restore": "#b9a3d0",
    "process": "#8cc38c",
    "align": "#e8c35a",
    "watermark": "#e39a5c",
    "handle_checkpoint": "#d9635f",
    "persist": "#b0413e",
    "emit": "#9aa0a6",
}
_OTHER = "#c8c8c8"
_LEFT, _WIDTH, _ROW, _TOP, _MARGIN = 210, 700, 20, 34, 12
_MOST_ROWS = 32


def gantt(spans: Sequence[Span]) -> str:
    """Draw every subtask's steps over time, as an SVG."""
    rows = sorted({(span.stage, span.step == "read", span.subtask) for span in spans}, key=_in_order(spans))
    left_out = len(rows) - _MOST_ROWS
    rows = rows[:_MOST_ROWS]
    start = min((span.start for span in spans), default=0)
    length = max((span.start + span.micros for span in spans), default=0) - start or 1
    height = _TOP + _ROW * (len(rows) + (left_out > 0)) + _MARGIN + 16
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 70}" height="{height}" '
        f'viewBox="0 0 {_LEFT + _WIDTH + 70} {height}" font-family="sans-serif" font-size="11">'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    parts = [opening, *_legend({span.step for span in spans})]
    place = {row: number for number, row in enumerate(rows)}
    for (stage, reads, subtask), number in place.items():
        label = f"{stage}, reader {subtask}" if reads else f"{stage}[{subtask}]"
        y = _TOP + _ROW * number
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#333">{escape(_short(label))}</text>')
    for span in spans:
        row = place.get((span.stage, span.step == "read", span.subtask))
        if row is None:
            continue
        x = _LEFT + _WIDTH * (span.start - start) / length
        width = max(1.5, _WIDTH * span.micros / length)
        parts.append(
            f'<rect x="{x:.1f}" y="{_TOP + _ROW * row + 3}" width="{width:.1f}" height="{_ROW - 6}" '
            f'fill="{_COLORS.get(span.step, _OTHER)}"><title>{escape(span.step)} {_time(span.micros)}</title></rect>'
        )
    if left_out > 0:
        parts.append(f'<text x="{_LEFT}" y="{_TOP + _ROW * len(rows) + 14}" fill="#333">and {left_out} more</text>')
    base = height - 8
    parts += (
        f'<text x="{_LEFT + _WIDTH * part / 4:.0f}" y="{base}" text-anchor="middle" fill="#777">'
        f"{_time(length * part // 4)}</text>"
        for part in range(5)
    )
    return "".join([*parts, "</svg>"])


def as_markdown(svg: str) -> str:
    """The picture as Dagster shows it in a run."""
    data = base64.b64encode(svg.encode()).decode()
    return f"![the barrier's way](data:image/svg+xml;base64,{data})"


def _in_order(spans: Sequence[Span]) -> Callable[[tuple[str, bool, int]], tuple[int, str, bool, int]]:
    """Stages by when they began, readers before subtasks."""
    begun: dict[str, int] = {}
    for span in spans:
        begun[span.stage] = min(span.start, begun.get(span.stage, span.start))
    return lambda row: (begun[row[0]], row[0], not row[1], row[2])


def _legend(steps: Iterable[str]) -> list[str]:
    parts, x = [], _LEFT
    for step, color in _COLORS.items():
        if step in steps:
            parts.append(f'<rect x="{x}" y="10" width="11" height="11" fill="{color}"/>')
            parts.append(f'<text x="{x + 15}" y="20" fill="#333">{step}</text>')
            x += 30 + 7 * len(step)
    return parts


def _short(label: str) -> str:
    return label if len(label) <= 32 else f"{label[:29]}..."


def _time(micros: int) -> str:
    return f"{micros / 1000:.0f} ms" if micros < 1_000_000 else f"{micros / 1_000_000:.1f} s"
