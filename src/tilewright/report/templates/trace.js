// Wires the run's trace to its charts and tables.

function trace() {
  const data = JSON.parse(host("trace-data").textContent);
  timeline(data.timeline, data.charts.timeline);
  for (const [id, answer] of Object.entries(data.tables)) viewTable(id, answer);
  if (data.tables.accounting) document.querySelector("[data-view=accounting]").before(...accountingBars(records(data.tables.accounting)));
  data.flames.forEach((graph, place) => flame(graph, data.charts.flames[place], place));
  data.memory.forEach((device, place) => allocator(device, data.steps, data.charts.allocated, place, besideInference(data.memory, device)));
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
