// Wires the run's trace to its charts and tables.

function trace() {
  const data = JSON.parse(host("trace-data").textContent);
  timeline(data.timeline, data.charts.timeline);
  for (const table of data.tables) if (table.rows.length) answerTable(table);
  data.flames.forEach((graph, place) => flame(graph, data.charts.flames[place], place));
  data.memory.forEach((device, place) => allocator(device, data.steps, data.charts.allocated, place, besideInference(data.memory, device)));
}

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
    const [, show] = unitOf(key);
    const number = show !== null || rows.some((row) => typeof row[key] === "number");
    const label = labelOf(key);
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
