// Decode a page's data (columns.py writes it) and read another page.

/** Values of a coded column: numbers, or words where the column has some. */
function values(coded) {
  let out = [];
  if ("all" in coded) out = new Array(coded.n).fill(coded.all);
  else if (coded.steps) {
    let sum = 0;
    out = coded.steps.map((step) => (sum += step));
  } else if (coded.runs) {
    for (let i = 0; i < coded.runs.length; i += 2) for (let n = coded.runs[i + 1]; n > 0; n--) out.push(coded.runs[i]);
  } else out = coded.values;
  return coded.words ? out.map((number) => coded.words[number]) : out;
}

/** One launch: decoded tables, and for each CTA its rows of them. */
class Launch {
  constructor(raw) {
    this.raw = raw;
    this.tables = {};
    for (const [name, table] of Object.entries(raw.tables)) {
      const columns = { rows: table.rows };
      for (const [column, coded] of Object.entries(table.columns)) columns[column] = values(coded);
      this.tables[name] = columns;
    }
    const { ptx } = raw;
    this.ptx = { line: values(ptx.line), file: values(ptx.file), number: values(ptx.number), executed: values(ptx.executed), text: ptx.text };
    this.rowOfLine = new Map(this.ptx.line.map((line, row) => [line, row]));
    this.files = new Map(raw.files.map((file) => [file.name, { lines: values(file.line), text: file.text }]));
    const found = new Set();
    for (const table of Object.values(this.tables)) for (const cta of table.cta) found.add(cta);
    this.ctas = [...found].sort((a, b) => a - b);
    this.parts = new Map();
  }

  /** Rows of each table that are of one CTA, and its moments: what the scrubber stops at. */
  part(cta) {
    if (!this.parts.has(cta)) {
      const rows = {};
      for (const [name, table] of Object.entries(this.tables)) {
        rows[name] = [];
        for (let i = 0; i < table.rows; i++) if (table.cta[i] === cta) rows[name].push(i);
      }
      this.parts.set(cta, { rows, moments: this.momentsOf(rows, cta) });
    }
    return this.parts.get(cta);
  }

  momentsOf(rows, cta) {
    const out = [];
    for (const name of ["ops", "boxes", "mmas", "tmem", "smem", "mbarriers", "named", "fences", "peers"]) {
      const table = this.tables[name];
      for (const i of rows[name]) {
        out.push([table.time[i], table.event[i]]);
        if (name === "ops" && table.done_event[i] >= 0) out.push([table.done_time[i], table.done_event[i]]);
      }
    }
    out.sort((a, b) => a[1] - b[1]);
    for (let i = 1; i < out.length; i++) out[i][0] = Math.max(out[i][0], out[i - 1][0]);
    const events = out.slice();
    const { states, marks } = this.tables;
    const found = this.raw.findings.filter((one) => one.cta === cta).map((one) => one.time);
    const times = [...rows.marks.map((i) => marks.time[i]), ...rows.states.flatMap((i) => [states.time[i], states.end[i]]), ...found];
    let at = 0;
    for (const time of times.filter((one) => one <= this.raw.time).sort((a, b) => a - b)) { // a warp that has not exited ends later
      while (at < events.length && events[at][0] <= time) at++;
      out.push([time, at ? events[at - 1][1] : -1]);
    }
    out.sort((a, b) => a[1] - b[1] || a[0] - b[0]);
    const unique = out.filter((one, i) => !i || one[0] !== out[i - 1][0] || one[1] !== out[i - 1][1]);
    return unique.length ? unique : [[0, -1]];
  }

  /** Begin and end of a CTA's life in warp-instructions. */
  life(cta) {
    const { rows } = this.part(cta);
    let first = Infinity;
    let last = 0;
    for (const i of rows.states) {
      first = Math.min(first, this.tables.states.time[i]);
      last = Math.max(last, this.tables.states.end[i]);
    }
    for (const i of rows.ops) {
      first = Math.min(first, this.tables.ops.time[i]);
      last = Math.max(last, this.tables.ops.done_time[i]);
    }
    if (first === Infinity) return [0, Math.max(this.raw.time, 1)];
    return [first, Math.max(last, first + 1)];
  }

  /** The instruction of a PTX line: its text, file and line; empty where the page has none. */
  code(line) {
    const row = this.rowOfLine.get(line);
    if (row === undefined) return { row: -1, text: "", file: "", number: 0 };
    return { row, text: this.ptx.text[row], file: this.ptx.file[row], number: this.ptx.number[row] };
  }

  ctaName(cta) {
    if (cta < 0) return "no CTA";
    const [x, y] = this.raw.grid;
    return `CTA (${cta % x}, ${Math.floor(cta / x) % y}, ${Math.floor(cta / (x * y))})`;
  }
}

/** The data of a report's text, or an Error that says why it is none. Nothing of the text runs. */
function readReport(text) {
  const other = new DOMParser().parseFromString(text, "text/html").getElementById("microscope-data");
  if (!other) throw new Error("this file is no report of the microscope");
  const data = JSON.parse(other.textContent);
  if (data.format !== 1 || !Array.isArray(data.launches) || !data.launches.length)
    throw new Error(`this report has the format ${data.format}; this page reads format 1`);
  return data;
}
