// What each allocator held while the trace was recorded, and who held it at the peak.

const PHASES = ["forward", "backward", "optimizer", "other"];

function allocator(device, steps, spec, place, beside) {
  const [id, table] = [`allocator-${place}`, html("div")];
  const name = [device.device, device.file, device.file && `process ${device.process}`].filter(Boolean).join(", ");
  host("allocator-charts").append(html("h3", {}, name), html("div", { id, class: "chart" }), ...phaseCards(device, steps, beside), table);
  const curve = (what, { ts, values }) => ts.map((ns, i) => ({ what, begin: ns / 1e9, bytes: values[i], is_peak: false }));
  const peak = { what: "allocated", begin: device.peak_ns / 1e9, bytes: device.peak_bytes, is_peak: true };
  const rows = [...curve("allocated", device.allocated), peak, ...(device.reserved ? curve("reserved", device.reserved) : [])];
  chart(id, spec, { allocated: rows.sort((a, b) => a.begin - b.begin) });
  holderTable(device, table);
}

// The same device training in one file and inferring in another.
function besideInference(devices, shown) {
  const other = devices.find((device) => device.device === shown.device && device.training !== shown.training);
  if (!other) return "";
  const [training, inference] = shown.training ? [shown, other] : [other, shown];
  return ` Training peaks at ${bytes(training.peak_bytes)}, inference in ${inference.file || "the same file"} at ${bytes(inference.peak_bytes)}: ${times(training.peak_bytes / Math.max(inference.peak_bytes, 1))} as much.`;
}

// Each phase: its peak, what it allocated, and how much of that lived on when it ended.
function phaseCards(device, steps, beside) {
  const held = new Map(PHASES.map((phase) => [phase, device.holders.filter((each) => each.phase === phase && each.count).reduce((sum, each) => sum + each.bytes, 0)]));
  const before = device.holders.filter((each) => !each.count).reduce((sum, each) => sum + each.bytes, 0);
  const bar = html("div", { class: "stack", role: "img", "aria-label": "The peak by phase" });
  for (const [phase, size] of [["before", before], ...held]) {
    if (size <= 0) continue;
    const part = html("span", { class: `p-${phase}`, title: `${phase === "before" ? "allocated before the profile" : phase}: ${bytes(size)}` });
    part.style.width = `${(100 * size) / Math.max(device.peak_bytes, 1)}%`;
    bar.append(part);
  }
  const kept = device.phases.find((each) => each.phase === "forward")?.kept ?? 0;
  const words = device.training
    ? `This program trains: forward keeps ${bytes(kept / Math.max(steps, 1))}${steps ? " a step" : ""} for backward, which inference would free.`
    : "This program has no backward pass and no optimizer: what forward allocates, it may free at once.";
  const rows = device.phases.map((each) => html("li", {}, html("i", { class: `p-${each.phase}` }), html("b", {}, each.phase),
    html("span", {}, `at most ${bytes(each.peak)} live`), html("span", {}, `${bytes(held.get(each.phase))} of the peak`), html("span", {}, `${bytes(each.allocated)} allocated, ${bytes(each.kept)} outlived it`)));
  if (before) rows.unshift(html("li", {}, html("i", { class: "p-before" }), html("b", {}, "before the profile"), html("span", {}, ""), html("span", {}, `${bytes(before)} of the peak`), html("span", {}, "weights, inputs, optimizer state")));
  return [bar, html("ul", { class: "phases" }, ...rows), html("p", { class: "note" }, words, beside, leftOut(device))];
}

const leftOut = (device) => (device.left_out ? ` The ${count(device.left_out)} smallest holders are left out of the table.` : "");

function holderTable(device, table) {
  sortable(table, [
    { key: "operator", label: "operator", kind: "code" },
    { key: "phase", label: "phase", cell: (row) => (row.count ? row.phase : "–") },
    { key: "bytes", label: "at the peak", number: true, cell: (row) => bytes(row.bytes) },
    { key: "bytes", label: "share", number: true, cell: (row) => share(row.bytes, device.peak_bytes) },
    { key: "count", label: "allocations", number: true, cell: (row) => (row.count ? count(row.count) : "–") },
  ], device.holders, { label: "what held the peak", search: device.holders.length > 20, filters: [{ key: "phase", label: "phase" }] });
}
