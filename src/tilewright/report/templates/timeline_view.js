// The timeline on a canvas: what is drawn at which zoom. timeline.js listens and tells.

const LANE = 16, TITLE = 20, AXIS = 26, CURVE = 46;
const KINDS = ["compute", "pointwise", "reduction", "layout", "random", "library", "launch", "wait", "range", PYTHON];

// Colours of the page as they are now, light or dark: mixed with the paper, so that ink reads on them.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const paper = parts(read("raised"));
  const mixed = (colour, share) => `rgb(${parts(colour).map((part, i) => Math.round(part * share + paper[i] * (1 - share))).join(" ")})`;
  const names = { launch: "tint-5", wait: "bad", range: "accent", python: "faint" };
  const fill = {}, edge = {};
  for (const kind of KINDS) {
    const colour = read(names[kind] ?? kind);
    fill[kind] = mixed(colour, kind === PYTHON ? 0.28 : kind === "range" ? 0.3 : 0.55);
    edge[kind] = colour;
  }
  fill.dim = mixed(read("faint"), 0.16);
  const [ink, soft, faint, rule, hair, accent, raised] = ["ink", "soft", "faint", "rule", "hair", "accent", "raised"].map(read);
  return { fill, edge, ink, soft, faint, rule, hair, accent, raised, mono: read("mono"), sans: read("sans") };
}

// Where everything stands: pinned rows of ranges at the top, then curves and tracks that scroll.
function layOutTracks(model, withPython, closed) {
  const seen = (slice) => withPython || model.kinds[model.slices.label[slice]] !== PYTHON;
  const ranges = [];
  for (const track of model.tracks) {
    if (track.device) continue;
    for (let i = track.from; i < track.to; i += 1) if (model.kinds[model.slices.label[i]] === "range" && model.names[model.slices.label[i]][1] !== "Trace") ranges.push(i);
  }
  const pinned = nested(model, ranges).slice(0, 4);
  const items = [];
  let y = 0;
  const add = (item) => { items.push({ ...item, y }); y += item.height; };
  let process = null;
  const heading = (name) => { if (name !== process) add({ heading: name, height: TITLE + 4 }); process = name; };
  if (model.counters.length) heading("Counters");
  for (const counter of model.counters) add({ counter, height: CURVE });
  const ordered = [...model.tracks].sort((a, b) => b.device - a.device || (a.device ? 0 : rank(b) - rank(a)) || (a.upid ?? 1e9) - (b.upid ?? 1e9) || b.busy - a.busy);
  for (const track of ordered) {
    const rows = rowsOfTrack(model, track, seen);
    if (!rows.length) continue;
    heading(track.process);
    add({ track, title: true, height: TITLE, folded: closed.has(track), depth: rows.length });
    if (!closed.has(track)) for (const row of rows) add({ track, row, height: LANE });
    add({ height: 6 });
  }
  return { pinned, items, height: y };
}

const rank = (track) => track.to - track.from;

class TimelineView {
  constructor(model, canvas) {
    Object.assign(this, { model, canvas, pen: canvas.getContext("2d", { alpha: false }), from: 0, to: model.span, scroll: 0 });
    Object.assign(this, { selected: -1, matches: null, withPython: false, closed: new Set(), width: 0, height: 0, drawn: false });
    Object.assign(this, { arrowsOf: -1, flows: [] });
    this.lay();
    this.recolour();
  }

  lay() { this.plan = layOutTracks(this.model, this.withPython, this.closed); this.clamp(); }
  recolour() { this.colours = palette(); }
  get top() { return AXIS + this.plan.pinned.length * LANE + 4; }
  get gutter() { return Math.round(Math.min(190, this.width * 0.22)); }
  get perPixel() { return (this.to - this.from) / Math.max(1, this.width - this.gutter); }
  at(ns) { return this.gutter + (ns - this.from) / this.perPixel; }
  when(x) { return this.from + (x - this.gutter) * this.perPixel; }

  // Paints at once: a canvas is empty after it was given a size.
  resize(width, height) {
    const ratio = devicePixelRatio || 1;
    Object.assign(this, { width, height });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.font = `11px ${this.colours.mono}`;
    this.letter = this.pen.measureText("m").width;
    this.clamp();
    this.paint();
  }

  // Frames are drawn when the browser asks, however many events came before.
  draw() {
    if (this.drawn) return;
    this.drawn = true;
    requestAnimationFrame(() => { this.drawn = false; this.paint(); });
  }

  show(from, to) {
    const span = Math.min(Math.max(to - from, 20), this.model.span * 1.04 + 20);
    const middle = (from + to) / 2;
    Object.assign(this, { from: middle - span / 2, to: middle + span / 2 });
    this.clamp();
    this.draw();
  }

  zoom(factor, x) {
    const centre = this.when(x);
    const [from, to] = [centre - (centre - this.from) * factor, centre + (this.to - centre) * factor];
    this.show(from, to);
  }

  move(dx, dy) {
    const shift = dx * this.perPixel;
    this.from += shift;
    this.to += shift;
    this.scroll += dy;
    this.clamp();
    this.draw();
  }

  clamp() {
    const margin = (this.to - this.from) * 0.02;
    const shift = Math.max(-margin - this.from, 0) || Math.min(this.model.span + margin - this.to, 0);
    if (this.to - this.from < this.model.span) { this.from += shift; this.to += shift; }
    else { const extra = (this.to - this.from - this.model.span) / 2; [this.from, this.to] = [-extra, this.model.span + extra]; }
    this.scroll = Math.max(0, Math.min(this.scroll, this.deepest));
  }

  get deepest() { return Math.max(0, this.plan.height - (this.height - this.top)); }

  paint() {
    const { pen, colours, width, height, top } = this;
    pen.fillStyle = colours.raised;
    pen.fillRect(0, 0, width, height);
    this.batch = new Map();
    this.texts = [];
    const shown = this.plan.items.filter((item) => item.y + item.height > this.scroll && item.y < this.scroll + height - top);
    this.clipped(this.gutter, top, width, height - top, () => {
      this.ticks(top, height, false);
      for (const item of shown) {
        const y = top + item.y - this.scroll;
        if (item.row) this.lane(item.row, y);
        if (item.counter) this.curve(item.counter, y);
      }
      this.flush();
      this.arrows();
    });
    this.clipped(this.gutter, 0, width, top, () => {
      this.ticks(0, AXIS, true);
      this.markWhole();
      this.plan.pinned.forEach((row, i) => this.lane(row, AXIS + i * LANE));
      this.flush();
    });
    this.sides(shown);
    this.canvas.dataset.from = this.from;
    this.canvas.dataset.to = this.to;
  }

  clipped(x, y, width, height, work) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(x, y, width, height);
    this.pen.clip();
    work();
    this.pen.restore();
  }

  // Slices narrower than a pixel share it: the next one that is drawn begins in another. Blocks are flat and nameless.
  lane(row, y) {
    const { ts, end, label, count: held } = this.model.slices;
    const { slices, reach } = row;
    const { kinds, names } = this.model;
    const scale = 1 / this.perPixel, base = this.gutter - this.from * scale;
    const right = this.width;
    let painted = -Infinity;
    for (let i = firstAbove(reach, this.from); i < slices.length; i += 1) {
      const slice = slices[i];
      const x = base + ts[slice] * scale;
      if (x > right) break;
      const x1 = base + end[slice] * scale;
      const found = !this.matches || this.matches[label[slice]];
      if (x1 < painted && slice !== this.selected) continue;
      const left = Math.max(x, this.gutter - 2);
      const room = Math.min(x1, right + 2) - left;
      const box = Math.max(room - (room > 3 ? 1 : 0), 1);
      const block = held[slice] > 1;
      this.box(found ? kinds[label[slice]] : "dim", left, block ? y + 4 : y, box, block ? LANE - 9 : LANE - 1);
      painted = Math.max(painted, left + Math.max(1, box));
      if (room > 26 && !block) this.texts.push(names[label[slice]][0], left + 4, y + 11.5, Math.floor((box - 7) / this.letter));
      if (slice === this.selected) this.frame = [left, y, Math.max(box, 2)];
    }
  }

  box(kind, x, y, width, height) {
    let boxes = this.batch.get(kind);
    if (!boxes) this.batch.set(kind, (boxes = []));
    boxes.push(x, y, width, height);
  }

  // One change of colour for all the boxes of a kind, then all the text.
  flush() {
    const { pen, colours } = this;
    for (const [kind, boxes] of this.batch) {
      pen.fillStyle = colours.fill[kind];
      for (let i = 0; i < boxes.length; i += 4) pen.fillRect(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3]);
    }
    pen.fillStyle = colours.ink;
    pen.font = `11px ${colours.mono}`;
    pen.textAlign = "left";
    for (let i = 0; i < this.texts.length; i += 4) {
      const [text, x, y, letters] = this.texts.slice(i, i + 4);
      if (letters > 1) pen.fillText(text.length > letters ? `${text.slice(0, letters - 1)}…` : text, x, y);
    }
    if (this.frame) {
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 2;
      pen.strokeRect(this.frame[0], this.frame[1] + 0.5, this.frame[2], LANE - 2);
      this.frame = null;
    }
    this.batch = new Map();
    this.texts = [];
  }

  ticks(y0, y1, labelled) {
    const { pen, colours } = this;
    const step = niceStep((this.to - this.from) / Math.max(2, (this.width - this.gutter) / 110));
    pen.strokeStyle = labelled ? colours.rule : colours.hair;
    pen.lineWidth = 1;
    pen.fillStyle = colours.soft;
    pen.font = `11.5px ${colours.sans}`;
    pen.textAlign = "left";
    pen.beginPath();
    for (let n = Math.ceil(this.from / step); n * step <= this.to; n += 1) {
      const x = Math.round(this.at(n * step)) + 0.5;
      pen.moveTo(x, labelled ? y1 - 8 : y0);
      pen.lineTo(x, y1);
      if (labelled) pen.fillText(tickLabel(n * step, step), x + 4, y1 - 10);
    }
    pen.stroke();
  }

  // The part of the time in which no slices are merged.
  markWhole() {
    const { merged, whole_ns: whole } = this.model.kept;
    if (!merged) return;
    this.pen.fillStyle = this.colours.accent;
    this.pen.fillRect(this.at(whole[0]), AXIS - 3, Math.max(this.at(whole[1]) - this.at(whole[0]), 2), 2);
  }

  curve(counter, y) {
    const { pen, colours } = this;
    const { ts, values } = counter;
    counter.most ??= Math.max(...values, 1e-12);
    counter.least ??= Math.min(...values, 0);
    const high = (value) => y + CURVE - 6 - ((value - counter.least) / (counter.most - counter.least)) * (CURVE - 14);
    const first = Math.max(0, firstAbove(ts, this.from) - 1);
    if (!ts.length) return;
    pen.beginPath();
    pen.moveTo(this.at(ts[first]), high(counter.least));
    let level = counter.least;
    for (let i = first; i < ts.length; i += 1) {
      const x = this.at(ts[i]);
      pen.lineTo(Math.min(x, this.width), high(level));
      if (x > this.width) break;
      pen.lineTo(x, high(values[i]));
      level = values[i];
    }
    const last = Math.min(this.at(this.model.span), this.width);
    pen.lineTo(last, high(level));
    pen.lineTo(last, high(counter.least));
    pen.closePath();
    pen.fillStyle = colours.fill.range;
    pen.fill();
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 1;
    pen.stroke();
  }

  // The flows of the selected slice, from where it was caused to where it led.
  arrows() {
    const { pen, colours, model } = this;
    const { ts, end } = model.slices;
    pen.strokeStyle = colours.ink;
    pen.fillStyle = colours.ink;
    pen.lineWidth = 1.4;
    if (this.arrowsOf !== this.selected) { this.arrowsOf = this.selected; this.flows = this.selected < 0 ? [] : flowsOf(model, this.selected).slice(0, 60); }
    for (const flow of this.flows) {
      const [out, into] = [model.flows.out[flow], model.flows.into[flow]];
      const [y1, y2] = [this.heightOf(out), this.heightOf(into)];
      if (y1 === null || y2 === null) continue;
      const [x1, x2] = [this.at(Math.min(end[out], Math.max(ts[out], ts[into]))), this.at(ts[into])];
      const bend = Math.max(16, Math.abs(x2 - x1) / 3);
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x2, y2);
      pen.lineTo(x2 - 7, y2 - 3.5);
      pen.lineTo(x2 - 7, y2 + 3.5);
      pen.fill();
    }
  }

  // The middle of the row that a slice stands in, or null where its track is folded.
  heightOf(slice) {
    const item = this.itemOf(slice);
    return item ? this.top + item.y - this.scroll + LANE / 2 : null;
  }

  itemOf(slice) {
    const track = this.model.tracks[this.model.slices.track[slice]];
    return this.plan.items.find((item) => item.row && item.track === track && placeIn(this.model, item.row, slice) >= 0);
  }

  // Names of processes, tracks and counters, left of the drawing.
  sides(shown) {
    const { pen, colours, gutter, width, height, top } = this;
    pen.fillStyle = colours.raised;
    pen.fillRect(0, 0, gutter, height);
    this.clipped(0, top, width, height - top, () => { for (const item of shown) this.side(item, top + item.y - this.scroll); });
    pen.fillStyle = colours.soft;
    pen.font = `11.5px ${colours.sans}`;
    if (this.plan.pinned.length) pen.fillText(clipped("Steps and phases", Math.floor((gutter - 14) / 6.1)), 10, AXIS + 12);
    pen.strokeStyle = colours.rule;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(gutter - 0.5, 0);
    pen.lineTo(gutter - 0.5, height);
    pen.moveTo(0, top - 1.5);
    pen.lineTo(width, top - 1.5);
    pen.stroke();
    if (this.deepest > 0) {
      const room = height - top;
      pen.fillStyle = colours.faint;
      pen.fillRect(width - 5, top + (room * this.scroll) / this.plan.height, 4, Math.max(18, (room * room) / this.plan.height));
    }
  }

  side(item, y) {
    const { pen, colours, gutter } = this;
    const letters = Math.floor((gutter - 26) / 6.1);
    pen.textAlign = "left";
    if (item.heading) {
      pen.fillStyle = colours.ink;
      pen.font = `600 12px ${colours.sans}`;
      pen.fillText(item.heading, 10, y + 17);
    } else if (item.title) {
      pen.fillStyle = colours.soft;
      pen.font = `11.5px ${colours.sans}`;
      pen.fillText(`${item.folded ? "▸" : "▾"} ${clipped(item.track.name, letters)}`, 10, y + 14);
      if (item.folded) pen.fillText(`${item.depth} ${item.depth === 1 ? "row" : "rows"} folded`, gutter + 8, y + 14);
    } else if (item.counter) {
      pen.fillStyle = colours.soft;
      pen.font = `11.5px ${colours.sans}`;
      pen.fillText(clipped(item.counter.name, letters), 10, y + 16);
      pen.fillStyle = colours.faint;
      pen.fillText(`at most ${inUnit(item.counter, item.counter.most)}`, 10, y + 31);
    }
  }

  // What is under a point: a slice, a track's name, a place on a counter.
  under(x, y) {
    if (y < AXIS) return {};
    const lane = Math.floor((y - AXIS) / LANE);
    if (y < this.top) return this.plan.pinned[lane] && x > this.gutter ? this.sliceUnder(this.plan.pinned[lane], x) : {};
    const place = y - this.top + this.scroll;
    const item = this.plan.items.find((each) => place >= each.y && place < each.y + each.height);
    if (!item) return {};
    if (x < this.gutter) return item.title ? { track: item.track } : {};
    if (item.counter) return { counter: item.counter, index: firstAbove(item.counter.ts, this.when(x)) - 1 };
    return item.row ? this.sliceUnder(item.row, x) : {};
  }

  sliceUnder(row, x) {
    const { ts, end } = this.model.slices;
    const [now, slack] = [this.when(x), 2 * this.perPixel];
    const after = firstAbove(row.slices, now + slack, (i) => ts[row.slices[i]]);
    let best = -1, nearest = Infinity;
    for (let i = after - 1; i >= 0 && i > after - 40; i -= 1) {
      const slice = row.slices[i];
      const away = Math.max(ts[slice] - now, now - end[slice], 0);
      if (away <= slack && away < nearest) { best = slice; nearest = away; }
    }
    return best < 0 ? {} : { slice: best, row };
  }
}

function placeIn(model, row, slice) {
  const { ts } = model.slices;
  let i = firstAbove(row.slices, ts[slice], (at) => ts[row.slices[at]]) - 1;
  while (i >= 0 && ts[row.slices[i]] === ts[slice]) { if (row.slices[i] === slice) return i; i -= 1; }
  return -1;
}

const inUnit = (counter, value) => (counter.unit === "bytes" ? bytes(value) : `${plainNumber(value)} ${counter.unit}`.trim());

function tickLabel(ns, step) {
  if (ns === 0) return "0";
  const [unit, size] = step >= 1e9 ? ["s", 1e9] : step >= 1e6 ? ["ms", 1e6] : step >= 1e3 ? ["µs", 1e3] : ["ns", 1];
  return `${(ns / size).toLocaleString("en")} ${unit}`;
}
