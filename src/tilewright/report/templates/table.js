// Tables to sort by a click on a header and to filter by text and by the value of a column.

// A browser lays out some hundreds of rows at once without a pause; a button asks for the rest.
const FIRST_ROWS = 400;

// A column is {key, label, number, cell(row), order(row), aside}: `cell` gives a string or nodes, `order`
// what to sort by, the value under `key` unless it is given. A narrow window leaves out those `aside`, and says which.
function sortable(host, columns, rows, { filters = [], search = false, label }) {
  let sorted = { column: null, descending: false };
  const chosen = new Map();
  const body = html("tbody");
  const tally = html("span", { class: "tally", role: "status" });
  const texts = new Map();
  let wanted = "";
  let most = FIRST_ROWS;

  function textOf(row) {
    if (!texts.has(row)) texts.set(row, Object.values(row).flat().join(" ").toLowerCase());
    return texts.get(row);
  }
  function shown() {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) =>
      [...chosen].every(([key, value]) => value === "" || row[key] === value) && words.every((word) => textOf(row).includes(word)));
    if (!sorted.column) return kept;
    const order = sorted.column.order ?? ((row) => row[sorted.column.key]);
    const sign = sorted.descending ? -1 : 1;
    return kept.sort((a, b) => compare(order(a), order(b), sign));
  }
  function draw() {
    const kept = shown();
    body.replaceChildren(...kept.slice(0, most).map((row) => line(columns, row)));
    if (kept.length > most) body.append(html("tr", {}, html("td", { class: "empty", colspan: columns.length }, more(kept.length))));
    if (!kept.length) body.append(html("tr", {}, html("td", { class: "empty", colspan: columns.length }, "No row matches.")));
    tally.textContent = kept.length === rows.length ? `${rows.length.toLocaleString("en")} rows` : `${kept.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
  }
  function more(total) {
    const button = html("button", { type: "button", class: "more" }, `Show all ${total.toLocaleString("en")} rows`);
    button.addEventListener("click", () => { most = Infinity; draw(); });
    return button;
  }

  const head = html("tr");
  for (const column of columns) {
    const button = html("button", { type: "button" }, column.label);
    const cell = html("th", { scope: "col", class: classes(column, ""), "aria-sort": "none" }, button);
    button.addEventListener("click", () => {
      sorted = { column, descending: sorted.column === column ? !sorted.descending : Boolean(column.number) };
      for (const other of head.children) other.setAttribute("aria-sort", "none");
      cell.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
      draw();
    });
    head.append(cell);
  }
  const controls = html("div", { class: "controls" });
  if (search) {
    const box = html("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${label}` });
    box.addEventListener("input", () => { wanted = box.value; draw(); });
    controls.append(box);
  }
  for (const { key, label: name, first = "" } of filters) {
    const values = [...new Set(rows.map((row) => row[key]))];
    if (values.length < 2) continue;
    const select = html("select", { "aria-label": name, "data-key": key }, html("option", { value: "" }, `every ${name}`));
    for (const value of values) select.append(html("option", { value }, value));
    select.value = values.includes(first) ? first : "";
    chosen.set(key, select.value);
    select.addEventListener("change", () => { chosen.set(key, select.value); draw(); });
    controls.append(select);
  }
  if (search || controls.children.length) { controls.append(tally); host.append(controls); }
  host.append(html("div", { class: "sheet", tabindex: "0", role: "region", "aria-label": label },
    html("table", {}, html("thead", {}, head), body)));
  const left = columns.filter((column) => column.aside).map((column) => column.label).filter(Boolean);
  if (left.length) host.append(html("p", { class: "left-out" }, `A wider window shows ${left.join(", ")} too.`));
  draw();
}

function classes(column, kind) {
  return [column.number ? "number" : "", kind ?? "", column.aside ? "aside" : ""].filter(Boolean).join(" ");
}

function line(columns, row) {
  const tr = html("tr", row.marked ? { class: "marked" } : {});
  for (const column of columns) {
    const content = column.cell ? column.cell(row) : (row[column.key] ?? "–");
    const cell = html("td", { class: classes(column, column.kind) }, ...[content].flat());
    // A long name is cut short in its cell and whole on hover.
    if (column.kind === "code") cell.title = [...cell.childNodes].map((node) => node.textContent).join("\n");
    tr.append(cell);
  }
  return tr;
}

// Rows without a value come last, whichever way the others go.
function compare(a, b, sign) {
  const none = (value) => value === null || value === undefined || value === "";
  if (none(a) || none(b)) return none(a) - none(b);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

// A figure with its formula: the formula large where there is one that says more than the number.
function counted(number, symbolic, known = true) {
  if (!known) return [html("span", { class: "failed" }, "unknown")];
  if (!symbolic || /^\d+$/.test(symbolic)) return [count(number)];
  return [formula(symbolic), html("small", {}, count(number))];
}
