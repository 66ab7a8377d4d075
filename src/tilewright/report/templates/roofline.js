// The roofline: FLOPs per second over FLOPs per byte, both logarithmic.

// One line for each level of memory, by the kind of its ceiling. Reads and writes alone are in the table of ceilings.
const BANDWIDTHS = { copy: "memory, copied", cache: "cache, copied" };

function drawRoofline(width, points, ceilings) {
  const height = Math.round(Math.min(560, Math.max(380, width * 0.42)));
  const placed = points.filter((p) => p.intensity > 0 && p.TFLOPs > 0);
  const moving = points.filter((p) => p.provenance === "formula" && !(p.flops > 0) && p.bytes > 0 && p.floor_us !== null);
  const strip = moving.length ? 46 : 0;
  const roofs = ceilings.filter((c) => c.unit === "TFLOP/s" && c.value > 0);
  const slopes = ceilings.filter((c) => c.kind in BANDWIDTHS && c.unit === "GB/s" && c.value > 0);
  const margin = 16 + 6.3 * Math.max(0, ...roofs.map((c) => ceilingLabel(c).length));
  const frame = { left: 74, right: width - margin, top: 22, bottom: height - 46 - strip };
  const best = (list) => Math.max(0, ...list.map((c) => c.value));
  const ridge = roofs.length && slopes.length ? (best(roofs) * 1e3) / best(slopes) : 1;
  const x = logScale([...placed.map((p) => p.intensity), ridge * 3, 0.1], frame.left, frame.right);
  const rates = placed.map((p) => p.TFLOPs);
  const y = logScale([...rates, ...roofs.map((c) => c.value * 1.35), ...(rates.length ? [] : [1e-3])], frame.bottom, frame.top);
  const drawing = svg("svg", { width, height, "aria-label": "Roofline chart" });

  for (const value of x.ticks) {
    drawing.append(svg("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: frame.top, y2: frame.bottom }),
      svg("text", { class: "soft middle", x: x.at(value), y: frame.bottom + 18 }, plainNumber(value)));
  }
  for (const value of y.ticks) {
    drawing.append(svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y.at(value), y2: y.at(value) }),
      svg("text", { class: "soft end", x: frame.left - 8, y: y.at(value) + 4 }, flopRate(value).replace(/\.0+(?= )/, "").replace("FLOP/s", "")));
  }
  drawing.append(svg("text", { class: "soft", x: 4, y: 12 }, "FLOP/s"),
    svg("text", { class: "soft end", x: frame.right, y: frame.bottom + 36 }, "FLOPs per byte moved"));
  drawing.append(...drawSlopes(slopes, best(roofs), x, y), ...drawRoofs(roofs, best(slopes), x, y, frame));

  const longest = Math.max(...points.map((p) => p.measured_us ?? p.floor_us ?? 0), 1e-9);
  const marks = [];
  const byTime = (a, b) => (b.measured_us ?? b.floor_us) - (a.measured_us ?? a.floor_us);
  for (const point of placed.sort(byTime)) {
    const cx = x.at(point.intensity), cy = y.at(point.TFLOPs);
    const floor = point.measured_us !== null && point.floor_us > 0 ? y.at(point.flops / point.floor_us / 1e6) : cy;
    if (cy - floor > 1) drawing.append(svg("line", { class: `stem line c-${point.operator_class}`, x1: cx, x2: cx, y1: floor, y2: cy }));
    marks.push(mark(point, cx, cy, longest));
  }
  const level = height - 20;
  if (moving.length) {
    drawing.append(svg("text", { class: "soft end", x: frame.left - 8, y: level + 4 }, "no FLOPs"),
      svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: level, y2: level }));
    moving.forEach((point, index) => {
      marks.push(mark(point, frame.left + 14 + (index * (frame.right - frame.left - 28)) / Math.max(moving.length - 1, 24), level, longest));
    });
  }
  drawing.append(...marks.map((each) => each.node));
  interactive(drawing, marks);
  return drawing;
}

function mark(point, cx, cy, longest) {
  const size = 3.5 + 9 * Math.sqrt((point.measured_us ?? point.floor_us ?? 0) / longest);
  const look = `mark ink c-${point.operator_class}${point.measured_us === null ? " hollow" : ""}`;
  const node = glyph(point.kind, cx, cy, size, { class: look, "data-mark": "" });
  const info = () => ({
    title: point.name,
    rows: [
      ["class", `${point.operator_class}, ${point.graph}`],
      ["intensity", point.intensity === null ? null : `${plainNumber(point.intensity)} FLOP/B`],
      [point.measured_us === null ? "floor allows" : "achieved", point.flops > 0 ? flopRate(point.TFLOPs) : null],
      ["bandwidth", byteRate(point.GBps)],
      ["measured", time(point.measured_us)],
      ["floor", time(point.floor_us)],
      ["over the floor", point.measured_us === null || !(point.floor_us > 0) ? null : times(point.measured_us / point.floor_us)],
      ["bound", point.bound],
    ],
  });
  return { node, info };
}

function drawSlopes(slopes, top, x, y) {
  const drawn = [], labels = [];
  for (const ceiling of [...slopes].sort((a, b) => b.value - a.value)) {
    const rate = (intensity) => (ceiling.value * intensity) / 1e3;
    const from = Math.max(x.low, (y.low * 1e3) / ceiling.value);
    const to = Math.min(x.high, ((top || y.high) * 1e3) / ceiling.value);
    if (from >= to) continue;
    const [x1, y1, x2, y2] = [x.at(from), y.at(rate(from)), x.at(to), y.at(rate(to))];
    drawn.push(svg("line", { class: roofClass(ceiling), x1, y1, x2, y2 }));
    const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
    const place = 0.82 - 0.2 * labels.length;
    const turn = `translate(${x1 + (x2 - x1) * place} ${y1 + (y2 - y1) * place}) rotate(${angle})`;
    labels.push(svg("text", { class: "soft halo middle", x: 0, y: labels.length ? 17 : -8, transform: turn }, ceilingLabel(ceiling)));
  }
  return [...drawn, ...labels];
}

function drawRoofs(roofs, bandwidth, x, y, frame) {
  const drawn = [];
  let last = Infinity;
  for (const ceiling of [...roofs].sort((a, b) => a.value - b.value)) {
    const level = y.at(ceiling.value);
    const from = bandwidth ? Math.min(frame.right, Math.max(frame.left, x.at((ceiling.value * 1e3) / bandwidth))) : frame.left;
    drawn.push(svg("line", { class: roofClass(ceiling), x1: from, x2: frame.right, y1: level, y2: level }));
    last = Math.min(last - 16, level);
    drawn.push(svg("text", { class: "soft", x: frame.right + 8, y: last + 4 }, ceilingLabel(ceiling)));
  }
  return drawn;
}

const roofClass = (ceiling) => `roof${ceiling.origin === "datasheet" ? " datasheet" : ""}`;

function ceilingLabel(ceiling) {
  const rate = ceiling.unit === "GB/s" ? byteRate(ceiling.value) : flopRate(ceiling.value);
  return [BANDWIDTHS[ceiling.kind] ?? `${ceiling.kind} ${ceiling.dtype}`, rate].join(" ");
}

// A logarithmic scale over whole and half decades that hold all positive `values`.
function logScale(values, from, to) {
  const logs = values.filter((v) => v > 0 && Number.isFinite(v)).map(Math.log10);
  const least = Math.floor((Math.min(...logs) - 0.05) * 2) / 2;
  const most = Math.max(Math.ceil((Math.max(...logs) + 0.05) * 2) / 2, least + 1);
  const ticks = [];
  for (let power = Math.ceil(least); power <= most; power += 1) ticks.push(10 ** power);
  const at = (value) => from + ((Math.log10(value) - least) / (most - least)) * (to - from);
  return { at, ticks, low: 10 ** least, high: 10 ** most };
}
