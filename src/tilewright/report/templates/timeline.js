// Listens to wheel, pointer and keys, searches, and tells about the selected slice.

const HEIGHT = 560;

function timeline(model) {
  const canvas = html("canvas", { tabindex: "0", role: "application", "aria-label": `Timeline of ${count(model.kept.slices)} slices: W and S zoom, A and D move, arrows select`, class: "timeline" });
  const details = html("div", { class: "details", role: "status" });
  const view = new TimelineView(model, canvas);
  const select = (slice, reveal = false) => {
    view.selected = slice;
    if (reveal && slice >= 0) bringIntoView(view, slice);
    details.replaceChildren(...(slice < 0 ? [hint(model)] : describeSlice(model, slice, (other) => select(other, true))));
    view.draw();
  };
  const find = searchBox(view, select);
  host("timeline-controls").append(find.box, ...switches(view, find.again), perfettoButton(model, document.title));
  host("timeline-legend").append(legend(kindsOf(model).map((kind) => [kind, KIND_NAMES[kind] ?? kind])));
  host("timeline-chart").append(canvas, details);
  const fit = () => view.resize(host("timeline-chart").clientWidth, Math.min(HEIGHT, view.top + view.plan.height + 8));
  view.fit = fit;
  new ResizeObserver(fit).observe(host("timeline-chart"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { view.recolour(); view.draw(); });
  byWheel(view, canvas);
  byPointer(view, canvas, select);
  byKeys(view, canvas, select);
  select(-1);
  return view;
}

const KIND_NAMES = { launch: "launch", wait: "synchronisation", range: "range", python: "Python" };
const kindsOf = (model) => KINDS.filter((kind) => model.kinds.includes(kind));

function hint(model) {
  const { slices, merged, blocks, shortest_ns: shortest, whole_ns: whole, left_out: left, without_arguments: without } = model.kept;
  const parts = [`${count(slices)} slices over ${nanos(model.span)}.`];
  if (merged) parts.push(`From ${nanos(Math.max(whole[0], 0))} to ${nanos(whole[1])}, where the axis is marked, every slice is drawn; elsewhere ${count(merged)} slices shorter than ${nanos(shortest)} are drawn as ${count(blocks)} flat blocks of neighbours.`);
  if (model.counters.some((counter) => counter.points > counter.values.length)) parts.push("Long curves are thinned to their extremes.");
  if (left) parts.push(`${count(left)} slices lie deeper than the rows drawn here, or on quieter tracks.`);
  if (without) parts.push(`Arguments of ${count(without)} short slices are left out to keep this page small.`);
  if (merged || left || without) parts.push("The run has all of them: tilewright sql \"FROM slice\".");
  parts.push("Ctrl and the wheel zoom, dragging moves, W A S D too; F fits the selected slice, Home shows everything.");
  return html("p", { class: "note" }, parts.join(" "));
}

function switches(view, changed) {
  const { model } = view;
  const made = [];
  if (model.kinds.includes(PYTHON)) {
    const box = html("input", { type: "checkbox", id: "timeline-python" });
    box.addEventListener("change", () => { view.withPython = box.checked; changed(); view.lay(); view.fit(); });
    made.push(html("label", { class: "tick" }, box, "Python frames"));
  }
  const whole = html("button", { type: "button", class: "plain" }, "Whole trace");
  whole.addEventListener("click", () => view.show(0, model.span));
  if (!model.kept.merged) return [...made, whole];
  const detail = html("button", { type: "button", class: "plain" }, "Part with every slice");
  detail.addEventListener("click", () => view.show(...model.kept.whole_ns));
  return [...made, whole, detail];
}

// As in Perfetto: the wheel scrolls, with Ctrl it zooms, with Shift it moves through time. At the end of
// the tracks, or before a click into the timeline, the page scrolls on.
function byWheel(view, canvas) {
  canvas.addEventListener("wheel", (event) => {
    const size = event.deltaMode === 1 ? 16 : 1;
    const [dx, dy] = [event.deltaX * size, event.deltaY * size];
    if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(Math.max(-1, Math.min(1, dy * 0.004))), event.offsetX);
    else if (event.shiftKey) view.move(dy || dx, 0);
    else if (Math.abs(dx) > Math.abs(dy)) view.move(dx, 0);
    else if (document.activeElement === canvas && canScroll(view, dy)) view.move(0, dy);
    else return;
    event.preventDefault();
  }, { passive: false });
}

const canScroll = (view, dy) => (dy > 0 ? view.scroll < view.deepest : view.scroll > 0);

function byPointer(view, canvas, select) {
  let last = null, moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    last = [event.clientX, event.clientY];
    moved = 0;
    hideTip();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (last) {
      const [dx, dy] = [last[0] - event.clientX, last[1] - event.clientY];
      moved += Math.abs(dx) + Math.abs(dy);
      last = [event.clientX, event.clientY];
      view.move(dx, dy);
    } else hover(view, canvas, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (last && moved < 4) {
      const { slice = -1, track } = view.under(event.offsetX, event.offsetY);
      if (track) { if (!view.closed.delete(track)) view.closed.add(track); view.lay(); view.fit(); } else select(slice);
    }
    last = null;
  });
  canvas.addEventListener("dblclick", (event) => {
    const { slice } = view.under(event.offsetX, event.offsetY);
    if (slice !== undefined) fitSlice(view, slice);
  });
  canvas.addEventListener("pointerleave", hideTip);
}

function hover(view, canvas, event) {
  const { model } = view;
  const { slice, track, counter, index } = view.under(event.offsetX, event.offsetY);
  canvas.style.cursor = slice !== undefined || track ? "pointer" : "default";
  if (slice !== undefined) showTip({ title: nameOf(model, slice), rows: factsOf(model, slice).slice(0, 3) }, event.clientX, event.clientY);
  else if (counter && index >= 0) showTip({ title: counter.name, rows: [["value", inUnit(counter, counter.values[index])], ["at", nanos(counter.ts[index])]] }, event.clientX, event.clientY);
  else hideTip();
}

function byKeys(view, canvas, select) {
  const step = () => (view.width - view.gutter) / 8;
  const middle = () => (view.gutter + view.width) / 2;
  const keys = {
    w: () => view.zoom(0.75, middle()), s: () => view.zoom(1 / 0.75, middle()),
    a: () => view.move(-step(), 0), d: () => view.move(step(), 0),
    f: () => { if (view.selected >= 0) fitSlice(view, view.selected); },
    Home: () => view.show(0, view.model.span),
    PageDown: () => view.move(0, 200), PageUp: () => view.move(0, -200),
    Escape: () => { hideTip(); select(-1); },
    ArrowRight: () => walk(view, select, 1, 0), ArrowLeft: () => walk(view, select, -1, 0),
    ArrowDown: () => walk(view, select, 0, 1), ArrowUp: () => walk(view, select, 0, -1),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

// From the selected slice to its neighbour in the row, or to the row above or below.
function walk(view, select, along, down) {
  const { model, plan } = view;
  const { ts, end } = model.slices;
  const rows = plan.items.filter((item) => item.row);
  if (!rows.length) return;
  if (view.selected < 0) { select(rows[0].row.slices[0], true); return; }
  const at = rows.indexOf(view.itemOf(view.selected));
  if (at < 0) return;
  const { slices } = rows[at].row;
  if (along) {
    const next = slices[placeIn(model, rows[at].row, view.selected) + along];
    if (next !== undefined) select(next, true);
    return;
  }
  const other = rows[at + down]?.row.slices;
  if (!other) return;
  const middle = (ts[view.selected] + end[view.selected]) / 2;
  const after = firstAbove(other, down > 0 ? ts[view.selected] - 1 : middle, (i) => ts[other[i]]);
  select(other[Math.min(Math.max(after - (down > 0 ? 0 : 1), 0), other.length - 1)], true);
}

function fitSlice(view, slice) {
  const { ts, end } = view.model.slices;
  const span = Math.max(end[slice] - ts[slice], 10);
  view.show(ts[slice] - span * 0.15, end[slice] + span * 0.15);
  bringIntoView(view, slice);
}

// Moves and scrolls only as far as the slice needs; zooms in where it would be too small to see.
function bringIntoView(view, slice) {
  const { ts, end, track } = view.model.slices;
  const home = view.model.tracks[track[slice]];
  if (view.closed.delete(home)) { view.lay(); view.fit(); }
  const [span, shown] = [Math.max(end[slice] - ts[slice], 10), view.to - view.from];
  const middle = (ts[slice] + end[slice]) / 2;
  if (span / view.perPixel < 6) view.show(middle - span * 40, middle + span * 40);
  else if (ts[slice] < view.from || end[slice] > view.to) view.show(middle - Math.max(shown, span * 1.2) / 2, middle + Math.max(shown, span * 1.2) / 2);
  const item = view.itemOf(slice);
  if (!item) return;
  const room = view.height - view.top;
  if (item.y < view.scroll || item.y + LANE > view.scroll + room) view.scroll = item.y - room / 2;
  view.clamp();
  view.draw();
}

function searchBox(view, select) {
  const { model } = view;
  const box = html("input", { type: "search", placeholder: "Find slices", "aria-label": "Find slices by name", id: "timeline-search" });
  const tally = html("span", { class: "found", role: "status" });
  let found = [], at = -1;
  function again() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    view.matches = words.length ? model.names.map(([name, category]) => words.every((word) => `${name} ${category}`.toLowerCase().includes(word))) : null;
    found = view.matches ? findAll(view) : [];
    at = -1;
    tally.textContent = view.matches ? tallied(model, found) : "";
    view.draw();
  }
  box.addEventListener("input", again);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !found.length) return;
    at = (at + (event.shiftKey ? -1 : 1) + found.length) % found.length;
    select(found[at], true);
  });
  return { box: html("span", { class: "find" }, box, tally), again };
}

// Blocks bear the name of one slice and hold others too: they are counted apart, and their time is no one's.
function tallied(model, found) {
  const { ts, end, count: held } = model.slices;
  const single = found.filter((slice) => held[slice] === 1);
  const lasted = single.reduce((sum, slice) => sum + end[slice] - ts[slice], 0);
  const blocks = found.length - single.length;
  return `${count(single.length)} slices, ${nanos(lasted)} in all${blocks ? `, and ${count(blocks)} blocks of short ones` : ""}`;
}

// Python frames only where they are shown.
function findAll(view) {
  const { model } = view;
  const { label, ts } = model.slices;
  const found = [];
  for (let i = 0; i < label.length; i += 1) {
    if (view.matches[label[i]] && (view.withPython || model.kinds[label[i]] !== PYTHON)) found.push(i);
  }
  return found.sort((a, b) => ts[a] - ts[b]);
}

const nameOf = (model, slice) => model.names[model.slices.label[slice]][0] || "(no name)";

// A span of a device's accounting bears the number of the slice that caused it.
const accounted = (model, slice) => model.names[model.slices.label[slice]][1] === "accounting";

function factsOf(model, slice) {
  const { ts, end, count: held, open, id, track, label } = model.slices;
  const lasted = end[slice] - ts[slice];
  const home = model.tracks[track[slice]];
  return [
    ["duration", open[slice] ? `${nanos(lasted)} to the end of the trace; it never ended` : lasted ? nanos(lasted) : "an instant"],
    ["start", nanos(ts[slice])],
    held[slice] > 1 ? ["block of", `${count(held[slice])} short neighbours; the longest bears the name`] : ["category", model.names[label[slice]][1]],
    ["track", `${home.process}, ${home.name}`],
    ["slice id", held[slice] > 1 || accounted(model, slice) ? null : String(id[slice])],
  ];
}

// Facts, arguments and flows of one slice, with buttons to where the flows lead.
function describeSlice(model, slice, go) {
  const { label, args, ts, end } = model.slices;
  const list = html("dl");
  const add = (name, ...values) => list.append(html("dt", {}, name), html("dd", {}, ...values));
  for (const [name, value] of factsOf(model, slice)) if (value) add(name, value);
  const same = [];
  label.forEach((other, i) => { if (other === label[slice]) same.push(i); });
  if (same.length > 1) add("of this name", tallied(model, same));
  if (accounted(model, slice)) {
    const cause = model.slices.id.findIndex((id, other) => id === model.slices.id[slice] && !accounted(model, other));
    if (cause >= 0) { add("caused by", goButton(model, cause, go)); addAround(model, cause, add); }
  }
  addAround(model, slice, add);
  const flows = flowsOf(model, slice);
  const device = new Set(flows.map((flow) => model.flows.into[flow]).filter((into) => into !== slice && model.tracks[model.slices.track[into]].device));
  if (device.size > 1) add("launches", `${device.size} pieces of work, ${nanos([...device].reduce((sum, into) => sum + end[into] - ts[into], 0))} on the device`);
  for (const flow of flows.slice(0, 8)) {
    const [out, into] = [model.flows.out[flow], model.flows.into[flow]];
    const other = into === slice ? out : into;
    const kind = model.flows.kinds[model.flows.kind[flow]];
    add(into === slice ? "comes from" : "leads to", goButton(model, other, go), `, ${nanos(ts[into] - ts[out])} ${into === slice ? "earlier" : "later"}${kind ? ` (${kind})` : ""}`);
    if (into === slice) addAround(model, out, add, "launched within");
  }
  const told = args[slice] ? model.args[args[slice] - 1] : {};
  for (const [name, value] of Object.entries(told)) add(name, value);
  return [html("b", {}, nameOf(model, slice)), list];
}

function goButton(model, slice, go) {
  const button = html("button", { type: "button", class: "more" }, nameOf(model, slice));
  button.addEventListener("click", () => go(slice));
  return button;
}

// What a slice lies in: ranges and operators, and the innermost of Python's frames.
function addAround(model, slice, add, label = "within") {
  const kindAt = (other) => model.kinds[model.slices.label[other]];
  const outer = around(model, slice);
  const words = (list) => list.map((other) => nameOf(model, other)).join(" › ");
  const [frames, others] = [outer.filter((other) => kindAt(other) === PYTHON), outer.filter((other) => kindAt(other) !== PYTHON)];
  if (others.length) add(label, words(others));
  if (frames.length) add("called by", words(frames.slice(-4)));
}
