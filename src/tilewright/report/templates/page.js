// Wires the run's data to the charts and tables.

const run = JSON.parse(document.getElementById("run-data").textContent);
const rowsOf = Object.fromEntries(Object.entries(run).map(([name, answer]) => [name, records(answer)]));
const host = (id) => document.getElementById(id);

// `file.py:12: y = x + 1` as the line of code above its place.
function sourceCell(row) {
  const [, place, code] = /^(.*?:\d+): ?(.*)$/s.exec(row.source ?? "") ?? [null, "", row.source ?? "–"];
  return [html("span", { title: code }, code), html("small", { title: place }, place)];
}

function shapeCell(row) {
  const sizes = row.shape.join("×") || "scalar";
  return [row.shape_symbolic ?? sizes, html("small", {}, row.shape_symbolic ? `${sizes} ${row.dtype}` : row.dtype)];
}

function unusedNote(row) {
  if (!row.unused) return [];
  return [html("small", { class: "unused" }, `and ${row.unused_symbolic ? formula(row.unused_symbolic) : count(row.unused)} unused`)];
}

function graph() {
  const graphs = [...new Set(rowsOf.operators.map((op) => op.graph))];
  const panels = host("graph-panels");
  function show(name) {
    const regions = rowsOf.regions.filter((region) => region.graph === name);
    const order = new Map(regions.map((region, index) => [region.name, index]));
    const tintOf = (region) => (order.get(region) ?? 0) % 6;
    const before = rowsOf.operators.filter((op) => op.graph === name && op.stage === "before");
    const after = rowsOf.operators.filter((op) => op.graph === name && op.stage === "after");
    const lit = (region) => {
      for (const band of panels.querySelectorAll(".band")) band.classList.toggle("lit", region !== null && band.dataset.region === region);
    };
    panels.replaceChildren(
      panel("Before fusion", before, tintOf, lit),
      panel("After fusion", after.length ? after : planned(before, regions), tintOf, lit));
  }
  if (graphs.length > 1) host("graph-pick").append(choice("Graph", graphs, graphs[0], show));
  host("graph-pick").append(legend(CLASSES.filter((name) => rowsOf.operators.some((op) => op.class === name))));
  if (graphs.length) show(graphs[0]);
}

function panel(title, operators, tintOf, lit) {
  const scroll = html("div", { class: "scroll" });
  const moved = operators.reduce((sum, op) => sum + op.bytes, 0);
  const floor = operators.reduce((sum, op) => sum + (op.floor_us ?? 0), 0);
  fitted(scroll, (width) => drawGraph(width, operators, tintOf, lit));
  return html("div", { class: "panel" }, html("h3", {}, title, html("span", {}, `${operators.length} operators, ${bytes(moved)} moved, floor ${time(floor)}`)), scroll);
}

function operators() {
  const known = (row) => row.provenance === "formula";
  sortable(host("operators-table"), [
    { key: "index", aside: true, label: "#", number: true },
    { key: "name", label: "operator", cell: (row) => [row.name, html("small", {}, row.target)], kind: "code" },
    { key: "class", aside: true, label: "class", cell: (row) => [html("span", { class: `class c-${row.class}` }, row.class), html("small", {}, row.region ? `in ${row.region}` : "")] },
    { key: "graph", aside: true, label: "graph", cell: (row) => [row.graph, html("small", {}, row.stage)] },
    { key: "shape", label: "shape", cell: shapeCell, order: (row) => row.shape.reduce((a, b) => a * b, 1), kind: "nowrap" },
    { key: "reads", label: "reads", number: true, cell: (row) => counted(row.reads, row.reads_symbolic, known(row)) },
    { key: "writes", label: "writes", number: true, cell: (row) => [...counted(row.writes, row.writes_symbolic, known(row)), ...unusedNote(row)] },
    { key: "flops", label: "FLOPs", number: true, cell: (row) => counted(row.flops, row.flops_symbolic, known(row)) },
    { key: "intensity", aside: true, label: "FLOP/B", number: true, cell: (row) => plainNumber(row.intensity) },
    { key: "floor_us", label: "floor", number: true, cell: (row) => [time(row.floor_us), html("small", {}, row.bound ?? ""), html("small", {}, row.predicted_us !== null ? `predicted ${time(row.predicted_us)}` : "")] },
    { key: "measured_us", label: "measured", number: true, cell: (row) => (row.measured_us !== null && row.floor_us > 0 ? [time(row.measured_us), html("small", {}, `${times(row.measured_us / row.floor_us)} floor`)] : time(row.measured_us)) },
    { key: "source", aside: true, label: "source", kind: "source", cell: sourceCell },
  ], rowsOf.operators, { label: "operators", search: true, filters: [{ key: "class", label: "class" }, { key: "graph", label: "graph" }, { key: "stage", label: "stage", first: "before" }] });
}

function decisions() {
  const mark = { taken: "taken", refused: "refused", impossible: "impossible", "tried and lost": "lost" };
  sortable(host("decisions-table"), [
    { key: "verdict", label: "verdict", cell: (row) => html("span", { class: `nowrap v-${mark[row.verdict]}` }, row.verdict) },
    { key: "producer", label: "pair", kind: "code", cell: (row) => [row.producer, html("small", {}, `→ ${row.consumer}`)] },
    { key: "reason", label: "reason", kind: "prose" },
    { key: "bytes_saved", label: "saves", number: true, cell: (row) => (row.bytes_saved ? bytes(row.bytes_saved) : "–") },
    { key: "predicted_us", label: "predicted", number: true, cell: (row) => time(row.predicted_us) },
    { key: "measured_us", label: "measured", number: true, cell: (row) => time(row.measured_us) },
    { key: "passed_by", aside: true, label: "pass" },
    { key: "graph", aside: true, label: "graph" },
    { key: "source", aside: true, label: "source", kind: "source", cell: sourceCell },
  ], rowsOf.decisions, { label: "decisions", search: true, filters: [{ key: "verdict", label: "verdict" }, { key: "passed_by", label: "pass" }, { key: "graph", label: "graph" }] });
}

// Times that a prediction may be off before it is marked.
const FAR_OFF = 2;
const isFarOff = (row) => Math.max(row.measured_us / row.predicted_us, row.predicted_us / row.measured_us) > FAR_OFF;

function lost() {
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  sortable(host("lost-table"), [
    { key: "name", label: "launch", cell: (row) => [row.launches > 1 ? `${row.launches} × ${row.name}` : row.name, html("small", {}, row.target)], kind: "code" },
    { key: "shape", aside: true, label: "shape", cell: (row) => `[${row.shape.join(", ")}]`, order: (row) => row.shape.reduce((a, b) => a * b, 1), kind: "nowrap" },
    { key: "measured_us", label: "measured", number: true, cell: (row) => time(row.measured_us) },
    { key: "floor_us", label: "floor", number: true, cell: (row) => [time(row.floor_us), html("small", {}, row.bound ?? "")] },
    { key: "lost_us", label: "lost", number: true, cell: (row) => time(row.lost_us) },
    { key: "share", label: "of all", number: true, cell: (row) => html("span", { class: row.share > 0.01 && row.why === null ? "failed" : "" }, percent(row.share)) },
    { key: "predicted_us", label: "predicted", number: true, cell: (row) => [time(row.predicted_us), html("small", { class: row.off > FAR_OFF ? "failed" : "" }, row.off > FAR_OFF ? `${times(row.off)} off` : "")] },
    { key: "why", label: "why", kind: "prose", cell: (row) => row.why ?? "no decision says why" },
    { key: "graph", aside: true, label: "graph" },
    { key: "source", aside: true, label: "source", kind: "source", cell: sourceCell },
  ], rowsOf.lost, { label: "launches that lose time" });
}

function predicted() {
  sortable(host("predicted-table"), [
    { key: "what", label: "what" },
    { key: "name", label: "name", kind: "code" },
    { key: "predicted_us", label: "predicted", number: true, cell: (row) => time(row.predicted_us) },
    { key: "measured_us", label: "measured", number: true, cell: (row) => time(row.measured_us) },
    { key: "ratio", label: "ratio", number: true, cell: (row) => html("span", { class: isFarOff(row) ? "failed" : "" }, times(row.measured_us / row.predicted_us)), order: (row) => row.measured_us / row.predicted_us },
  ], rowsOf.predicted, { label: "predictions" });
}

function verified() {
  const error = (key, label) => ({ key, label, number: true, cell: (row) => scientific(row[key]) });
  sortable(host("verified-table"), [
    { key: "ok", label: "holds", cell: (row) => html("span", { class: row.ok ? "ok" : "failed" }, row.ok ? "yes" : "no"), order: (row) => Number(row.ok) },
    { key: "direction", label: "direction" },
    { key: "tensor", label: "tensor", kind: "code" },
    { key: "dtype", label: "dtype" },
    error("error", "error"), error("eager_error", "eager's"), error("bound", "bound"),
    error("max_error", "largest"), error("eager_max_error", "eager's"), error("max_bound", "bound"),
  ], rowsOf.verified, { label: "verified tensors", search: rowsOf.verified.length > 20 });
}

// How long a row took beside the slowest of its group.
function barCell(row) {
  const group = rowsOf.speedups.filter((other) => ["suite", "case", "direction"].every((key) => other[key] === row[key]));
  const bar = html("span", { class: row.impl.startsWith("tilewright") ? "bar ours" : "bar" });
  bar.style.width = `${(100 * row.median_us) / Math.max(...group.map((other) => other.median_us))}%`;
  return bar;
}

function measurements() {
  sortable(host("measurements-table"), [
    { key: "suite", aside: true, label: "suite" },
    { key: "case", label: "case" },
    { key: "direction", aside: true, label: "direction" },
    { key: "impl", label: "implementation", cell: (row) => html("span", { class: row.impl === "tilewright" ? "strong" : "" }, row.impl) },
    { key: "median_us", label: "median", number: true, cell: (row) => time(row.median_us) },
    { key: "median_us", label: "", kind: "bars", cell: barCell },
    { key: "p20_us", label: "p20–p80", number: true, cell: (row) => `${time(row.p20_us)} – ${time(row.p80_us)}` },
    { key: "times_eager", label: "× eager", number: true, cell: (row) => times(row.times_eager) },
    { key: "times_inductor", label: "× Inductor", number: true, cell: (row) => times(row.times_inductor) },
    { key: "peak_bytes", label: "peak memory", number: true, cell: (row) => bytes(row.peak_bytes) },
    { key: "of_ceiling", aside: true, label: "of ceiling", number: true, cell: (row) => (row.of_ceiling === null ? "–" : `${Math.round(row.of_ceiling * 100)} %`) },
    { key: "repeats", aside: true, label: "repeats", number: true },
  ], rowsOf.speedups, { label: "measurements" });
}

function ceilings() {
  sortable(host("ceilings-table"), [
    { key: "device", label: "device" },
    { key: "kind", label: "kind" },
    { key: "dtype", label: "dtype", cell: (row) => row.dtype || "–" },
    { key: "value", label: "value", number: true, cell: (row) => `${plainNumber(row.value)} ${row.unit === "us" ? "µs" : row.unit}` },
    { key: "origin", label: "origin" },
  ], rowsOf.ceilings, { label: "ceilings" });
}

for (const [name, spec] of Object.entries(JSON.parse(host("charts-data").textContent))) chart(`${name}-chart`, spec, { [name]: rowsOf[name] });
if (host("ceilings-table")) ceilings();
if (host("graph")) graph();
if (host("operators")) operators();
if (host("decisions")) decisions();
if (host("lost")) lost();
if (host("predicted")) predicted();
if (host("verified")) verified();
if (host("measurements")) measurements();
