// Programs of a kernel, step by step: the tile of each load and store in its operand, beside the line of the source.

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 1000, LEAST_HIGH = 36, MOST_HIGH = 420, LEAST_SIDE = 4;
const spans = (step) => step.ranges.map(([first, last]) => (first === last ? first.toLocaleString("en") : `${first.toLocaleString("en")}–${last.toLocaleString("en")}`)).join(", ");

function shape(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function slider(label, last, show) {
  const input = html("input", { type: "range", min: 0, max: last, value: 0, "aria-label": label });
  input.addEventListener("input", () => show(Number(input.value)));
  return input;
}

// Rows and columns of an operand: its last axis across, all others down.
function operandMap(operand) {
  const high = Math.min(MOST_HIGH, Math.max(LEAST_HIGH, (WIDE * operand.rows) / operand.columns));
  const drawing = shape("svg", { viewBox: `0 0 ${WIDE} ${high}`, preserveAspectRatio: "none", role: "img", "aria-label": operand.text });
  const ends = html("div", { class: "axis" }, html("span", {}, "0"), html("span", {}, `${operand.rows > 1 ? `${operand.rows.toLocaleString("en")} rows of ` : ""}${operand.columns.toLocaleString("en")}`));
  const figure = html("figure", {}, html("figcaption", {}, operand.text), drawing, ends);
  const tile = ([top, bottom, left, right], kind) => {
    const x = (WIDE * left) / operand.columns, y = (high * top) / operand.rows;
    const wide = Math.max(LEAST_SIDE, (WIDE * (right - left + 1)) / operand.columns);
    const tall = Math.max(LEAST_SIDE, (high * (bottom - top + 1)) / operand.rows);
    return shape("rect", { class: kind, x: Math.min(x, WIDE - wide), y: Math.min(y, high - tall), width: wide, height: tall });
  };
  const draw = (steps, now) => {
    const mine = steps.filter((step) => step.operand === operand.name && step.elements);
    drawing.replaceChildren(...mine.map((step) => tile(step.box, step === now ? step.direction : "earlier")));
    figure.className = now && now.operand === operand.name ? "now" : "";
  };
  return { figure, draw };
}

function sentence(steps, at) {
  const step = steps[at];
  const done = (direction) => steps.slice(0, at + 1).filter((each) => each.direction === direction).reduce((sum, each) => sum + each.bytes, 0);
  const masked = step.lanes - step.elements;
  const what = step.elements
    ? `${step.direction}s ${step.operand}[${spans(step)}], a block of ${step.shape.join("×") || "1"}: ${bytes(step.bytes)}, elements ${step.offsets[0].toLocaleString("en")} to ${step.offsets[1].toLocaleString("en")} of its memory` + (masked ? `, ${masked.toLocaleString("en")} of ${step.lanes.toLocaleString("en")} lanes masked` : "")
    : `${step.direction}s nothing of ${step.operand}: all ${step.lanes.toLocaleString("en")} lanes are masked`;
  return [html("b", {}, `Step ${at + 1} of ${steps.length}`), ` ${what}. So far ${bytes(done("read"))} read, ${bytes(done("write"))} written.`];
}

function replay(section, kernel) {
  const lines = kernel.source.map((line) => html("span", {}, line || " "));
  section.querySelector("pre.source").append(...lines);
  const maps = kernel.operands.filter((operand) => kernel.programs.some((one) => one.steps.some((step) => step.operand === operand.name))).map(operandMap);
  section.querySelector(".maps").append(...maps.map((one) => one.figure));
  const said = section.querySelector(".said");
  let steps = [], at = 0, playing = 0;
  const show = (next) => {
    at = next;
    const now = steps[at];
    for (const one of maps) one.draw(steps.slice(0, at + 1), now);
    lines.forEach((line, n) => line.classList.toggle("now", Boolean(now) && now.line === n + 1));
    timeSlider.value = at;
    output.value = `step ${at + 1}`;
    said.replaceChildren(...(now ? sentence(steps, at) : ["This program reads and writes nothing."]));
  };
  const stop = () => { clearInterval(playing); playing = 0; play.textContent = "Play"; };
  const choose = (n) => {
    steps = kernel.programs[n].steps;
    timeSlider.max = Math.max(steps.length - 1, 0);
    show(0);
  };
  const programs = html("select", { "aria-label": "program" });
  kernel.programs.forEach((one, n) => programs.append(html("option", { value: n }, `program ${one.program.slice(0, kernel.grid.length).join(", ")}${one.left_out ? `, its first ${one.steps.length} steps` : ""}`)));
  programs.addEventListener("change", () => { stop(); choose(Number(programs.value)); });
  const timeSlider = slider("step", 0, (next) => { stop(); show(next); });
  const back = html("button", { type: "button", "aria-label": "one step back" }, "‹");
  const on = html("button", { type: "button", "aria-label": "one step on" }, "›");
  const play = html("button", { type: "button" }, "Play");
  const output = html("output");
  back.addEventListener("click", () => { stop(); show(Math.max(at - 1, 0)); });
  on.addEventListener("click", () => { stop(); show(Math.min(at + 1, steps.length - 1)); });
  play.addEventListener("click", () => {
    if (playing) { stop(); return; }
    if (at === steps.length - 1) show(0);
    play.textContent = "Pause";
    playing = setInterval(() => (at < steps.length - 1 ? show(at + 1) : stop()), 400);
  });
  section.querySelector(".steps").append(programs, back, timeSlider, on, play, output);
  choose(0);
}

const FIGURES = [
  ["programs", count], ["tiles", count], ["registers", count], ["shared", bytes], ["blocks", count],
  ["waves", given((n) => n.toFixed(2))], ["idle", given((n) => `${Math.round(100 * n)} %`)], ["measured_us", time],
];
const HEADS = ["", "programs", "tiles of one", "registers", "shared memory", "programs per SM", "waves", "last wave idle", "time, measured"];

function sizes(section, kernel) {
  const table = section.querySelector("table.figures");
  const rows = kernel.tiles.map((one) => one.refused
    ? html("tr", {}, html("td", {}, one.change), html("td", { class: "prose", colspan: FIGURES.length }, one.refused))
    : html("tr", {}, html("td", {}, one.change), ...FIGURES.map(([name, text]) => html("td", { class: "number" }, text(one[name])))));
  table.append(html("thead", {}, html("tr", {}, ...HEADS.map((head) => html("th", head ? { class: "number" } : {}, head)))), html("tbody", {}, ...rows));
  const output = html("output");
  const show = (n) => {
    rows.forEach((row, at) => row.classList.toggle("now", at === n));
    output.value = kernel.tiles[n].change;
  };
  section.querySelector(".sizes").append(slider("tile size", kernel.tiles.length - 1, show), output);
  show(0);
}

const kernels = JSON.parse(document.getElementById("kernels").textContent);
for (const section of document.querySelectorAll(".replay")) {
  const kernel = kernels[section.dataset.kernel];
  if (kernel.programs.length) replay(section, kernel);
  sizes(section, kernel);
}
