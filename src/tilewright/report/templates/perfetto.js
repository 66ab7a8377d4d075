// Hands the drawn slices to Perfetto's own page, or to a file where there is no network.

const PERFETTO = "https://ui.perfetto.dev";
const PATIENCE_MS = 20_000;

// The trace as Chrome's JSON: times in µs from its start, to the nanosecond.
function chromeTrace(model) {
  const { begin, length, label, args, track, count: held } = model.slices;
  const events = [];
  const us = (ns) => ns / 1000;
  const place = (i) => ({ pid: model.homes[track[i]].upid ?? 1_000_000, tid: track[i] });
  model.homes.forEach(({ name, process, upid }, tid) => {
    const pid = upid ?? 1_000_000;
    events.push({ ph: "M", name: "process_name", pid, args: { name: process } }, { ph: "M", name: "thread_name", pid, tid, args: { name } });
  });
  for (const i of [...begin.keys()].sort((a, b) => begin[a] - begin[b] || length[b] - length[a])) {
    const [name, cat] = model.names[label[i]];
    const event = { ph: length[i] < 0 ? "B" : "X", name: held[i] > 1 ? `${count(held[i])} short slices, longest ${name}` : name, cat, ...place(i), ts: us(begin[i]) };
    if (length[i] >= 0) event.dur = us(length[i]);
    if (args[i]) event.args = model.args[args[i] - 1];
    events.push(event);
  }
  for (let flow = 0; flow < model.flows.out.length; flow += 1) {
    const [out, into] = [model.flows.out[flow], model.flows.into[flow]];
    const name = model.flows.kinds[model.flows.kind[flow]] || "flow";
    events.push({ ph: "s", id: flow, name, cat: name, ...place(out), ts: us(begin[out]) }, { ph: "f", bp: "e", id: flow, name, cat: name, ...place(into), ts: us(begin[into]) });
  }
  for (const counter of model.counters) counter.values.forEach((value, i) => events.push({ ph: "C", name: counter.name, pid: 1_000_001, ts: us(counter.ts[i]), args: { value } }));
  return JSON.stringify({ displayTimeUnit: "ns", traceEvents: events });
}

function perfettoButton(model, title) {
  const said = html("span", { class: "note", role: "status" });
  const open = html("button", { type: "button", class: "plain" }, "Open in Perfetto");
  const save = html("button", { type: "button", class: "plain" }, "Save as JSON");
  const say = (text) => { said.textContent = text; };
  save.addEventListener("click", () => {
    const link = html("a", { download: `${title.replace(/[^\w.-]+/g, "-")}.trace.json`, href: URL.createObjectURL(new Blob([chromeTrace(model)], { type: "application/json" })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    say("Saved. ui.perfetto.dev and chrome://tracing open the file.");
  });
  open.addEventListener("click", () => openInPerfetto(model, title, say));
  return html("span", { class: "perfetto" }, open, save, said);
}

// Perfetto answers PING with PONG when it is ready, then takes the trace as a message; it stays in this browser.
function openInPerfetto(model, title, say) {
  const offline = "Perfetto's page cannot be reached from here: it needs a network. Save as JSON, and open the file where there is one.";
  if (navigator.onLine === false) { say(offline); return; }
  const page = window.open(PERFETTO);
  if (!page) { say("The browser did not let this page open a tab. Allow it, or save as JSON."); return; }
  say("Waiting for Perfetto …");
  const asking = setInterval(() => page.postMessage("PING", PERFETTO), 200);
  const stop = (text) => { clearInterval(asking); clearTimeout(giveUp); removeEventListener("message", answer); say(text); };
  const giveUp = setTimeout(() => stop(offline), PATIENCE_MS);
  function answer(event) {
    if (event.source !== page || event.origin !== PERFETTO || event.data !== "PONG") return;
    const buffer = new TextEncoder().encode(chromeTrace(model)).buffer;
    page.postMessage({ perfetto: { buffer, title } }, PERFETTO, [buffer]);
    stop("Opened in a tab of its own; the trace went from this page to that tab and nowhere else.");
  }
  addEventListener("message", answer);
}
