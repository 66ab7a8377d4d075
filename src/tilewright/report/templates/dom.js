// Elements, numbers with units, and the one tooltip. Text enters the page only as text nodes.

function html(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// A sentence, with code between its backticks.
function prose(sentence) {
  return (sentence ?? "–").split("`").map((part, i) => (i % 2 ? html("code", {}, part) : part));
}

// The rows of one query, as objects.
function records(answer) {
  return answer.rows.map((row) => Object.fromEntries(answer.columns.map((name, i) => [name, row[i]])));
}

// Three significant digits and a unit, as the terminal writes them.
function scaled(value, units) {
  let step = 0;
  while (Math.abs(value) >= 999.5 && step < units.length - 1) { value /= 1000; step += 1; }
  const digits = Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[step]}`.trimEnd();
}

// A value that is absent is a dash; NaN and infinities come as their names.
const given = (show) => (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : show(value));
const count = given((n) => (Math.abs(n) < 100000 ? Math.round(n).toLocaleString("en") : scaled(n, ["", "k", "M", "G", "T", "P", "E"])));
const bytes = given((n) => (Math.abs(n) < 1000 ? `${n} B` : scaled(n, ["B", "kB", "MB", "GB", "TB", "PB"])));
const time = given((us) => (us === 0 ? "0" : Math.abs(us) < 1 ? `${us.toFixed(3)} µs` : scaled(us, ["µs", "ms", "s"])));
// A rate in GB/s or TFLOP/s, in a unit that suits it; as `rate_figure` in records/measurement.py writes it.
const rate = (unit) => given((value) => {
  const [shown, of] = unit === "TFLOP/s" && value < 1 ? [value * 1e3, "GFLOP/s"] : [value, unit];
  return `${shown.toLocaleString("en", { maximumSignificantDigits: 4 })} ${of}`;
});
const scientific = given((n) => n.toExponential(1));
const plainNumber = given((n) => n && (Math.abs(n) < 1e-3 || Math.abs(n) >= 1e6) ? scientific(n) : Number(n.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 }));
const times = given((n) => `${n < 9.995 ? n.toFixed(2) : n < 99.95 ? n.toFixed(1) : Math.round(n).toLocaleString("en")}×`);
// B*S**2 as B·S²; a power beyond the digits that Unicode raises stays as it is written.
const formula = (text) => text.replace(/\*\*(\d+)/g, (_, power) => power.replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])).replace(/(?<!\*)\*(?!\*)/g, "·");

const tip = document.getElementById("tip");

// `info` is {title, rows: [[label, text], …]}; rows without text are left out.
function showTip(info, x, y) {
  const list = html("dl");
  for (const [label, text] of info.rows) {
    if (text !== null && text !== undefined && text !== "" && text !== "–") list.append(html("dt", {}, label), html("dd", {}, text));
  }
  tip.replaceChildren(html("b", {}, info.title), list);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - box.height - 8))}px`;
}

function hideTip() { tip.hidden = true; }

// Redraws when the width that a drawing may take has changed.
function fitted(host, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(host.clientWidth);
    if (now && now !== width) { width = now; host.replaceChildren(draw(now)); }
  }).observe(host);
  return () => { if (width) host.replaceChildren(draw(width)); };
}

// A row of buttons of which one is pressed; `pick` hears which.
function choice(label, options, pressed, pick) {
  const group = html("div", { class: "switch", role: "group", "aria-label": label });
  for (const option of options) {
    const button = html("button", { type: "button", "aria-pressed": option === pressed }, option);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", other === button);
      pick(option);
    });
    group.append(button);
  }
  return group;
}
