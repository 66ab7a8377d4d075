// Wires the run's trace to its drawings and tables.

function trace() {
  const data = JSON.parse(host("trace-data").textContent);
  timeline(openTimeline(data.timeline));
  for (const table of data.tables) if (table.rows.length) answerTable(table);
  if (data.flames.length) flameGraphs(data.flames);
  if (data.memory.length) allocators(data.memory, data.steps);
}

// How a column is written follows from the end of its name.
const UNITS = [
  [/_ns$/, (ns) => nanos(ns)],
  [/_us$/, (us) => time(us)],
  [/_ms$/, (ms) => time(ms === null ? null : ms * 1000)],
  [/bytes$/, (size) => bytes(size)],
  [/percent$/, given((part) => `${part.toFixed(1)} %`)],
];

// Columns that hold names as programs write them; the others hold words.
const CODE = new Set(["operator", "shapes", "source", "name", "kernel", "stack"]);

function kindOf(key, rows) {
  if (CODE.has(key)) return "code";
  return rows.every((row) => String(row[key] ?? "").length <= 24) ? "plain word" : "plain";
}

function answerTable(table) {
  const rows = records(table);
  // Without a device, or ceilings, whole columns are empty.
  const columns = table.columns.filter((key) => rows.some((row) => row[key] !== null)).map((key) => {
    const [ending, show] = UNITS.find(([pattern]) => pattern.test(key)) ?? [null, null];
    const number = show !== null || rows.some((row) => typeof row[key] === "number");
    const label = (ending && key !== "percent" ? key.replace(/_(ns|us|ms|percent)$/, "") : key).replaceAll("_", " ");
    const write = show ?? (number ? given((value) => (Number.isInteger(value) ? count(value) : plainNumber(value))) : null);
    return write ? { key, label, number, cell: (row) => write(row[key]) } : { key, label, kind: kindOf(key, rows) };
  });
  if (table.id === "accounting") host("accounting-table").before(...accountingBars(rows));
  sortable(host(`${table.id}-table`), columns, rows, { label: table.title, search: rows.length > 20 });
}

// One bar a device: the mean step, cut where the accounting cuts it.
function accountingBars(rows) {
  return [...new Set(rows.map((row) => row.device))].map((device) => {
    const parts = rows.filter((row) => row.device === device);
    const bar = html("div", { class: "stack tall", role: "img", "aria-label": `The mean step of ${device}` });
    for (const { class: name, percent, time_ms: ms } of parts) {
      const part = html("span", { class: `a-${name.replaceAll(" ", "-")}`, title: `${name}: ${time(ms * 1000)}, ${percent.toFixed(1)} %` }, percent > 7 ? `${name} ${percent.toFixed(0)} %` : "");
      part.style.width = `${percent}%`;
      bar.append(part);
    }
    return html("div", {}, html("h3", {}, device), bar);
  });
}

if (host("trace-data")) trace();
