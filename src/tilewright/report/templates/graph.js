// The graph before and after fusion: charts of operators, of which the lanes and the edges come from graph_chart.py.

function graph(charts) {
  const names = [...new Set(charts.map((each) => each.graph))];
  const show = (name) => {
    host("graph-panels").replaceChildren();
    for (const each of charts) if (each.graph === name) panel(each);
  };
  if (names.length > 1) host("graph-pick").append(choice("Graph", names, names[0], show));
  show(names[0]);
}

function panel({ graph: name, stage, lanes, edges, spec }) {
  const operators = rowsOf.operators.filter((op) => op.graph === name && op.stage === stage);
  const id = `graph-${stage}`;
  const moved = operators.reduce((sum, op) => sum + op.bytes, 0);
  const floor = operators.reduce((sum, op) => sum + (op.floor_us ?? 0), 0);
  const title = html("h3", {}, `${stage === "before" ? "Before" : "After"} fusion`, html("span", {}, `${operators.length} operators, ${bytes(moved)} moved, floor ${time(floor)}`));
  host("graph-panels").append(html("div", { class: "panel" }, title, html("div", { id, class: "scroll" })));
  const nodes = operators.map((op, i) => ({
    i, row: i, foot: i + 1, mid: i + 0.5, lane: lanes[i], name: op.name, shape: shapeOf(op), class: op.class, region: op.region,
    floor: op.provenance === "unknown" ? "unknown" : op.floor_us > 0 ? time(op.floor_us) : "",
  }));
  // Down the lane of the source to the row above, then across to the reader.
  const points = edges.flatMap(([from, to], edge) => [
    [lanes[from], from], [lanes[from], to - 1], [lanes[to], to],
  ].map(([lane, row], point) => ({ edge, point, lane, mid: row + 0.5 })));
  chart(id, spec, { nodes, edges: points }, ({ i }) => describe(operators[i]), "svg");
}

const shapeOf = (op) => op.shape_symbolic ?? `[${op.shape.join(", ")}]`;

function describe(op) {
  const figure = (number, symbolic) => (op.provenance === "unknown" ? "unknown" : symbolic && !/^\d+$/.test(symbolic) ? `${formula(symbolic)} = ${count(number)}` : count(number));
  return {
    title: op.name,
    rows: [
      ["operator", op.target],
      ["class", op.class],
      ["shape", `${shapeOf(op)} ${op.dtype}`],
      ["", op.shape_symbolic ? `[${op.shape.join(", ")}]` : ""],
      ["reads", figure(op.reads, op.reads_symbolic)],
      ["writes", figure(op.writes, op.writes_symbolic)],
      ["unused", op.unused ? figure(op.unused, op.unused_symbolic) : ""],
      ["FLOPs", figure(op.flops, op.flops_symbolic)],
      ["floor", time(op.floor_us)],
      ["measured", time(op.measured_us)],
      ["bound", op.bound],
      ["region", op.region],
      ["source", op.source],
    ],
  };
}
