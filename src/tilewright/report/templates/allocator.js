// What the allocators held while the trace was recorded, and who held it at the peak.

const PHASES = ["forward", "backward", "optimizer", "other"];

function allocators(devices, steps) {
  const labels = labelsOf(devices);
  let shown = devices[0];
  const redraw = fitted(host("allocator-chart"), (width) => drawAllocator(width, shown));
  function show(label) {
    shown = devices[labels.indexOf(label)];
    redraw();
    host("allocator-phases").replaceChildren(...phaseCards(shown, steps, besideInference(devices, shown)));
    host("allocator-table").replaceChildren();
    holderTable(shown);
  }
  if (devices.length > 1) host("allocator-controls").append(choice("Allocator", labels, labels[0], show));
  show(labels[0]);
}

// A device, with its file where there are several, with its process where that leaves a doubt.
function labelsOf(devices) {
  const named = devices.map((device) => [device.device, device.file].filter(Boolean).join(", "));
  return named.map((label, i) => (named.indexOf(label) === named.lastIndexOf(label) ? label : `${label}, process ${devices[i].process}`));
}

// The same device training in one file and inferring in another.
function besideInference(devices, shown) {
  const other = devices.find((device) => device.device === shown.device && device.training !== shown.training);
  if (!other) return "";
  const [training, inference] = shown.training ? [shown, other] : [other, shown];
  return ` Training peaks at ${bytes(training.peak_bytes)}, inference in ${inference.file || "the same file"} at ${bytes(inference.peak_bytes)}: ${times(training.peak_bytes / Math.max(inference.peak_bytes, 1))} as much.`;
}

function drawAllocator(width, device) {
  const height = 250;
  const frame = { left: 70, right: width - 12, top: 30, bottom: height - 28 };
  const ts = device.allocated.at ??= sums(unpack(device.allocated.ts));
  const values = device.allocated.values;
  const end = Math.max(ts.at(-1), 1);
  const most = Math.max(...values, ...(device.reserved?.values ?? []), 1);
  const unit = niceStep(most / 4);
  const top = Math.ceil((most * 1.04) / unit) * unit;
  const y = (value) => frame.bottom - (value / top) * (frame.bottom - frame.top);
  const x = (ns) => frame.left + (ns / end) * (frame.right - frame.left);
  const drawing = svg("svg", { width, height, "aria-label": `Memory of ${device.device} over time` });
  for (let value = 0; value <= top + unit / 2; value += unit) {
    drawing.append(svg("line", { class: value ? "grid" : "axis", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "soft end", x: frame.left - 8, y: y(value) + 4 }, bytes(value)));
  }
  const step = niceStep(end / 6);
  for (let ns = 0; ns <= end; ns += step) drawing.append(svg("text", { class: "soft middle", x: Math.min(x(ns), frame.right - 14), y: frame.bottom + 18 }, tickLabel(ns, step)));
  if (device.reserved) drawing.append(svg("path", { class: "step before", d: stepPath(sums(unpack(device.reserved.ts)), device.reserved.values, x, y, frame.right) }));
  const path = stepPath(ts, values, x, y, frame.right);
  drawing.append(svg("path", { class: "area after", d: `${path}V${frame.bottom}H${x(ts[0])}Z` }), svg("path", { class: "step after", d: path }));
  const at = Math.min(Math.max(x(device.peak_ns), frame.left + 60), frame.right - 60);
  drawing.append(svg("text", { class: "after middle halo", x: at, y: y(device.peak_bytes) - 9 }, `peak ${bytes(device.peak_bytes)}`));
  const dot = svg("circle", { class: "dot after", cx: x(device.peak_ns), cy: y(device.peak_bytes), r: 3.5, "data-mark": "" });
  drawing.append(dot);
  interactive(drawing, [{ node: dot, info: () => ({ title: `peak of ${device.device}`, rows: [["allocated", bytes(device.peak_bytes)], ["at", nanos(device.peak_ns)]] }) }]);
  drawing.addEventListener("pointermove", (event) => {
    const now = ((event.offsetX - frame.left) / (frame.right - frame.left)) * end;
    const place = firstAbove(ts, now) - 1;
    if (place < 0 || event.target === dot) return;
    const peak = `${share(values[place], device.peak_bytes)} of the peak`;
    showTip({ title: device.device, rows: [["allocated", bytes(values[place])], ["", peak], ["at", nanos(now)]] }, event.clientX, event.clientY);
  });
  return drawing;
}

function stepPath(ts, values, x, y, right) {
  let path = "";
  for (let i = 0; i < ts.length; i += 1) path += i ? `H${x(ts[i]).toFixed(1)}V${y(values[i]).toFixed(1)}` : `M${x(ts[0]).toFixed(1)} ${y(values[0]).toFixed(1)}`;
  return `${path}H${right}`;
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

function holderTable(device) {
  sortable(host("allocator-table"), [
    { key: "operator", label: "operator", kind: "code" },
    { key: "phase", label: "phase", cell: (row) => (row.count ? row.phase : "–") },
    { key: "bytes", label: "at the peak", number: true, cell: (row) => bytes(row.bytes) },
    { key: "bytes", label: "share", number: true, cell: (row) => share(row.bytes, device.peak_bytes) },
    { key: "count", label: "allocations", number: true, cell: (row) => (row.count ? count(row.count) : "–") },
  ], device.holders, { label: "what held the peak", search: device.holders.length > 20, filters: [{ key: "phase", label: "phase" }] });
}
