// Live memory over the program's life, and predictions against what was measured.

function drawMemory(width, points) {
  const height = 290;
  const frame = { left: 64, right: width - 12, top: 34, bottom: height - 30 };
  const graphs = [...new Set(points.map((p) => p.graph))];
  const most = Math.max(...points.map((p) => p.live_bytes), 1);
  const unit = niceStep(most / 4);
  const top = Math.ceil((most * 1.04) / unit) * unit;
  const y = (value) => frame.bottom - (value / top) * (frame.bottom - frame.top);
  const drawing = svg("svg", { width, height, "aria-label": "Live memory over the life of the program" });
  for (let value = 0; value <= top + unit / 2; value += unit) {
    drawing.append(svg("line", { class: value ? "grid" : "axis", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "soft end", x: frame.left - 8, y: y(value) + 4 }, bytes(value)));
  }
  const lengths = graphs.map((graph) => Math.max(...["before", "after"].map((stage) => points.filter((p) => p.graph === graph && p.stage === stage).length)));
  const all = lengths.reduce((sum, n) => sum + n, 0);
  const marks = [], labels = [];
  let start = frame.left;
  const lines = { before: [], after: [] };
  graphs.forEach((graph, place) => {
    const end = start + ((frame.right - frame.left) * lengths[place]) / all;
    if (place) drawing.append(svg("line", { class: "axis", x1: start, x2: start, y1: frame.top - 18, y2: frame.bottom, "stroke-dasharray": "2 3" }));
    drawing.append(svg("text", { class: "soft", x: start + (place ? 6 : 0), y: frame.bottom + 20 }, graph));
    for (const stage of ["before", "after"]) {
      const steps = points.filter((p) => p.graph === graph && p.stage === stage);
      steps.forEach((point, index) => {
        const left = start + ((end - start) * index) / steps.length;
        const right = start + ((end - start) * (index + 1)) / steps.length;
        lines[stage].push({ point, left, right });
      });
    }
    start = end;
  });
  for (const stage of ["before", "after"]) {
    if (!lines[stage].length) continue;
    const path = lines[stage].map(({ point, left, right }, i) => `${i ? "L" : "M"}${left.toFixed(1)} ${y(point.live_bytes).toFixed(1)}H${right.toFixed(1)}`).join("");
    const first = lines[stage][0], final = lines[stage].at(-1);
    drawing.append(svg("path", { class: `area ${stage}`, d: `${path}V${frame.bottom}H${first.left}Z` }), svg("path", { class: `step ${stage}`, d: path }));
    const peak = lines[stage].reduce((best, each) => (each.point.live_bytes > best.point.live_bytes ? each : best));
    const centre = Math.min(Math.max((peak.left + peak.right) / 2, frame.left + 90), frame.right - 90);
    labels.push(svg("text", { class: `${stage} middle halo`, x: centre, y: y(peak.point.live_bytes) - 8 }, `${stage} fusion: peak ${bytes(peak.point.live_bytes)}`));
    for (const { point, left, right } of lines[stage]) {
      const node = svg("circle", { class: `dot ${stage}`, cx: (left + right) / 2, cy: y(point.live_bytes), r: lines[stage].length > 300 ? 1 : 2.2, "data-mark": "" });
      marks.push({ node, info: () => describeStep(point, peak.point) });
    }
  }
  drawing.append(...marks.map((each) => each.node), ...labels);
  interactive(drawing, marks);
  return drawing;
}

function describeStep(point, peak) {
  return {
    title: point.name,
    rows: [
      ["live", bytes(point.live_bytes)],
      ["stage", `${point.graph}, ${point.stage} fusion`],
      ["step", String(point.index)],
      ["of the peak", `${Math.round((100 * point.live_bytes) / peak.live_bytes)} %`],
    ],
  };
}

const ORIGINS = { region: "region", call: "library", decision: "reduction", whole: "compute" };

function drawPredicted(width, rows) {
  const height = Math.min(430, Math.max(300, width * 0.8));
  const frame = { left: 68, right: width - 14, top: 16, bottom: height - 44 };
  const placed = rows.filter((row) => row.predicted_us > 0 && row.measured_us > 0);
  const values = placed.flatMap((row) => [row.predicted_us, row.measured_us]);
  const x = logScale(values.length ? values : [1], frame.left, frame.right);
  const y = logScale(values.length ? values : [1], frame.bottom, frame.top);
  const drawing = svg("svg", { width, height, "aria-label": "Predicted against measured time" });
  for (const value of x.ticks) {
    drawing.append(svg("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: frame.top, y2: frame.bottom }),
      svg("text", { class: "soft middle", x: x.at(value), y: frame.bottom + 18 }, tickTime(value)),
      svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y.at(value), y2: y.at(value) }),
      svg("text", { class: "soft end", x: frame.left - 8, y: y.at(value) + 4 }, tickTime(value)));
  }
  const span = [x.low, x.high];
  const inside = (value) => Math.min(Math.max(value, x.low), x.high);
  const edge = (factor) => span.map((v) => inside(v * factor)).map((v) => [v / factor, v]);
  const corners = [...edge(1.5), ...edge(1 / 1.5).reverse()];
  drawing.append(svg("polygon", { class: "within", points: corners.map(([p, m]) => `${x.at(p)},${y.at(m)}`).join(" ") }),
    svg("line", { class: "roof", x1: frame.left, y1: frame.bottom, x2: frame.right, y2: frame.top }),
    svg("text", { class: "soft end", x: frame.right, y: frame.bottom + 36 }, "predicted"),
    svg("text", { class: "soft", x: frame.left + 8, y: frame.top + 12 }, "measured"));
  const marks = placed.map((row) => ({
    node: glyph(row.what, x.at(row.predicted_us), y.at(row.measured_us), 5, { class: `mark ink c-${ORIGINS[row.what]}`, "data-mark": "" }),
    info: () => ({
      title: row.name,
      rows: [["what", row.what], ["predicted", time(row.predicted_us)], ["measured", time(row.measured_us)], ["measured over predicted", times(row.measured_us / row.predicted_us)]],
    }),
  }));
  drawing.append(...marks.map((each) => each.node));
  interactive(drawing, marks);
  return drawing;
}

const tickTime = (us) => time(us).replace(/\.0+(?= )/, "");

// 1, 2 or 5 times a power of ten.
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}
