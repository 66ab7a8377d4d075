"""The charts of the page as Vega-Lite: their data, named here, and their colours come from the page.

A tooltip's labels are the names of its fields, whose endings are their units.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.records.measurement import rate_figure
from tilewright.report.kinds import KINDS
from tilewright.report.quantity import nbytes

if TYPE_CHECKING:
    import altair

Rows = Sequence[Mapping[str, Any]]

_ROW_PIXELS, _TALLEST = 15, 15_000
"""Heights in pixels of a row, and of all rows: a canvas has at most 32,767 device pixels, up to two per pixel."""
_HEIGHT = 380
_LINE_HEIGHT = 14
"""Pixels, of a label."""
_SLOPES = {"copy": "memory, copied", "cache": "cache, copied"}
"""A line for each level of memory, by the kind of its ceiling."""
# A box of at least this share of the time in view shows its name. Zoomed in, boxes out of view or narrower than half a
# pixel are not drawn.
_NAMED, _NARROWEST = 0.03, 5e-4
_IN_VIEW = "(datum.end >= zoom.begin[0] && datum.begin <= zoom.begin[1] && {})"
_WIDE = "datum.end - datum.begin >= {} * (zoom.begin[1] - zoom.begin[0])"
_FOUND = "find == '' || indexof(lower(datum.name), lower(find)) >= 0"


def boxes(rows: int, seconds: float, what: str, kinds: Sequence[str], curves: bool = False) -> dict[str, Any]:
    """Boxes in `rows` rows over so many seconds, to zoom and to search: a timeline, or a flame graph.

    Dataset `boxes` has `begin` and `end` in seconds, `row`, `foot` and `mid` (its upper and lower edge, its middle),
    `name` and `kind`; `tracks` has `mid` and `name` of the rows' headings; with `curves`, dataset `curves` has `begin`,
    `level`, `foot` and `name`, and `arrows` the ends of the arrows of the box that was clicked.
    """
    import altair as alt

    zoom = alt.selection_interval(name="zoom", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey]")
    find = alt.param(name="find", value="", bind=alt.BindInput(input="search", placeholder=f"Find {what}", name=" "))
    time = alt.X("begin:Q", scale=alt.Scale(nice=False, domain=[0, seconds]), axis=_axis("s", orient="top"))
    depth = alt.Scale(domain=[0, rows], reverse=True, nice=False)
    row, middle = alt.Y("row:Q", axis=None, scale=depth), alt.Y("mid:Q", axis=None, scale=depth)
    base = alt.Chart(alt.NamedData("boxes")).encode(x=time)
    room = "scale('x', datum.end) - scale('x', datum.start) - 6"
    named = _NAMED * seconds
    opacity = alt.when(_FOUND).then(alt.value(0.6)).otherwise(alt.value(0.1))
    start = "isValid(zoom.begin) ? max(datum.begin, zoom.begin[0]) : datum.begin"
    layers: list[Any] = [
        base.transform_filter(f"!isValid(zoom.begin) || {_IN_VIEW.format(_WIDE.format(_NARROWEST))}")
        .mark_rect(clip=True, tooltip={"content": "data"})
        .encode(x2="end:Q", y=row, y2="foot:Q", color=class_colour(kinds), opacity=opacity)
        .add_params(zoom, find),
        base.transform_filter(
            f"isValid(zoom.begin) ? {_IN_VIEW.format(_WIDE.format(_NAMED))} : datum.end - datum.begin >= {named}"
        )
        .transform_calculate(start=start)
        .mark_text(clip=True, align="left", dx=3, fontSize=11, limit=alt.ExprRef(f"max(1, {room})"))
        .encode(x="start:Q", y=middle, text="name:N"),
        alt.Chart(alt.NamedData("tracks"))
        .mark_text(align="right", dx=-8, limit=170, clip=False)
        .encode(x=alt.value(0), y=middle, text="name:N"),
    ]
    if curves:
        level = alt.Y("level:Q", axis=None, scale=depth)
        points = alt.Chart(alt.NamedData("curves")).encode(x=time, y=level, detail="name:N")
        layers.insert(0, points.mark_area(interpolate="step-after", clip=True, opacity=0.4).encode(y2="foot:Q"))
        layers[1] = layers[1].add_params(alt.selection_point(name="pick", fields=["i"]))
        arrows = alt.Chart(alt.NamedData("arrows")).transform_filter(
            "isDefined(pick.i) && (indexof(pick.i, datum.out) >= 0 || indexof(pick.i, datum.into) >= 0)"
        )
        rules = arrows.mark_rule(clip=True, strokeWidth=1.5)
        layers.append(rules.encode(x=time, x2="end:Q", y=middle, y2="foot:Q"))
    return spec_of(alt.layer(*layers), height=min(max(rows, 4) * _ROW_PIXELS, _TALLEST))


def roofline(points: Rows, ceilings: Rows) -> dict[str, Any]:
    """FLOPs per second over FLOPs per byte, both logarithmic, under the machine's ceilings. Dataset: `roofline`."""
    import altair as alt

    shown = [point for point in points if (point["intensity"] or 0) > 0 and (point["TFLOPs"] or 0) > 0]
    stages = list(dict.fromkeys(str(point["shown"]) for point in shown))
    choice = alt.BindRadioSelect(input="radio", options=stages, name=" ")
    stage = alt.param(name="stage", value=stages[-1] if stages else "", bind=choice)
    x = alt.X("intensity:Q", scale=alt.Scale(type="log", nice=False), axis=_decades("FLOPs per byte moved"))
    y = alt.Y("rate:Q", scale=alt.Scale(type="log"), axis=_decades("FLOP/s"))
    base = (
        alt.Chart(alt.NamedData("roofline"))
        .transform_filter("datum.intensity > 0 && datum.TFLOPs > 0 && datum.shown == stage")
        .transform_calculate(
            rate="datum.TFLOPs * 1e12",
            allowed="datum.floor_us > 0 ? datum.flops / datum.floor_us * 1e6 : datum.TFLOPs * 1e12",
            took="datum.measured_us == null ? datum.floor_us : datum.measured_us",
            is_measured="datum.measured_us != null",
        )
        .encode(x=x)
    )
    colour = class_colour([str(point["operator_class"]) for point in shown], "operator_class")
    tips = ("name:N", "operator_class:N", "graph:N", "intensity:Q", "TFLOPs:Q", "GBps:Q")
    marks = base.mark_point(filled=True).encode(
        y=y,
        size=alt.Size("took:Q", scale=alt.Scale(range=[30, 500]), legend=None),
        color=colour,
        shape=alt.Shape(
            "kind:N", scale=alt.Scale(domain=["operator", "region"], range=["circle", "square"]), legend=None
        ),
        opacity=alt.when("datum.is_measured").then(alt.value(0.8)).otherwise(alt.value(0.3)),
        tooltip=[*tips, "measured_us:Q", "floor_us:Q", "bound:N"],
    )
    stems = base.transform_filter("datum.is_measured").mark_rule(opacity=0.5)
    stems = stems.encode(y=y, y2="allowed:Q", color=colour)
    return spec_of(alt.layer(*_roofs(shown, ceilings, x, y), stems, marks).add_params(stage), height=_HEIGHT)


def _roofs(points: Rows, ceilings: Rows, x: altair.X, y: altair.Y) -> list[Any]:
    """A line for each ceiling: bandwidths rise up to the highest rate, rates begin at the highest bandwidth."""
    import altair as alt

    known = [row for row in ceilings if row["value"] > 0]
    rates = [(f"{row['kind']} {row['dtype']}", row) for row in known if row["unit"] == "TFLOP/s"]
    slopes = [(_SLOPES[row["kind"]], row) for row in known if row["kind"] in _SLOPES and row["unit"] == "GB/s"]
    flops = [float(row["value"]) * 1e12 for _, row in rates]
    bytes_ = [float(row["value"]) * 1e9 for _, row in slopes]
    intensities = [float(point["intensity"]) for point in points]
    if flops and bytes_:
        intensities += [0.1, max(flops) / min(bytes_) * 3]
    if not intensities:
        return []
    low, high = min(intensities), max(intensities)
    lines, slope_names, rate_names = [], [], []
    for name, row in sorted(slopes, key=lambda slope: float(slope[1]["value"])):
        bandwidth = float(row["value"]) * 1e9
        end = min(high, max(flops, default=high * bandwidth) / bandwidth)
        lines += [_on_line(name, row, at, at * bandwidth) for at in (low, end)]
        slope_names.append(_on_line(name, row, low, low * min(bytes_)))
    for name, row in rates:
        rate = float(row["value"]) * 1e12
        begin = max(low, rate / max(bytes_)) if bytes_ else low
        lines += [_on_line(name, row, at, rate) for at in (begin, high)]
        rate_names.append(lines[-1])
    base = alt.Chart(alt.InlineData(values=lines)).encode(x=x, y=y, detail=["name:N", "of:N"])
    dashes = alt.when("datum.of == 'datasheet'").then(alt.value([5, 4])).otherwise(alt.value([1, 0]))
    rates_drawn = [float(point["TFLOPs"]) * 1e12 for point in points] + [end["rate"] for end in lines]
    decades = math.log10(max(rates_drawn) / min(rates_drawn)) + 1
    ratio = 10 ** (_LINE_HEIGHT / _HEIGHT * decades)
    slope_texts, rate_texts = (
        alt.Chart(alt.InlineData(values=_apart(ends, ratio))).encode(x=x, y=y, text="name:N")
        for ends in (slope_names, rate_names)
    )
    names = [
        # Below the lowest slope, where no line crosses them.
        slope_texts.mark_text(align="left", baseline="top", dy=4 + _LINE_HEIGHT * (len(slope_names) - 1)),
        rate_texts.mark_text(align="left", baseline="middle", dx=6),
    ]
    return [base.mark_line(strokeWidth=1.5).encode(strokeDash=dashes), *names]


def _on_line(name: str, ceiling: Mapping[str, Any], intensity: float, rate: float) -> dict[str, Any]:
    label = f"{name} {rate_figure(ceiling['value'], ceiling['unit'])}"
    return {"name": label, "of": ceiling["origin"], "intensity": intensity, "rate": rate}


def _apart(labels: list[dict[str, Any]], ratio: float) -> list[dict[str, Any]]:
    """The labels, each moved up to at least `ratio` times the rate of the one below it, so that none overlap."""
    placed: list[dict[str, Any]] = []
    for label in sorted(labels, key=lambda label: float(label["rate"])):
        placed.append(label | {"rate": max(label["rate"], placed[-1]["rate"] * ratio if placed else 0.0)})
    return placed


def live_memory(points: Rows) -> dict[str, Any]:
    """Live bytes after each step of each graph, before and after fusion. Dataset: `memory`, in the order of steps."""
    import altair as alt

    graphs = list(dict.fromkeys(str(point["graph"]) for point in points))
    # In the legend, since equal peaks of both stages would lie on each other in the chart.
    labels = {
        stage: f"{stage} fusion, peak {nbytes(max(int(p['live_bytes']) for p in points if p['stage'] == stage))}"
        for stage in dict.fromkeys(str(point["stage"]) for point in points)
    }
    colours = ["gray" if stage == "before" else "steelblue" for stage in labels]
    legend = alt.Legend(title=None, orient="top", labelLimit=0, symbolOpacity=1)
    base = (
        alt.Chart(alt.NamedData("memory"))
        .transform_window(step="row_number()", groupby=["graph", "stage"])
        .transform_joinaggregate(steps="max(step)", groupby=["graph", "stage"])
        # Each graph is as wide as the others, whatever its number of steps.
        .transform_calculate(
            part=f"indexof({json.dumps(graphs)}, datum.graph) + (datum.step - 1) / datum.steps",
            peak=f"{json.dumps(labels)}[datum.stage]",
        )
        .encode(
            x=alt.X("part:Q", axis=alt.Axis(title=" then ".join(graphs), labels=False, tickCount=len(graphs))),
            y=alt.Y("live_bytes:Q", axis=_axis("B"), stack=None),
            color=alt.Color("peak:N", scale=alt.Scale(domain=[*labels.values()], range=colours), legend=legend),
        )
    )
    curves = base.mark_area(interpolate="step-after", opacity=0.12, line=True)
    points_ = base.mark_point(filled=True, size=24).encode(tooltip=["name:N", "stage:N", "graph:N", "live_bytes:Q"])
    return spec_of(alt.layer(curves, points_), height=280)


def allocated() -> dict[str, Any]:
    """An allocator's bytes over time. Dataset `allocated` has `begin` in seconds, `what`, `bytes` and `is_peak`."""
    import altair as alt

    base = alt.Chart(alt.NamedData("allocated")).encode(
        x=alt.X("begin:Q", scale=alt.Scale(nice=False), axis=_axis("s")),
        y=alt.Y("bytes:Q", axis=_axis("B"), stack=None),
        color=alt.Color("what:N", legend=alt.Legend(title=None)),
    )
    peak = base.transform_filter("datum.is_peak").transform_calculate(
        label="'peak ' + format(datum.bytes, '.3s') + 'B'"
    )
    return spec_of(
        alt.layer(
            base.mark_area(interpolate="step-after", opacity=0.12, line=True),
            base.mark_point(opacity=0, size=40).encode(tooltip=["what:N", "bytes:Q"]),
            peak.mark_text(dy=-9).encode(text="label:N"),
        ),
        height=240,
    )


def class_colour(kinds: Sequence[str], field: str = "kind") -> Any:
    """The colour of a kind, and a legend of the given ones."""
    import altair as alt

    used = [kind for kind in KINDS if kind in kinds]
    legend = alt.Legend(orient="bottom", title=None, values=used) if used else None
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=KINDS), legend=legend)


def _axis(unit: str, **options: Any) -> Any:
    """An axis with SI prefixes before its unit."""
    import altair as alt

    return alt.Axis(title=None, labelExpr=f"format(datum.value, '~s') + '{unit}'", tickCount=8, **options)


def _decades(title: str) -> Any:
    """A logarithmic axis with labels at powers of ten."""
    import altair as alt

    power = "log(datum.value) / LN10"
    label = "format(datum.value, datum.value < 1 ? '~g' : '~s')"
    return alt.Axis(title=title, labelExpr=f"abs({power} - round({power})) < 1e-6 ? {label} : ''")


def spec_of(chart: Any, height: int) -> dict[str, Any]:
    """As JSON; the page sets the width, padding included."""
    made: dict[str, Any] = chart.properties(height=height).to_dict()
    return made | {"autosize": {"type": "fit-x", "contains": "padding"}, "config": {}}
