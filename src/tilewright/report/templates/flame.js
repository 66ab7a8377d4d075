// Flame graphs that grow downwards, one for each weight.

function flame({ title, names, nodes, steps, left_out: left }, spec, place) {
  const whole = nodes[0][4];
  const boxes = nodes.map(([label, depth, start, , total], i) => box(i, start, start + total, depth, ...names[label]));
  const id = `flame-${place}`;
  const parts = [`${title}: ${nanos(whole)} in all`];
  if (steps) parts.push(`over ${steps} steps, ${nanos(whole / steps)} each`);
  const rest = left ? ` ${count(left)} frames with the least time are left out; their time is their callers'.` : "";
  host("flame-charts").append(html("h3", {}, `${parts.join(" ")}.${rest}`), html("div", { id, class: "scroll" }));
  chart(id, spec, { boxes, tracks: [] }, ({ i }) => {
    const [label, , , own, total, calls] = nodes[i];
    const rows = [["time", `${nanos(total)}, ${share(total, whole)} of all`], ["own", nanos(own)], ["calls", calls ? count(calls) : null], ["per step", steps ? nanos(total / steps) : null]];
    return { title: names[label][0], rows };
  });
}
