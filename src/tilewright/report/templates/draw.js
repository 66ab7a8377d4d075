// Vega draws every chart; colours and fonts are the page's, tooltips are its own.

const ERRORS = 1;
// In the order of charts.py's KINDS.
const KINDS = ["compute", "pointwise", "reduction", "layout", "random", "library", "unknown", "region", "launch", "bad", "accent", "faint"];

// How a figure is written follows from the end of its name.
const UNITS = [
  [/_ns$/, (ns) => nanos(ns)],
  [/_us$/, (us) => time(us)],
  [/_ms$/, (ms) => time(ms === null ? null : ms * 1000)],
  [/bytes$/, (size) => bytes(size)],
  [/^times_/, times],
  [/^TFLOPs$/, rate("TFLOP/s")],
  [/^GBps$/, rate("GB/s")],
  [/percent$/, given((part) => `${part.toFixed(1)} %`)],
];
const unitOf = (key) => UNITS.find(([pattern]) => pattern.test(key)) ?? [null, null];
const NAMES = { percent: "percent", TFLOPs: "FLOP rate", GBps: "bandwidth" };
const labelOf = (key) => NAMES[key] ?? key.replace(/_(ns|us|ms|percent)$/, "").replaceAll("_", " ");

const share = (part, whole) => `${((100 * part) / Math.max(whole, 1)).toFixed(1)} %`;

// Nanoseconds as people write them.
const nanos = given((ns) => (ns === 0 ? "0" : Math.abs(ns) < 1000 ? `${Math.round(ns)} ns` : time(ns / 1000)));

function look() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const [ink, soft, hair, sans] = ["ink", "soft", "hair", "sans"].map(of);
  const words = { labelColor: soft, titleColor: soft, labelFont: sans, titleFont: sans, titleFontWeight: "normal" };
  return {
    background: null, view: { stroke: null }, range: { category: KINDS.map(of) }, text: { fill: ink, font: sans }, line: { stroke: soft },
    rule: { stroke: ink }, axis: { ...words, gridColor: hair, domainColor: hair, tickColor: hair }, legend: words, area: { fill: of("accent") },
  };
}

// Draws `spec` into the element `id` with `data`, which has the rows of each dataset. `tell` makes a tooltip of a mark's row.
// A canvas is the faster renderer, and has at most 32,767 pixels.
function chart(id, spec, data, tell, renderer = "canvas") {
  const redraw = fitted(host(id), (width) => {
    const box = html("div");
    vegaEmbed(box, { ...spec, width, datasets: { ...spec.datasets, ...data } }, {
      ast: true, actions: false, defaultStyle: false, logLevel: ERRORS, renderer, config: look(), tooltip: (_, event, item, value) => {
        if (value) showTip(tell ? tell(item.datum) : told(value), event.clientX, event.clientY); else hideTip();
      },
    }).then(({ view }) => { box.view = view; });
    return box;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

// A tooltip of the encoded fields: `name` is its title, numbers have the units of their names.
function told({ name, ...fields }) {
  const rows = Object.entries(fields).map(([key, text]) => {
    const [, show] = unitOf(key);
    const number = Number(text);
    const shown = text === "null" || text === "" ? "" : show ? show(number) : Number.isNaN(number) ? text : plainNumber(number);
    return [labelOf(key), shown];
  });
  return { title: name ?? "", rows };
}
