// The panels beside the timeline: memories, barriers, warps, source and PTX, each with its text.

const CELLS = { mma: ["--k-mma-written", "written by an MMA"], ld: ["--k-thread-read", "loaded by threads"], st: ["--k-stored", "stored by threads"], cp: ["--k-copied", "copied"], A: ["--k-a", "read as A"] };
const BYTES = {
  tma: ["--k-tma-written", "written by TMA"],
  "tma store": ["--k-tma-read", "read by TMA"],
  "bulk load": ["--k-bulk-written", "written by bulk copies"],
  "bulk store": ["--k-bulk-read", "read by bulk copies"],
  "cp.async": ["--k-cpasync", "written by cp.async"],
  threads: ["--k-thread-written", "written by threads"],
  "mma A": ["--k-a", "read as A"],
  "mma B": ["--k-b", "read as B"],
  "wgmma A": ["--k-a", "read as A"],
  "wgmma B": ["--k-b", "read as B"],
  "tcgen05.cp": ["--k-cp-read", "read by tcgen05.cp"],
};
const SMEM_ACROSS = 64; // cells of 16 bytes in a row: 1 KiB
const AROUND = 25; // lines of code before and after the current one
const LISTED = 8; // ranges that a text lists

function element(tag, attributes = {}, ...children) {
  const out = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") out.className = value;
    else if (name === "text") out.textContent = value;
    else if (name.startsWith("on")) out.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) out.setAttribute(name, value === true ? "" : value);
  }
  out.append(...children);
  return out;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children);
}

/** Paint cells, each of a colour or none, on a canvas that is `across` cells wide. */
function paintCells(canvas, across, kinds, colourOf) {
  const down = Math.ceil(kinds.length / across);
  canvas.width = across;
  canvas.height = down;
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, across, down);
  const known = new Map();
  for (let row = 0; row < down; row++) {
    let column = 0;
    while (column < across) {
      const kind = kinds[row * across + column];
      let end = column + 1;
      while (end < across && kinds[row * across + end] === kind) end++;
      if (kind !== undefined && kind !== "") {
        if (!known.has(kind)) known.set(kind, colourOf(kind));
        pen.fillStyle = known.get(kind);
        pen.fillRect(column, row, end - column, 1);
      }
      column = end;
    }
  }
}

/** Stretches of equal values: [first, end, value], without those of "". */
function stretches(list) {
  const out = [];
  for (let i = 0; i < list.length; ) {
    let end = i + 1;
    while (end < list.length && list[end] === list[i]) end++;
    if (list[i] !== "") out.push([i, end, list[i]]);
    i = end;
  }
  return out;
}

function listed(texts, none) {
  if (!texts.length) return none;
  const more = texts.length - LISTED;
  return texts.slice(0, LISTED).join("; ") + (more > 0 ? `; and ${more} more` : "") + ".";
}

function legend(kinds, table) {
  const seen = [...new Set(kinds)].filter(Boolean).sort();
  return element("p", { class: "legend" }, ...seen.map((kind) => {
    const [name, text] = table[kind] || ["--k-copy", kind];
    const swatch = element("i");
    swatch.style.background = colour(name);
    return element("span", {}, swatch, text);
  }));
}

function tmemPanel(launch, cta, event) {
  const table = launch.tables.tmem;
  if (!launch.part(cta).rows.tmem.length) return [element("p", { class: "none", text: "This CTA does not use tensor memory." })];
  const rows = tmemAt(launch, cta, event);
  const kinds = Array.from(rows, (row) => (row < 0 ? "" : table.what[row]));
  const canvas = element("canvas", { class: "cells tmem", role: "img", "aria-label": "Tensor memory: 128 lanes down, 512 columns across, coloured by the last access" });
  paintCells(canvas, COLUMNS, kinds, (kind) => colour(CELLS[kind][0]));
  const columns = [];
  for (let column = 0; column < COLUMNS; column++) {
    const found = new Set();
    let lanes = 0;
    for (let lane = 0; lane < LANES; lane++) {
      const kind = kinds[lane * COLUMNS + column];
      if (kind) lanes++;
      if (kind) found.add(CELLS[kind][1]);
    }
    columns.push(lanes ? `${[...found].sort().join(" and ")}, ${lanes} lanes` : "");
  }
  const texts = stretches(columns).map(([from, end, text]) => `columns ${from} to ${end - 1} ${text}`);
  return [canvas, legend(kinds, CELLS), element("p", { class: "words", text: listed(texts, "Nothing has touched it yet.") })];
}

function smemPanel(launch, cta, event) {
  const table = launch.tables.smem;
  if (!launch.part(cta).rows.smem.length) return [element("p", { class: "none", text: "Nothing of this CTA's shared memory is in the trace." })];
  const kinds = Array.from(smemAt(launch, cta, event), (row) => (row < 0 ? "" : table.what[row]));
  const canvas = element("canvas", { class: "cells smem", role: "img", "aria-label": "Shared memory: 1 KiB a row, coloured by the last access to each 16 bytes" });
  paintCells(canvas, SMEM_ACROSS, kinds, (kind) => colour((BYTES[kind] || ["--k-copy"])[0]));
  const hex = (chunk) => `0x${(16 * chunk).toString(16)}`;
  const texts = stretches(kinds).map(([from, end, kind]) => `${hex(from)} to ${hex(end)} ${(BYTES[kind] || ["", kind])[1]}`);
  return [canvas, legend(kinds, BYTES), element("p", { class: "words", text: listed(texts, "Nothing has touched it yet.") })];
}

function barrierPanel(launch, cta, event, time, warps) {
  const known = barriersAt(launch, cta, event);
  for (const one of warps) if (one.state === "wait" && one.barrier >= 0 && !known.has(one.barrier & OFFSET_MASK)) known.set(one.barrier & OFFSET_MASK, null);
  const named = launch.tables.named;
  const last = namedAt(launch, cta, time);
  if (!known.size && !last.size) return [element("p", { class: "none", text: "No barrier has been used yet." })];
  const waiting = (offset) => warps.filter((one) => one.state === "wait" && one.barrier >= 0 && (one.barrier & OFFSET_MASK) === offset).map((one) => one.warp).join(", ");
  const unseen = (offset) => [element("td", { text: "0 (even)" }), element("td", { text: "no arrival yet" }), element("td"), element("td", { text: waiting(offset) })];
  const body = [...known].sort((a, b) => a[0] - b[0]).map(([offset, one]) => element("tr", { "data-offset": offset },
    element("th", { scope: "row", text: barrierName(launch, offset) }), ...(one ? [
    element("td", { class: one.phase % 2 ? "odd" : "even", text: `${one.phase} (${one.phase % 2 ? "odd" : "even"})` }),
    element("td", { text: `${one.pending} of ${one.expected}` }),
    element("td", { text: one.tx ? one.tx.toLocaleString("en") : "" }),
    element("td", { text: waiting(offset) })] : unseen(offset))));
  for (const [name, { row, done, arrived }] of [...last].sort((a, b) => (a[0] < b[0] ? -1 : 1))) {
    const cluster = named.kind[row] === "cluster"; // of which the trace has the phase, not how many are expected
    const reason = cluster ? "barrier.cluster" : name.replace("named", "barrier");
    const here = warps.filter((one) => one.state === "wait" && one.reason === reason);
    const released = here.filter((one) => one.since <= done).map((one) => one.warp).join(", ");
    const still = here.filter((one) => one.since > done).map((one) => one.warp).join(", ");
    body.push(element("tr", {}, element("th", { scope: "row", text: cluster ? "cluster's barrier" : reason }),
      element("td", { text: cluster ? String(named.expected[row]) : "" }), element("td", { text: cluster ? "" : `${arrived} arrived of ${named.expected[row]}` }), element("td"),
      element("td", { text: released ? `${still ? `${still}; ` : ""}released: ${released}` : still })));
  }
  const head = element("tr", {}, ...["barrier", "phase", "pending arrivals", "bytes to come", "warps that wait"].map((text) => element("th", { scope: "col", text })));
  return [element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))];
}

function warpPanel(launch, warps, selected, pick) {
  const body = warps.map((one) => {
    const code = launch.code(one.line);
    const where = code.file ? `${code.file.split("/").pop()}:${code.number}` : one.line > 0 ? `PTX ${one.line}` : "";
    const button = element("button", { type: "button", text: String(one.warp), "aria-pressed": one.warp === selected, "aria-label": `warp ${one.warp}`, onclick: () => pick(one.warp) });
    const state = one.state === "wait" ? `waits: ${one.reason}` : one.state === "run" ? "runs" : one.state;
    return element("tr", { class: one.warp === selected ? "selected" : "" }, element("th", { scope: "row" }, button), element("td", { text: state }), element("td", { text: where }), element("td", { class: "code", text: code.text }));
  });
  const head = element("tr", {}, ...["warp", "state", "source", "instruction"].map((text) => element("th", { scope: "col", text })));
  return [element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))];
}

/** What an operation touches, in words: its box or shape, and ranges of the memories. */
function operandsOf(launch, cta, op) {
  const { boxes, mmas, smem, tmem } = launch.tables;
  const { rows } = launch.part(cta);
  const hex = (byte) => `0x${byte.toString(16)}`;
  const own = (name) => rows[name].filter((i) => launch.tables[name].op[i] === op);
  const out = own("boxes").map((i) => `${boxes.nbytes[i].toLocaleString("en")} bytes at ${boxes.box[i]}${boxes.barrier[i] < 0 ? "" : `, signals ${barrierName(launch, boxes.barrier[i] & OFFSET_MASK)}`}`);
  for (const i of own("mmas")) out.push(`${mmas.kind[i]} ${mmas.m[i]} x ${mmas.n[i]} x ${mmas.k[i]}${mmas.accumulate[i] ? ", adds to D" : ", writes D anew"}`);
  for (const i of own("tmem")) out.push(`tensor memory ${tmem.write[i] ? "written" : "read"}: columns ${tmem.column[i]} to ${tmem.end[i] - 1}`);
  for (const i of own("smem")) out.push(`shared memory ${smem.write[i] ? "written" : "read"}: within ${hex(smem.first[i])} to ${hex(smem.end[i])}`);
  return out;
}

/** Lines of a text around the current one. */
function codeLines(numbers, texts, current, flagged, empty) {
  const at = numbers.indexOf(current);
  if (at < 0) return [element("p", { class: "none", text: empty })];
  const list = element("ol", { class: "lines", tabindex: "0" });
  for (let i = Math.max(at - AROUND, 0); i < Math.min(at + AROUND + 1, numbers.length); i++) {
    const line = element("li", { value: numbers[i], class: numbers[i] === current ? "current" : flagged.has(numbers[i]) ? "flagged" : "" }, element("code", { text: texts[i] || " " }));
    if (numbers[i] === current) line.setAttribute("aria-current", "true");
    list.append(line);
  }
  return [list];
}

function centre(panel) {
  const current = panel.querySelector(".current");
  const list = panel.querySelector(".lines");
  if (current && list) list.scrollTop = current.offsetTop - list.clientHeight / 2;
}

function sourcePanel(launch, line, findings) {
  const code = launch.code(line);
  const file = launch.files.get(code.file);
  if (!code.file) return { title: "Source", nodes: [element("p", { class: "none", text: "This instruction has no line info." })] };
  const flagged = new Set();
  for (const one of findings) for (const side of [one.place, one.against]) if (side && side.file === code.file) flagged.add(side.line);
  const missing = `${code.file}:${code.number} could not be read where this report was made.`;
  const nodes = file ? codeLines(file.lines, file.text, code.number, flagged, missing) : [element("p", { class: "none", text: missing })];
  return { title: `Source: ${code.file}, line ${code.number}`, nodes };
}

function ptxPanel(launch, line, findings) {
  const flagged = new Set();
  for (const one of findings) for (const pair of one.instructions) for (const other of pair) flagged.add(other);
  return { title: line > 0 ? `PTX, line ${line}` : "PTX", nodes: codeLines(launch.ptx.line, launch.ptx.text, line, flagged, "No instruction is chosen.") };
}
