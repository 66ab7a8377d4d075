// A flame graph that grows downwards: click a frame to make it as wide as the page, search to see its share.

const FRAME_ROW = 18, NARROWEST = 0.7;

// Nodes come as [name, depth, own, total, calls], each before its children.
function openFlame(packed) {
  const nodes = packed.nodes.map(([name, depth, own, total, calls]) => ({ name, depth, own, total, calls, start: 0, parent: null, children: [] }));
  const path = [];
  for (const node of nodes) {
    path.length = node.depth;
    node.parent = path[node.depth - 1] ?? null;
    if (node.parent) {
      const elder = node.parent.children.at(-1);
      node.start = elder ? elder.start + elder.total : node.parent.start;
      node.parent.children.push(node);
    }
    path.push(node);
  }
  return { ...packed, root: nodes[0], all: nodes };
}

function flameGraphs(packed) {
  const graphs = packed.map(openFlame);
  let shown = graphs.at(-1), words = [];
  const focus = new Map(graphs.map((graph) => [graph, graph.root]));
  const tally = html("span", { class: "found", role: "status" });
  const search = html("input", { type: "search", placeholder: "Find frames", "aria-label": "Find frames by name", id: "flame-search" });
  const note = html("p", { class: "note" });
  const found = (node) => words.length > 0 && words.every((word) => shown.names[node.name][0].toLowerCase().includes(word));
  const redraw = fitted(host("flame-chart"), (width) => drawFlame(width, shown, focus.get(shown), found, (node) => { focus.set(shown, node); hideTip(); redraw(); }));
  function tell() {
    const covered = words.length ? coveredBy(shown.root, found) : 0;
    tally.textContent = words.length ? `${nanos(covered)}, ${share(covered, shown.root.total)} of all` : "";
    const parts = [`${nanos(shown.root.total)} in all`];
    if (shown.steps) parts.push(`over ${shown.steps} steps, ${nanos(shown.root.total / shown.steps)} each`);
    const rest = shown.left_out ? ` ${count(shown.left_out)} frames with the least time are left out; their time is their callers'.` : "";
    note.textContent = `${parts.join(" ")}.${rest}`;
  }
  search.addEventListener("input", () => { words = search.value.toLowerCase().split(/\s+/).filter(Boolean); tell(); redraw(); });
  const pick = (title) => { shown = graphs.find((graph) => graph.title === title); tell(); redraw(); };
  if (graphs.length > 1) host("flame-controls").append(choice("Weight", graphs.map((graph) => graph.title), shown.title, pick));
  host("flame-controls").append(html("span", { class: "find" }, search, tally));
  host("flame-note").append(note);
  tell();
}

// The time of all frames found, none counted within another.
function coveredBy(node, found) {
  return found(node) ? node.total : node.children.reduce((sum, child) => sum + coveredBy(child, found), 0);
}

const share = (part, whole) => `${((100 * part) / Math.max(whole, 1)).toFixed(1)} %`;

// The frame in focus takes the whole width, its callers above it too; what is narrower than a pixel is not drawn.
function drawFlame(width, graph, focus, found, zoom) {
  const callers = [];
  for (let node = focus.parent; node; node = node.parent) callers.unshift(node);
  const scale = width / Math.max(focus.total, 1);
  const placed = callers.map((node) => ({ node, x: 0, wide: width, caller: true }));
  const waiting = [focus];
  while (waiting.length) {
    const node = waiting.pop();
    if (node.total * scale < NARROWEST) continue;
    placed.push({ node, x: (node.start - focus.start) * scale, wide: node.total * scale, caller: false });
    waiting.push(...node.children);
  }
  const height = FRAME_ROW * (1 + placed.reduce((deepest, { node }) => Math.max(deepest, node.depth), 0));
  const drawing = svg("svg", { width, height, "aria-label": `${graph.title} by call stack`, class: "flame" });
  const marks = placed.sort((a, b) => a.node.depth - b.node.depth || a.x - b.x).map((place) => frameMark(graph, place, focus, found));
  drawing.append(...marks.map((mark) => mark.node));
  interactive(drawing, marks);
  const nodeOf = new Map(marks.map((mark) => [mark.node, mark.frame]));
  drawing.addEventListener("click", (event) => {
    const frame = nodeOf.get(event.target.closest("[data-mark]"));
    if (frame) zoom(frame);
  });
  drawing.addEventListener("keydown", (event) => {
    const on = marks.find((mark) => mark.node.classList.contains("on"));
    if (event.key === "Enter" && on) { zoom(on.frame); event.preventDefault(); }
    if (event.key === "Escape") zoom(graph.root);
  });
  return drawing;
}

function frameMark(graph, { node, x, wide, caller }, focus, found) {
  const [text, kind] = graph.names[node.name];
  const look = ["frame", `k-${kind}`, caller ? "caller" : "", found(node) ? "hit" : ""].filter(Boolean).join(" ");
  const mark = svg("g", { class: look, "data-mark": "" },
    svg("rect", { x: x.toFixed(2), y: node.depth * FRAME_ROW, width: Math.max(wide - 0.6, 0.5).toFixed(2), height: FRAME_ROW - 1 }));
  const letters = Math.floor((wide - 8) / 6.7);
  if (letters > 2) mark.append(svg("text", { class: "mono", x: (x + 4).toFixed(2), y: node.depth * FRAME_ROW + 12.5 }, clipped(text, letters)));
  const info = () => ({
    title: text,
    rows: [
      ["time", `${nanos(node.total)}, ${share(node.total, graph.root.total)} of all`],
      ["of the frame in focus", focus === graph.root || caller ? null : share(node.total, focus.total)],
      ["own", nanos(node.own)],
      ["calls", node.calls ? count(node.calls) : null],
      ["per step", graph.steps ? nanos(node.total / graph.steps) : null],
    ],
  });
  return { node: mark, frame: node, info };
}
