// Wires the run's data to the charts and tables.

const run = JSON.parse(document.getElementById("run-data").textContent);
const rowsOf = Object.fromEntries(Object.entries(run).map(([name, answer]) => [name, records(answer)]));
const host = (id) => document.getElementById(id);

// `file.py:12: y = x + 1` as the line of code above its place.
function sourceCell(row) {
  const [, place, code] = /^(.*?:\d+): ?(.*)$/s.exec(row.source ?? "") ?? [null, "", row.source ?? "–"];
  return [html("span", { title: code }, code), html("small", { title: place }, place)];
}

// `folder/file.py:12` as `file.py:12` above its folder.
function placeCell(row) {
  const [, folder, file] = /^(.*\/)?(.*)$/s.exec(row.source ?? "–");
  return [html("span", { title: row.source }, file), ...(folder ? [html("small", { title: row.source }, folder)] : [])];
}

function shapeCell(row) {
  const sizes = row.shape.join("×") || "scalar";
  return [row.shape_symbolic ?? sizes, html("small", {}, row.shape_symbolic ? `${sizes} ${row.dtype}` : row.dtype)];
}

function unusedNote(row) {
  if (!row.unused) return [];
  return [html("small", { class: "unused" }, `and ${row.unused_symbolic ? formula(row.unused_symbolic) : count(row.unused)} unused`)];
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

// Columns that hold names as programs write them, that hold sentences, and that a narrow window leaves out.
const CODE = new Set(["operator", "shapes", "name", "kernel", "stack", "launch", "tensor", "pair"]);
const PROSE = new Set(["why", "reason", "action"]);
const ASIDE = new Set(["graph", "pass", "shape", "suite", "direction", "repeats", "of_ceiling_percent", "max_error", "eager_max_error", "max_bound", "of_all_percent", "times_off"]);
const MOST_CHOICES = 8;
const FEW_ROWS = 12;

function viewColumn(key, rows) {
  const [, show] = unitOf(key);
  const values = rows.map((row) => row[key]);
  const number = show !== null || values.some((value) => typeof value === "number");
  const label = labelOf(key);
  // A line of code with its place, or the place alone.
  if (key === "source") return values.some((value) => /:\d+: /.test(value)) ? { key, label, kind: "source", aside: true, cell: sourceCell } : { key, label, kind: "source", cell: placeCell };
  if (number) {
    const write = show ?? given((value) => (Number.isInteger(value) ? count(value) : plainNumber(value)));
    return { key, label, number, aside: ASIDE.has(key), cell: (row) => write(row[key]) };
  }
  const plain = values.every((value) => String(value ?? "").length <= 24) ? "plain word" : "plain";
  if (PROSE.has(key)) return { key, label, aside: ASIDE.has(key), kind: "prose", cell: (row) => prose(row[key]) };
  return { key, label, aside: ASIDE.has(key), kind: CODE.has(key) ? "code" : plain };
}

function viewTable(id, answer) {
  const rows = records(answer);
  if (!rows.length) return;
  // Without a device, or ceilings, whole columns are empty.
  const keys = answer.columns.filter((key) => key !== "marked" && rows.some((row) => row[key] !== null));
  const choices = keys.filter((key) => !CODE.has(key) && !PROSE.has(key) && rows.every((row) => typeof row[key] === "string") && new Set(rows.map((row) => row[key])).size <= MOST_CHOICES);
  sortable(document.querySelector(`[data-view=${id}]`), keys.map((key) => viewColumn(key, rows)), rows, {
    label: id, search: rows.length > FEW_ROWS, filters: rows.length > FEW_ROWS ? choices.map((key) => ({ key, label: labelOf(key) })) : [],
  });
}

for (const [id, answer] of Object.entries(run)) if (document.querySelector(`[data-view=${id}]`)) viewTable(id, answer);
for (const [name, spec] of Object.entries(JSON.parse(host("charts-data").textContent))) chart(`${name}-chart`, spec, { [name]: rowsOf[name] });
const graphs = JSON.parse(host("graphs-data").textContent);
if (graphs.length) graph(graphs);
if (host("operators")) operators();
