"""A self-contained page of a run, without network or server."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewright.records.atomic_file import ensure_writable, write_document
from tilewright.records.cache import build, key_of
from tilewright.records.errors import CacheError
from tilewright.records.measurement import Ceiling, Measurement
from tilewright.report.charts import live_memory, roofline
from tilewright.report.graph_chart import graph_charts
from tilewright.report.optimised_findings import findings, outcome
from tilewright.report.page_budget import harmless_json
from tilewright.report.quantity import duration, nbytes, ratio
from tilewright.report.queries import DRAWN, Answer, ask_all
from tilewright.report.traced import traced
from tilewright.report.views import PROGRAM, TRACE
from tilewright.store import read_program, read_rows
from tilewright.store.query import reading

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

_SCRIPTS = (
    *("dom.js", "table.js", "draw.js", "graph.js", "page.js"),
    *("timeline.js", "perfetto.js", "flame.js", "allocator.js", "trace.js"),
)
_STYLES = ("page.css", "trace.css")
# A speedup of at least this is within the noise of 1.
_NEVER_BELOW = 0.98
_CODE = re.compile("`([^`]+)`")
_THINNEST_PERCENT, _MOST_PARTS = 0.5, 8


class Headline(NamedTuple):
    """One figure at the head of the page, and what it means."""

    figure: str
    meaning: str
    detail: str = ""
    good: bool = True


def write_page(run: Path, out: Path) -> Path:
    """Write the page of `run` to `out` atomically; returns `out`.

    Raises:
        StoreError: the run is missing or damaged, or `out` cannot be written.
    """
    ensure_writable(out, "page")
    # DuckDB takes 30 ms to open a file, and 1 ms where another connection to it is open.
    with reading(run):
        trace = traced(run)
        island = "" if trace is None else harmless_json(trace)
        answers = ask_all(run, taken=len(island))
        rows = read_rows(run, Measurement)
        words = [*outcome(rows), *findings(read_program(run), rows, read_rows(run, Ceiling))] if rows else []
    return write_document(out, render_page(answers, trace, island, words), "page")


def render_page(
    answers: dict[str, Answer],
    trace: Mapping[str, Any] | None = None,
    trace_island: str = "",
    words: Sequence[str] = (),
) -> str:
    """The page as HTML. Its content security policy allows only the script and style with the given hashes.

    `trace` is what `traced` gives, and `trace_island` the same as JSON that is harmless in a page. `words` are
    sentences on what is slow.
    """
    from markupsafe import Markup

    style, drawing = "\n".join(map(asset, _STYLES)), _vega()
    script = '"use strict";\n(() => {\n' + "\n".join(map(asset, _SCRIPTS)) + "})();\n"
    return template("page.html.j2").render(
        run=answers["run"].records()[0],
        machine=answers["machine"].records(),
        dims=answers["dims"].records(),
        devices=list(dict.fromkeys(row["device"] for row in answers["ceilings"].records())),
        fallbacks=answers["fallbacks"].records(),
        headlines=_headlines(answers, trace),
        words=words,
        step_bar=_step_bar(trace),
        answers=answers,
        views=[view for view in PROGRAM if answers[view.id].rows],
        traced_views=[view for view in TRACE if trace and view.id in trace["tables"]],
        # An empty run shows empty sections; a run with only a trace does not.
        program=bool(answers["operators"].rows) or trace is None,
        trace=trace,
        trace_island=Markup(trace_island),
        script=Markup(script),
        script_hash=policy_hash(script),
        drawing=Markup(drawing),
        drawing_hash=policy_hash(drawing),
        style=Markup(style),
        style_hash=policy_hash(style),
        island=Markup(
            harmless_json({name: asdict(answers[name]) for name in [*DRAWN, *(view.id for view in PROGRAM)]})
        ),
        charts=Markup(harmless_json(_charts(answers))),
        graphs=Markup(harmless_json(graph_charts(answers["operators"].records()))),
    )


def template(name: str) -> Template:
    """A template, which escapes what it is given and refuses what it is not."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tilewright.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    return environment.get_template(name)


def prose(sentence: str) -> Markup:
    """A sentence as HTML: `code` between backticks, which a terminal shows as they are."""
    from markupsafe import Markup, escape

    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(sentence))))


def _step_bar(trace: Mapping[str, Any] | None) -> list[dict[str, object]]:
    """The classes of the first process's step, in thousandths of its bar; those too thin to be seen are left out."""
    host = trace["tables"].get("host") if trace else None
    if not host or not host["rows"]:
        return []
    rows = [dict(zip(host["columns"], row, strict=True)) for row in host["rows"]]
    start, parts = 0.0, []
    for row in (row for row in rows if row["rank"] == rows[0]["rank"]):
        share = float(row["percent"])
        if share >= _THINNEST_PERCENT:
            label = f"{row['class']} {share:.0f} %"
            parts.append({"start": round(start, 1), "width": round(10 * share, 1), "label": label})
        start += 10 * share
    return parts[:_MOST_PARTS]


def _vega() -> str:
    """Vega, Vega-Lite and their embedding as one script, kept on disk: bundling takes seconds."""

    def bundle() -> str:
        import vl_convert

        return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")

    key = key_of("vega", version("vl-convert-python"))
    try:
        return build(key, ".js", lambda path: path.write_text(bundle(), "utf-8")).read_text("utf-8")
    except CacheError:
        # A page needs no cache; without one it takes those seconds.
        return bundle()


def _charts(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """The charts of a program, each with the name of its answer."""
    rows = {name: answers[name].records() for name in ("roofline", "ceilings", "memory")}
    charts = {"roofline": roofline(rows["roofline"], rows["ceilings"])} if rows["roofline"] else {}
    if rows["memory"]:
        charts["memory"] = live_memory(rows["memory"])
    return charts


def asset(name: str) -> str:
    """The text of a file of `templates/`."""
    return files("tilewright.report").joinpath("templates", name).read_text("utf-8")


def policy_hash(text: str) -> str:
    """The hash of an inline script in a content security policy: `sha256-` and the digest in base64."""
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _headlines(answers: dict[str, Answer], trace: Mapping[str, Any] | None) -> list[Headline]:
    traced = [Headline(*each) for each in trace["headlines"]] if trace else []
    if traced and not answers["operators"].rows:
        return traced
    planned = [*_traffic(answers["summary"].records()), *_memory(answers["peaks"].records()[0])]
    if trace and not trace["fused"]:
        planned = [headline._replace(meaning=f"{headline.meaning}, if fused") for headline in planned]
    return [
        *_speed(answers["measurements"].records()),
        *traced,
        *planned,
        # A profile has no verified tensors.
        *(_numbers(answers["verified"]) if answers["verified"].rows or not traced else []),
    ]


def _speed(rows: list[dict[str, object]]) -> list[Headline]:
    """The speed against each peer, for the widest measured direction: training before forward."""
    ours = [row for row in rows if row["impl"] == "tilewright"]
    order = ("step", "fwd+bwd", "infer", "fwd", "bwd")
    ours.sort(key=lambda row: order.index(str(row["direction"])))
    found = []
    for peer in ("eager", "inductor"):
        for row in ours[:1]:
            times, median = row[f"times_{peer}"], row["median_us"]
            if isinstance(times, float) and isinstance(median, float):
                name = "Inductor" if peer == "inductor" else peer
                change = f"{duration(times * median)} → {duration(median)}"
                meaning = f"speed of {name}, {row['direction']}"
                found.append(Headline(ratio(times), meaning, change, times >= _NEVER_BELOW))
    return found


def _traffic(rows: list[dict[str, object]]) -> list[Headline]:
    before, after = (
        {name: _total(rows, stage, name) for name in ("bytes", "launches", "floor_us")} for stage in ("before", "after")
    )
    if not before["launches"] or not after["launches"]:
        return []
    fewer, lower = after["bytes"] <= before["bytes"], after["floor_us"] <= before["floor_us"]
    moved = f"{nbytes(before['bytes'])} → {nbytes(after['bytes'])}"
    floors = f"{duration(before['floor_us'])} → {duration(after['floor_us'])}"
    return [
        Headline(_change(before["bytes"], after["bytes"]), "bytes moved", moved, fewer),
        Headline(_change(before["floor_us"], after["floor_us"]), "floor", floors, lower),
        Headline(f"{before['launches']:.0f} → {after['launches']:.0f}", "kernel launches"),
    ]


def _memory(peaks: dict[str, object]) -> list[Headline]:
    before, after = peaks["before"], peaks["after"]
    if not isinstance(before, int) or not isinstance(after, int) or not before:
        return []
    return [Headline(_change(before, after), "peak memory", f"{nbytes(before)} → {nbytes(after)}", after <= before)]


def _numbers(verified: Answer) -> list[Headline]:
    rows = verified.records()
    if not rows:
        return [Headline("not verified", "this run compared no numbers", good=False)]
    held = verified.total - sum(not row["ok"] for row in rows)
    meaning = "tensors within the numbers contract"
    return [Headline(f"{held} of {verified.total}", meaning, good=held == verified.total)]


def _total(rows: list[dict[str, object]], stage: str, name: str) -> float:
    values = [row[name] for row in rows if row["stage"] == stage]
    return sum(value for value in values if isinstance(value, int | float))


def _change(before: float, after: float) -> str:
    """A relative change, with a true minus sign."""
    share = (after - before) / before if before else 0.0
    return f"{share:+.0%}".replace("-", "−").replace("%", " %")
