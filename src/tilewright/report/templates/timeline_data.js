// The timeline as it was packed: columns of numbers, and from them the rows of every track.

const PYTHON = "python";

// LEB128 in base64, as packed.py writes it: seven bits a byte, low ones first.
function unpack(text) {
  const data = atob(text);
  const values = new Float64Array(data.length);
  let size = 0, value = 0, place = 1;
  for (let i = 0; i < data.length; i += 1) {
    const byte = data.charCodeAt(i);
    value += (byte & 127) * place;
    if (byte > 127) { place *= 128; continue; }
    values[size] = value;
    size += 1; value = 0; place = 1;
  }
  return values.subarray(0, size);
}

function unzigzag(values) {
  return values.map((value) => (value % 2 ? -(value + 1) / 2 : value / 2));
}

function sums(values) {
  let sum = 0;
  return values.map((value) => (sum += value));
}

// All slices in columns; a slice is its index. `tracks` have their first and past-last slice.
function openTimeline(packed) {
  const size = packed.tracks.reduce((most, track) => Math.max(most, track.first + track.rows.reduce((sum, [, n]) => sum + n, 0)), 0);
  const slices = {
    ts: new Float64Array(size), end: new Float64Array(size), id: new Float64Array(size), depth: new Int32Array(size),
    label: new Int32Array(size), args: new Int32Array(size), count: new Int32Array(size), open: new Uint8Array(size), track: new Int32Array(size),
  };
  const tracks = packed.tracks.map((track, number) => {
    const at = track.first;
    const [ts, dur, ids] = [unpack(track.ts), unpack(track.dur), sums(unzigzag(unpack(track.id)))];
    for (const key of ["label", "args", "count"]) slices[key].set(unpack(track[key]), at);
    slices.id.set(ids, at);
    let i = 0;
    const levels = [];
    for (const [depth, length] of track.rows) {
      let now = 0;
      levels.push({ depth, from: at + i, to: at + i + length });
      for (const last = i + length; i < last; i += 1) {
        now += ts[i];
        slices.ts[at + i] = now;
        slices.open[at + i] = dur[i] === 0 ? 1 : 0;
        slices.end[at + i] = dur[i] === 0 ? packed.span : now + dur[i] - 1;
        slices.depth[at + i] = depth;
        slices.track[at + i] = number;
      }
    }
    return { name: track.name, process: track.process, upid: track.upid, device: track.device, busy: track.busy, from: at, to: at + i, levels };
  });
  const kinds = packed.names.map(([, , kind]) => kind);
  const flows = openFlows(packed.flows);
  const counters = packed.counters.map((each) => ({ ...each, ts: sums(unpack(each.ts)) }));
  return { ...packed, slices, tracks, kinds, flows, counters };
}

function openFlows(packed) {
  const flows = { kinds: packed.kinds, out: sums(unpack(packed.out)), into: unpack(packed.into), kind: unpack(packed.kind), of: new Map() };
  for (let i = 0; i < flows.out.length; i += 1) {
    for (const slice of [flows.out[i], flows.into[i]]) {
      if (!flows.of.has(slice)) flows.of.set(slice, []);
      flows.of.get(slice).push(i);
    }
  }
  return flows;
}

// The slices of a track for which `seen` holds, in rows: one row for each number of seen slices around one.
function rowsOfTrack(model, track, seen) {
  const { ts, end, depth } = model.slices;
  const order = Array.from({ length: track.to - track.from }, (_, i) => track.from + i);
  order.sort((a, b) => ts[a] - ts[b] || depth[a] - depth[b]);
  const rows = [];
  // How many seen slices lie around the next slice of each depth.
  const around = [0];
  for (const slice of order) {
    const level = around[depth[slice]] ?? 0;
    const shown = seen(slice);
    around[depth[slice] + 1] = level + (shown ? 1 : 0);
    if (!shown) continue;
    if (!rows[level]) rows[level] = [];
    rows[level].push(slice);
  }
  return rows.filter(Boolean).map((row) => asRow(row, end));
}

// Slices of several tracks that lie within one another by their times alone.
function nested(model, chosen) {
  const { ts, end } = model.slices;
  const rows = [], ends = [];
  for (const slice of [...chosen].sort((a, b) => ts[a] - ts[b] || end[b] - end[a])) {
    let level = ends.findIndex((last) => last <= ts[slice]);
    if (level < 0) level = ends.length;
    ends.length = level;
    ends.push(end[slice]);
    (rows[level] ??= []).push(slice);
  }
  return rows.map((row) => asRow(row, end));
}

// The slices around one on its track, the outermost first.
function around(model, slice) {
  const { ts, end, depth, track } = model.slices;
  const found = [];
  for (const level of model.tracks[track[slice]].levels) {
    if (level.depth >= depth[slice]) continue;
    const last = level.from - 1 + firstAbove({ length: level.to - level.from }, ts[slice], (i) => ts[level.from + i]);
    if (last >= level.from && end[last] >= end[slice]) found.push(last);
  }
  return found.sort((a, b) => depth[a] - depth[b]);
}

// The flows of a slice, and of an operator those that begin in the calls within it.
function flowsOf(model, slice) {
  const own = model.flows.of.get(slice) ?? [];
  if (own.some((flow) => model.flows.kinds[model.flows.kind[flow]] === "ac2g")) return own;
  const { ts, end, track } = model.slices;
  const { out, kind, kinds } = model.flows;
  const launch = kinds.indexOf("ac2g");
  const launched = [];
  for (let i = 0; i < out.length; i += 1) {
    const from = out[i];
    if (kind[i] === launch && track[from] === track[slice] && ts[from] >= ts[slice] && end[from] <= end[slice]) launched.push(i);
  }
  return [...own, ...launched];
}

// `reach[i]` is the latest end among the first i + 1 slices: it grows, so that it can be searched.
function asRow(slices, end) {
  const reach = new Float64Array(slices.length);
  let latest = -Infinity;
  slices.forEach((slice, i) => { latest = Math.max(latest, end[slice]); reach[i] = latest; });
  return { slices: Int32Array.from(slices), reach };
}

// The first place whose value is above `limit` in numbers that grow.
function firstAbove(values, limit, read = (i) => values[i]) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (read(middle) > limit) high = middle; else low = middle + 1;
  }
  return low;
}

// Nanoseconds as people write them.
const nanos = given((ns) => (ns === 0 ? "0" : Math.abs(ns) < 1000 ? `${Math.round(ns)} ns` : time(ns / 1000)));
