"""The graph before and after fusion as charts of the page: a row for each operator, in the order they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.report.charts import class_colour, spec_of

Rows = Sequence[Mapping[str, Any]]

_ROW_PIXELS = 24
_FEWEST_LANES = 12
"""Lanes that have room even where fewer are taken, so that they are not drawn far apart."""


def graph_charts(operators: Rows) -> list[dict[str, Any]]:
    """A chart for each graph and stage: its `spec`, the `lanes` of its operators, and `edges`, the places of both ends.

    Dataset `nodes` has `row`, `foot`, `mid`, `lane`, `name`, `shape`, `floor`, `class` and `region`; `edges` has three
    points for each edge, with `edge`, `point`, `lane` and `mid`.
    """
    found = []
    for graph in dict.fromkeys(str(operator["graph"]) for operator in operators):
        for stage in ("before", "after"):
            rows = [operator for operator in operators if (operator["graph"], operator["stage"]) == (graph, stage)]
            lanes, edges = lay_out(rows)
            spec = _chart(rows, 1 + max(lanes, default=0))
            found.append({"graph": graph, "stage": stage, "lanes": lanes, "edges": edges, "spec": spec})
    return found


def lay_out(operators: Rows) -> tuple[list[int], list[tuple[int, int]]]:
    """The lane of each operator, which its value keeps until its last reader, and the edges (writer, reader).

    An operator takes the lane of the first value that it is the last to read, else the leftmost free one.

    >>> names = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    >>> lay_out([{"name": name, "inputs": inputs} for name, inputs in names.items()])
    ([0, 1, 0, 1], [(0, 1), (0, 2), (1, 3), (2, 3)])
    """
    place: dict[str, int] = {}
    sources: list[list[int]] = []
    last = list(range(len(operators)))
    for index, operator in enumerate(operators):
        sources.append([place[name] for name in dict.fromkeys(operator["inputs"]) if name in place])
        for source in sources[-1]:
            last[source] = index
        place[operator["name"]] = index
    lanes: list[int] = []
    until: list[int] = []
    for index, reads in enumerate(sources):
        inherited = (lanes[source] for source in reads if last[source] == index)
        free = (lane for lane, end in enumerate(until) if end < index)
        lane = next(inherited, next(free, len(until)))
        until[lane : lane + 1] = [last[index]]
        lanes.append(lane)
    return lanes, [(source, index) for index, reads in enumerate(sources) for source in reads]


def _chart(operators: Rows, lanes: int) -> dict[str, Any]:
    import altair as alt

    def across(share: float) -> Any:
        return alt.ExprRef(f"{share} * width")

    nodes, depth = alt.NamedData("nodes"), alt.Scale(domain=[0, len(operators)], reverse=True, nice=False)
    row, middle = alt.Y("row:Q", axis=None, scale=depth), alt.Y("mid:Q", axis=None, scale=depth)
    of_lanes = alt.Scale(domain=[0, max(lanes, _FEWEST_LANES)], range=[12, across(0.26)], nice=False)
    lane = alt.X("lane:Q", axis=None, scale=of_lanes)
    tint = alt.Fill("region:N", scale=alt.Scale(scheme="set2"), legend=None)
    told: dict[str, Any] = {"tooltip": {"content": "data"}}
    name, shape = (
        alt.Chart(nodes).mark_text(font="monospace", align="left", limit=across(room), opacity=opacity, **told)
        for room, opacity in ((0.34, 1), (0.24, 0.7))
    )
    floor = alt.Chart(nodes).mark_text(align="right", opacity=0.7, **told)
    texts = [
        name.encode(x=alt.value(across(0.28)), text="name:N"),
        shape.encode(x=alt.value(across(0.63)), text="shape:N"),
        floor.encode(x=alt.value(across(0.99)), text="floor:N"),
    ]
    layers = [
        alt.Chart(nodes)
        .mark_rect(opacity=0.3, **told)
        .encode(
            x=alt.value(0),
            x2=alt.value("width"),
            y=row,
            y2="foot:Q",
            fill=alt.when("isValid(datum.region)").then(tint).otherwise(alt.value("transparent")),
        ),
        alt.Chart(alt.NamedData("edges"))
        .mark_line(strokeWidth=1.4, opacity=0.6)
        .encode(x=lane, y=middle, detail="edge:N", order="point:Q"),
        alt.Chart(nodes)
        .mark_point(filled=True, size=60, opacity=1, **told)
        .encode(x=lane, y=middle, color=class_colour([str(operator["class"]) for operator in operators], "class")),
        *(text.encode(y=middle) for text in texts),
    ]
    return spec_of(alt.layer(*layers), height=max(len(operators), 1) * _ROW_PIXELS)
