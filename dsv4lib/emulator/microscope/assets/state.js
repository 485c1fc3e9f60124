// What a CTA looks like at a moment: its warps, barriers and memories.

const LANES = 128;
const COLUMNS = 512;
const TMEM_KINDS = ["mma", "ld", "st", "cp", "A"];
const OFFSET_MASK = 0xffffff;

/** How many of `rows` come at or before `event` (ascending in `column`). */
function countUpTo(rows, column, event) {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[rows[middle]] <= event) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Rows up to an event that show: of those with the same key the last one, in order. */
function showing(rows, count, key) {
  const last = new Map();
  for (let i = 0; i < count; i++) last.set(key(rows[i]), rows[i]);
  return [...last.values()].sort((a, b) => a - b);
}

/** Row of the last access to each cell of tensor memory, -1: none. */
function tmemAt(launch, cta, event) {
  const table = launch.tables.tmem;
  const rows = launch.part(cta).rows.tmem;
  const out = new Int32Array(LANES * COLUMNS).fill(-1);
  const count = countUpTo(rows, table.event, event);
  for (const row of showing(rows, count, (i) => `${table.column[i]} ${table.end[i]} ${table.lanes[i]}`)) {
    const lanes = launch.raw.lanes[table.lanes[row]];
    for (let i = 0; i < lanes.length; i += 2)
      for (let lane = lanes[i]; lane < lanes[i] + lanes[i + 1]; lane++)
        out.fill(row, lane * COLUMNS + table.column[row], lane * COLUMNS + table.end[row]);
  }
  return out;
}

/** Row of the last access to each 16 bytes of shared memory, -1: none. */
function smemAt(launch, cta, event) {
  const table = launch.tables.smem;
  const rows = launch.part(cta).rows.smem;
  const out = new Int32Array(Math.ceil(launch.raw.smem_bytes / 16)).fill(-1);
  const count = countUpTo(rows, table.event, event);
  for (const row of showing(rows, count, (i) => table.chunks[i])) {
    const runs = launch.raw.chunks[table.chunks[row]];
    for (let i = 0; i < runs.length; i += 2) out.fill(row, runs[i], runs[i] + runs[i + 1]);
  }
  return out;
}

/** State of each mbarrier, by offset: phases completed, arrivals that are pending, bytes that are expected. */
function barriersAt(launch, cta, event) {
  const table = launch.tables.mbarriers;
  const rows = launch.part(cta).rows.mbarriers;
  const out = new Map();
  for (let i = countUpTo(rows, table.event, event) - 1; i >= 0; i--) {
    const row = rows[i];
    if (out.has(table.offset[row])) continue;
    const done = table.done[row];
    const pending = done ? table.expected[row] : table.pending[row];
    out.set(table.offset[row], { phase: table.phase[row] + done, pending, expected: table.expected[row], tx: table.tx[row] });
  }
  return new Map([...out].sort((a, b) => a[0] - b[0]));
}

/**
 * Named barriers and the cluster's at a time, as `warpsAt` is: the row of the latest arrival, how many threads have arrived
 * since the last completion, and when that was. A warp that waits since then or longer is released, though it runs later.
 */
function namedAt(launch, cta, time) {
  const { named } = launch.tables;
  const known = new Map();
  for (const row of launch.part(cta).rows.named) {
    if (named.time[row] > time) continue;
    const key = `${named.kind[row]} ${named.number[row]}`;
    const complete = named.kind[row] !== "cluster" && named.arrived[row] === named.expected[row];
    const done = complete ? named.time[row] : known.has(key) ? known.get(key).done : -1;
    known.set(key, { row, done, arrived: complete ? 0 : named.arrived[row] });
  }
  return known;
}

/** What each warp does at a time: runs or waits, on what, and the PTX line where it stands. */
function warpsAt(launch, cta, time) {
  const { states, marks } = launch.tables;
  const { rows } = launch.part(cta);
  const warps = new Map();
  for (const i of rows.states) {
    const known = warps.get(states.warp[i]) || { warp: states.warp[i], state: "not begun", reason: "", barrier: -1, line: -1 };
    if (states.time[i] <= time) {
      const over = states.end[i] <= time;
      known.state = over ? "exited" : states.state[i];
      known.reason = over ? "" : states.reason[i];
      known.barrier = over ? -1 : states.barrier[i];
      if (states.line[i] > 0) known.line = states.line[i];
      known.since = states.time[i];
    }
    warps.set(known.warp, known);
  }
  for (const i of rows.marks) {
    const known = warps.get(marks.warp[i]);
    if (!known || marks.time[i] > time || marks.line[i] <= 0) continue;
    if (known.state === "run" || known.state === "exited" || marks.time[i] >= (known.since || 0)) known.line = marks.line[i];
  }
  return [...warps.values()].sort((a, b) => a.warp - b.warp);
}
