// The timeline: a canvas with a row for each warp, unit and barrier. Wheel zooms, drag moves, the ruler scrubs.

const ROW = 19;
const RULER = 22;
const MAX_OVERLAP = 6; // rows of one unit; more operations at once share the last
const UNIT_NAMES = { tma: "TMA", tensor: "tensor core", bulk: "bulk copies", ldst: "TMEM ld, st", wgmma: "wgmma" };

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Kind of an operation: its colour's variable. */
function kindOfOp(unit, label) {
  if (unit === "tensor" || unit === "wgmma") return label.startsWith("commit") ? "--k-commit" : "--k-mma";
  return "--k-copy";
}

function kindOfState(state, reason) {
  if (state === "run") return "--k-runs";
  return reason === "mbarrier" ? "--k-mbarrier" : "--k-barrier";
}

/** Rows of the timeline of one CTA: name and bars, each from, to, kind, row of its table. */
function tracksOf(launch, cta) {
  const { states, ops, mbarriers } = launch.tables;
  const { rows } = launch.part(cta);
  const tracks = [];
  const warps = new Map();
  for (const i of rows.states) {
    if (!warps.has(states.warp[i])) warps.set(states.warp[i], { type: "warp", id: states.warp[i], name: `warp ${states.warp[i]}`, bars: [] });
    warps.get(states.warp[i]).bars.push({ from: states.time[i], to: states.end[i], kind: kindOfState(states.state[i], states.reason[i]), row: i });
  }
  tracks.push(...[...warps.values()].sort((a, b) => a.id - b.id));
  const units = new Map();
  for (const i of rows.ops) {
    if (!units.has(ops.unit[i])) units.set(ops.unit[i], []);
    units.get(ops.unit[i]).push(i);
  }
  for (const [unit, mine] of [...units].sort((a, b) => (a[0] < b[0] ? -1 : 1))) tracks.push(...unitTracks(launch, unit, mine));
  const barriers = new Map();
  const [, end] = launch.life(cta);
  for (const i of rows.mbarriers) {
    const offset = mbarriers.offset[i];
    if (!barriers.has(offset)) barriers.set(offset, { type: "barrier", id: offset, name: barrierName(launch, offset), bars: [], since: mbarriers.time[i] });
    const track = barriers.get(offset);
    if (!mbarriers.done[i]) continue;
    const phase = mbarriers.phase[i];
    track.bars.push({ from: track.since, to: mbarriers.time[i], kind: phase % 2 ? "--k-odd" : "--k-even", row: i, text: String(phase) });
    track.since = mbarriers.time[i];
  }
  for (const track of [...barriers.values()].sort((a, b) => a.id - b.id)) {
    track.bars.push({ from: track.since, to: end, kind: "--k-barrier", row: -1 });
    tracks.push(track);
  }
  return tracks;
}

function barrierName(launch, offset) {
  const names = launch.raw.barriers || {};
  return names[offset] || `mbarrier 0x${offset.toString(16)}`;
}

/** Operations of one unit in rows without overlap. The tensor core is a queue: one starts when the one before is done. */
function unitTracks(launch, unit, mine) {
  const { ops } = launch.tables;
  const free = [];
  const out = [];
  let before = 0;
  for (const i of mine) {
    const to = ops.done_time[i] < 0 ? launch.raw.time : ops.done_time[i];
    const from = unit === "tensor" ? Math.min(Math.max(ops.time[i], before), to) : ops.time[i];
    before = to;
    let lane = free.findIndex((until) => until <= from);
    const crowded = lane < 0 && free.length === MAX_OVERLAP;
    if (lane < 0) lane = Math.min(free.length, MAX_OVERLAP - 1);
    free[lane] = Math.max(free[lane] || 0, to);
    const name = UNIT_NAMES[unit] || unit;
    if (!out[lane]) out[lane] = { type: "unit", id: unit, name: lane ? `${name} ${lane + 1}` : name, bars: [] };
    if (crowded) out[lane].name = `${name} ${lane + 1} and more`;
    out[lane].bars.push({ from, to, kind: kindOfOp(unit, ops.label[i]), row: i });
  }
  return out;
}

/** One canvas. `changed` is called with {time} when the reader scrubs, {track, bar} when they pick a bar. */
class Timeline {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.tracks = [];
    this.hazards = [];
    this.listen();
  }

  show(launch, cta) {
    this.tracks = tracksOf(launch, cta);
    this.life = launch.life(cta);
    this.view = this.life.slice();
    this.hazards = launch.raw.findings.filter((one) => one.cta === cta || one.cta < 0).map((one) => one.time);
    this.cursor = this.life[0];
    this.draw();
  }

  get gutter() {
    return this.canvas.clientWidth < 560 ? 84 : 138;
  }

  x(time) {
    const [from, to] = this.view;
    return this.gutter + ((time - from) / (to - from)) * (this.canvas.clientWidth - this.gutter);
  }

  time(x) {
    const [from, to] = this.view;
    return from + ((x - this.gutter) / (this.canvas.clientWidth - this.gutter)) * (to - from);
  }

  /** Zoom by a factor (above 1: closer) about a time. */
  zoom(factor, about = this.cursor) {
    const [from, to] = this.view;
    const whole = this.life[1] - this.life[0];
    const span = Math.min(Math.max((to - from) / factor, 8), whole);
    const share = Math.min(Math.max((about - from) / (to - from), 0), 1);
    this.place(about - share * span, span);
  }

  pan(by) {
    const [from, to] = this.view;
    this.place(from + by, to - from);
  }

  /** Show a window of time; a linked timeline follows. */
  place(from, wanted, follow = true) {
    const span = Math.min(wanted, this.life[1] - this.life[0]);
    const start = Math.min(Math.max(from, this.life[0]), this.life[1] - span);
    this.view = [start, start + span];
    this.draw();
    if (follow && this.placed) this.placed(start, span);
  }

  /** Put the cursor at a time, and bring it into view. */
  moveTo(time) {
    this.cursor = time;
    const [from, to] = this.view;
    if (time < from || time > to) this.place(time - (to - from) / 2, to - from, false);
    else this.draw();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      if (event.offsetX < this.gutter) return; // over the names the page scrolls
      event.preventDefault();
      const [from, to] = this.view;
      const along = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (Math.abs(along) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.pan((along / canvas.clientWidth) * (to - from));
      else this.zoom(Math.exp(-event.deltaY * 0.002), this.time(event.offsetX));
    }, { passive: false });
    let down = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      down = { x: event.offsetX, y: event.offsetY, from: this.view[0], moved: false };
      canvas.setPointerCapture(event.pointerId);
      if (down.y < RULER && down.x >= this.gutter) this.changed({ time: this.time(down.x) });
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!down) return this.hover(event);
      if (Math.abs(event.offsetX - down.x) > 3) down.moved = true;
      if (down.y < RULER) this.changed({ time: this.time(event.offsetX) });
      else if (down.moved) {
        const span = this.view[1] - this.view[0];
        this.place(down.from - ((event.offsetX - down.x) / (canvas.clientWidth - this.gutter)) * span, span);
      }
      return undefined;
    });
    canvas.addEventListener("pointerup", (event) => {
      if (down && !down.moved && down.y >= RULER) this.pick(event.offsetX, event.offsetY);
      down = null;
    });
    canvas.addEventListener("pointercancel", () => (down = null));
  }

  /** Track and bar at a place. */
  at(x, y) {
    const track = this.tracks[Math.floor((y - RULER) / ROW)];
    if (!track) return {};
    const time = this.time(x);
    const slack = (this.view[1] - this.view[0]) / this.canvas.clientWidth;
    const near = (one) => Math.max(one.from - time, time - one.to, 0);
    let bar = null;
    for (const one of track.bars) if (near(one) <= 2 * slack && (!bar || near(one) < near(bar) || (near(one) === near(bar) && one.to - one.from < bar.to - bar.from))) bar = one;
    return { track, bar };
  }

  pick(x, y) {
    const { track, bar } = this.at(x, y);
    if (track) this.changed({ track, bar: x < this.gutter ? null : bar, time: x < this.gutter ? undefined : this.time(x) });
  }

  hover(event) {
    const { track } = this.at(event.offsetX, event.offsetY);
    this.canvas.style.cursor = event.offsetY < RULER ? "col-resize" : track ? "pointer" : "grab";
  }

  draw() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    if (!width || !this.view) return;
    const height = RULER + ROW * this.tracks.length + 4;
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const ink = colour("--ink");
    const muted = colour("--muted");
    this.ruler(pen, width, height, muted, colour("--line"));
    const colours = new Map();
    const paint = (name) => {
      if (!colours.has(name)) colours.set(name, colour(name));
      return colours.get(name);
    };
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, width - this.gutter, height);
    pen.clip();
    this.tracks.forEach((track, i) => this.bars(pen, track, RULER + i * ROW, width, paint));
    this.marks(pen, height, paint("--k-wrong"), ink);
    pen.restore();
    pen.fillStyle = ink;
    const narrow = this.gutter < 100;
    this.tracks.forEach((track, i) => pen.fillText(fitted(pen, track.type === "barrier" && narrow ? track.name.replace("mbarrier ", "") : track.name, this.gutter - 8), 2, RULER + i * ROW + ROW / 2));
  }

  ruler(pen, width, height, muted, line) {
    const [from, to] = this.view;
    const step = niceStep((to - from) / Math.max((width - this.gutter) / 90, 1));
    pen.strokeStyle = line;
    pen.fillStyle = muted;
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = Math.round(this.x(time)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, RULER - 5);
      pen.lineTo(x, height);
      pen.stroke();
      if (x < width - 40) pen.fillText(time.toLocaleString("en"), x + 3, RULER / 2 - 1);
    }
  }

  bars(pen, track, top, width, paint) {
    let drawn = -1;
    let last = "";
    for (const bar of track.bars) {
      if (bar.to < this.view[0] || bar.from > this.view[1]) continue;
      const left = Math.max(this.x(bar.from), this.gutter);
      const right = Math.min(this.x(bar.to), width);
      if (right <= drawn && bar.kind === last) continue; // nothing new at this scale
      const wide = Math.max(right - left, 1);
      pen.fillStyle = paint(bar.kind);
      pen.fillRect(left, top + 3, wide > 3 ? wide - 0.6 : wide, ROW - 6);
      if (bar.text && wide > 16) {
        pen.fillStyle = "#1b1f24";
        pen.fillText(bar.text, left + 4, top + ROW / 2);
      }
      if (track.type === "unit" && bar.row === this.chosen) {
        pen.strokeStyle = paint("--ink");
        pen.lineWidth = 2;
        pen.strokeRect(left, top + 3, wide, ROW - 6);
        pen.lineWidth = 1;
      }
      drawn = Math.max(left + 1, right);
      last = bar.kind;
    }
  }

  /** Findings as flags, and the cursor. */
  marks(pen, height, wrong, ink) {
    pen.fillStyle = wrong;
    for (const time of this.hazards) {
      const x = this.x(time);
      pen.beginPath();
      pen.moveTo(x - 5, RULER - 10);
      pen.lineTo(x + 5, RULER - 10);
      pen.lineTo(x, RULER);
      pen.fill();
      pen.fillRect(x - 0.5, RULER, 1, height);
    }
    pen.fillStyle = ink;
    pen.fillRect(this.x(this.cursor) - 1, 0, 2, height);
  }
}

function fitted(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let cut = text;
  while (cut.length > 3 && pen.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
  return `${cut}…`;
}

function niceStep(atLeast) {
  const power = 10 ** Math.floor(Math.log10(Math.max(atLeast, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= atLeast) || 10 * power;
}
