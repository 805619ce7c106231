"""The picture of the barrier's way."""

import base64
from xml.etree import ElementTree as ET

import pytest

from arroyo_dagster.model import Span
from arroyo_dagster.orchestration.gantt import as_markdown, gantt

SVG = "{http://www.w3.org/2000/svg}"
STEPS = ("read", "restore", "process", "align", "watermark", "handle_checkpoint", "persist", "emit")


def spans(subtasks: int, stage: str = "stats", start: int = 1_000_000) -> list[Span]:
    return [
        Span(stage, subtask, step, start + place * 1000, 900)
        for subtask in range(subtasks)
        for place, step in enumerate(STEPS)
    ]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314 - we have made it


def bars(svg: str) -> list[ET.Element]:
    return [element for element in ET.fromstring(svg).iter(f"{SVG}rect") if len(element)]  # noqa: S314


def test_every_step_of_every_subtask_is_a_bar_with_its_name_and_time() -> None:
    svg = gantt(spans(2))
    assert len(bars(svg)) == 2 * len(STEPS)
    titles = {title.text for bar in bars(svg) for title in bar}
    assert "handle_checkpoint 1 ms" in titles
    assert {"stats[0]", "stats[1]", "stats, reader 0", "stats, reader 1"} <= set(texts(svg))
    assert {*STEPS} <= set(texts(svg))


def test_bars_lie_where_their_time_is() -> None:
    svg = gantt([Span("a", 0, "process", 0, 500_000), Span("a", 0, "persist", 500_000, 500_000)])
    first, second = bars(svg)
    assert float(first.attrib["x"]) + float(first.attrib["width"]) == pytest.approx(float(second.attrib["x"]), abs=0.2)
    assert first.attrib["y"] == second.attrib["y"]
    assert first.attrib["fill"] != second.attrib["fill"]
    assert {"0 ms", "250 ms", "500 ms", "750 ms", "1.0 s"} <= set(texts(svg))


def test_stages_are_in_the_order_in_which_they_began() -> None:
    svg = gantt([*spans(1, "late", 9_000_000), *spans(1, "early", 1_000_000)])
    assert [text for text in texts(svg) if "[0]" in text] == ["early[0]", "late[0]"]


def test_of_a_thousand_subtasks_some_are_drawn_and_the_rest_counted() -> None:
    svg = gantt(spans(1000))
    assert "and 1968 more" in texts(svg)  # each has a row as a reader, and one as a subtask
    assert len(svg) < 100_000
    assert len(as_markdown(svg)) < 150_000


def test_of_many_stages_is_bounded_too() -> None:
    svg = gantt([span for number in range(200) for span in spans(3, f"stage_{number}", 1_000_000 * (number + 1))])
    assert len(svg) < 100_000


@pytest.mark.parametrize("name", ["a<b>&\"c'", "</text><script>alert(1)</script>", "ä😀", "x" * 100])
def test_names_are_escaped_and_cut(name: str) -> None:
    svg = gantt([Span(name, 0, name, 0, 10)])
    [label] = [text for text in texts(svg) if text.startswith(name[:3])]
    assert label == (f"{name}[0]" if len(name) < 29 else f"{name[:29]}...")
    assert "<script>" not in svg


def test_of_nothing_is_a_picture_too() -> None:
    assert bars(gantt([])) == []


def test_of_no_time_at_all_divides_by_nothing() -> None:
    assert len(bars(gantt([Span("a", 0, "align", 5, 0)]))) == 1


def test_as_markdown_is_the_same_picture() -> None:
    svg = gantt(spans(1))
    markdown = as_markdown(svg)
    prefix = "![the barrier's way](data:image/svg+xml;base64,"
    assert markdown.startswith(prefix)
    assert base64.b64decode(markdown.removeprefix(prefix).removesuffix(")")).decode() == svg
