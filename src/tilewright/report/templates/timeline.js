// The timeline: its columns as the rows of a chart, and what a slice tells.

const box = (i, begin, end, row, name, kind) => ({ i, begin: begin / 1e9, end: end / 1e9, row, foot: row + 0.92, mid: row + 0.5, name, kind });

function timeline(model, spec) {
  const { slices, span, names } = model;
  model.end = slices.begin.map((begin, i) => (slices.length[i] < 0 ? span : begin + slices.length[i]));
  const boxes = slices.begin.map((begin, i) => {
    const [name, , kind] = names[slices.label[i]];
    return box(i, begin, model.end[i], slices.row[i], name || "(no name)", kind);
  });
  const arrows = model.flows.out.map((out, i) => {
    const [from, to] = [boxes[out], boxes[model.flows.into[i]]];
    return { out: from.i, into: to.i, begin: from.begin, end: to.begin, mid: from.mid, foot: to.mid };
  });
  const curves = model.counters.flatMap(curveRows);
  chart("timeline-chart", spec, { boxes, tracks: model.tracks, arrows, curves }, ({ i }) => describeSlice(model, i));
  host("timeline-controls").append(perfettoButton(model, document.title));
  host("timeline-note").append(kept(model));
}

function curveRows({ name, row, height, ts, values }) {
  const [least, most] = [Math.min(0, ...values), Math.max(...values, 1e-12)];
  const foot = row + height - 0.2;
  return ts.map((ns, i) => ({ name, begin: ns / 1e9, foot, level: foot - ((values[i] - least) / (most - least)) * (height - 0.6) }));
}

function kept({ kept: said, span }) {
  const { slices, merged, blocks, shortest_ns: shortest, whole_ns: whole, left_out: left, without_arguments: without } = said;
  const parts = [`${count(slices)} slices over ${nanos(span)}.`];
  if (merged) parts.push(`From ${nanos(Math.max(whole[0], 0))} to ${nanos(whole[1])} every slice is drawn; elsewhere ${count(merged)} slices shorter than ${nanos(shortest)} are drawn as ${count(blocks)} blocks of neighbours.`);
  if (left) parts.push(`${count(left)} slices lie deeper than the rows drawn here, or on quieter tracks.`);
  if (without) parts.push(`Arguments of ${count(without)} short slices are left out to keep this page small.`);
  if (merged || left || without) parts.push("The run has all of them: tilewright sql \"FROM slice\".");
  return parts.join(" ");
}

// Facts, arguments, the slices around it and the flows of one slice.
function describeSlice(model, i) {
  const { begin, length, count: held, id, label, args, outer, caused } = model.slices;
  const [name, category] = model.names[label[i]];
  const nameOf = (other) => model.names[label[other]][0];
  const around = (slice) => { const names = []; for (let at = outer[slice]; at >= 0; at = outer[at]) names.unshift(nameOf(at)); return names.join(" › "); };
  const lasted = model.end[i] - begin[i];
  const rows = [
    ["duration", length[i] < 0 ? `${nanos(lasted)} to the end of the trace; it never ended` : lasted ? nanos(lasted) : "an instant"],
    ["start", nanos(begin[i])],
    held[i] > 1 ? ["block of", `${count(held[i])} short neighbours; the longest bears the name`] : ["category", category],
    ["slice id", held[i] > 1 || caused[i] ? null : String(id[i])],
    ["within", around(i)],
  ];
  const cause = caused[i] ? id.findIndex((other, at) => other === id[i] && !caused[at]) : -1;
  if (cause >= 0) rows.push(["caused by", [nameOf(cause), around(cause)].filter(Boolean).join(", within ")]);
  const { out, into, kind, kinds } = model.flows;
  const tie = (flow) => `${nanos(begin[into[flow]] - begin[out[flow]])}${kinds[kind[flow]] ? ` (${kinds[kind[flow]]})` : ""}`;
  for (let flow = 0, found = 0; flow < out.length && found < 4; flow += 1) {
    if (into[flow] === i) rows.push(["comes from", `${nameOf(out[flow])}, ${tie(flow)} earlier`], ["launched within", around(out[flow])]);
    else if (out[flow] === i) rows.push(["leads to", `${nameOf(into[flow])}, ${tie(flow)} later`]);
    else continue;
    found += 1;
  }
  return { title: name || "(no name)", rows: [...rows, ...Object.entries(args[i] ? model.args[args[i] - 1] : {})] };
}
