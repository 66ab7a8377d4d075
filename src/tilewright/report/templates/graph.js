// A graph as a list of operators in the order they run, each on a lane that its value keeps until its
// last reader: lines between lanes are the edges.

const ROW = 24;

function drawGraph(width, operators, tintOf, lit) {
  const { rows, lanes } = layOut(operators);
  const gap = Math.max(3, Math.min(13, (width * 0.24) / Math.max(lanes, 1)));
  const text = 20 + lanes * gap;
  const height = rows.length * ROW + 12;
  const drawing = svg("svg", { width, height, "aria-label": `Graph of ${operators.length} operators` });
  const x = (lane) => 12 + lane * gap;
  const y = (index) => 6 + index * ROW + ROW / 2;
  const bands = drawBands(rows, tintOf, width, y);
  drawing.append(...bands);
  for (const row of rows) {
    for (const source of row.sources) drawing.append(svg("path", { class: "edge", d: edge(source, row, x, y) }));
  }
  const columns = { shape: Math.round(text + (width - text) * 0.42), floor: width - 12 };
  const letters = (room) => Math.max(3, Math.floor(room / 7.25));
  const marks = rows.map((row) => {
    const op = row.operator;
    const shape = op.shape_symbolic ?? `[${op.shape.join(", ")}]`;
    const node = svg("g", { class: "row", "data-mark": "" },
      svg("rect", { class: "back", x: 0, y: y(row.index) - ROW / 2, width, height: ROW }),
      svg("circle", { class: `ink c-${op.class}`, cx: x(row.lane), cy: y(row.index), r: Math.min(5, gap * 0.42 + 1) }),
      svg("text", { class: "mono", x: text, y: y(row.index) + 4 }, clipped(op.name, letters(columns.shape - text - 8))),
      svg("text", { class: "mono soft", x: columns.shape, y: y(row.index) + 4 }, clipped(shape, letters(columns.floor - columns.shape - 66))),
      svg("text", { class: "soft end", x: columns.floor, y: y(row.index) + 4 }, op.floor_us === null ? (op.provenance === "unknown" ? "unknown" : "") : op.floor_us > 0 ? time(op.floor_us) : ""));
    return { node, region: op.region, info: () => describe(op, shape) };
  });
  drawing.append(...marks.map((each) => each.node));
  interactive(drawing, marks, (mark) => lit(mark?.region ?? null));
  return drawing;
}

// Rows with their lane, and the rows whose value each reads. A row takes the lane of the first value
// that it is the last to read, else the leftmost free one.
function layOut(operators) {
  const rows = operators.map((operator, index) => ({ operator, index, lane: 0, sources: [], last: index }));
  const byName = new Map();
  for (const row of rows) {
    row.sources = [...new Set(row.operator.inputs)].map((name) => byName.get(name)).filter(Boolean);
    for (const source of row.sources) source.last = row.index;
    byName.set(row.operator.name, row);
  }
  const until = [];
  for (const row of rows) {
    const heir = row.sources.find((source) => source.last === row.index);
    let lane = heir ? heir.lane : until.findIndex((last) => last < row.index);
    if (lane < 0) lane = until.length;
    row.lane = lane;
    until[lane] = row.last;
  }
  return { rows, lanes: Math.max(until.length, 1) };
}

// Down the lane of the source to the row above, then across to the reader.
function edge(source, row, x, y) {
  const [x1, y1, x2, y2] = [x(source.lane), y(source.index), x(row.lane), y(row.index)];
  if (x1 === x2) return `M${x1} ${y1}V${y2}`;
  return `M${x1} ${y1}V${y2 - ROW}C${x1} ${y2 - ROW * 0.4} ${x2} ${y2 - ROW * 0.6} ${x2} ${y2}`;
}

// One band for each run of neighbouring rows of one region.
function drawBands(rows, tintOf, width, y) {
  const bands = [];
  for (let first = 0; first < rows.length; ) {
    const { region } = rows[first].operator;
    let last = first;
    while (last + 1 < rows.length && rows[last + 1].operator.region === region) last += 1;
    if (region) {
      const [top, height] = [y(first) - ROW / 2 + 1, (last - first + 1) * ROW - 2];
      bands.push(svg("rect", { class: `band ink t-${tintOf(region)}`, "data-region": region, x: 0, y: top, width, height, "stroke-opacity": 0 }),
        svg("rect", { class: `ink t-${tintOf(region)}`, x: 0, y: top, width: 3, height, "stroke-opacity": 0 }));
    }
    first = last + 1;
  }
  return bands;
}

function describe(op, shape) {
  const figure = (number, symbolic) => (op.provenance === "unknown" ? "unknown" : symbolic && !/^\d+$/.test(symbolic) ? `${formula(symbolic)} = ${count(number)}` : count(number));
  return {
    title: op.name,
    rows: [
      ["operator", op.target],
      ["class", op.class],
      ["shape", `${shape} ${op.dtype}`],
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

const clipped = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);
