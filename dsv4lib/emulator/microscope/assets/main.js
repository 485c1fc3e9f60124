// Put the page together: a view a report, of which a second one may be opened beside the first.

const views = [];

/** One report: its launches, a moment of one CTA of one of them, and everything that shows it. */
class View {
  constructor(data, name) {
    this.data = data;
    this.launches = data.launches.map((raw) => new Launch(raw));
    this.root = document.getElementById("view").content.cloneNode(true).firstElementChild;
    this.root.querySelector("[data-name]").textContent = name;
    this.timeline = new Timeline(this.part("timeline"), (what) => this.picked(what));
    this.timeline.placed = (from, span) => {
      if (document.getElementById("link").checked) for (const other of views) if (other !== this && other.timeline.life) other.timeline.place(from, span, false);
    };
    this.part("launch").addEventListener("change", (event) => this.open(Number(event.target.value)));
    this.part("cta").addEventListener("change", (event) => this.choose(Number(event.target.value)));
    this.part("scrub").addEventListener("input", (event) => this.go(Number(event.target.value)));
    for (const button of this.root.querySelectorAll("button[data-do]")) button.addEventListener("click", () => this.act(button.dataset.do));
    this.part("timeline").addEventListener("keydown", (event) => this.key(event));
    fill(this.part("launch"), ...this.launches.map((one, i) => element("option", { value: i, text: `${one.raw.number || i + 1}. ${one.raw.kernel}${one.raw.findings.length ? `, ${count(one.raw.findings.length, "finding")}` : ""}` })));
    this.part("launch").parentElement.hidden = this.launches.length < 2;
  }

  part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }

  start() {
    const first = this.launches.findIndex((one) => one.raw.findings.length);
    this.part("launch").value = String(Math.max(first, 0));
    this.open(Math.max(first, 0));
  }

  open(number) {
    this.launch = this.launches[number];
    const { raw } = this.launch;
    const facts = [raw.arch, `grid ${raw.grid.join(" x ")}`, raw.block && raw.block.length ? `block ${raw.block.join(" x ")}` : "", raw.schedule ? `schedule ${raw.schedule}, seed ${raw.seed}` : "", `${raw.time.toLocaleString("en")} warp-instructions`, `${raw.cut.kept.toLocaleString("en")} events`];
    this.part("facts").textContent = facts.filter(Boolean).join(" · ");
    this.part("kernel").textContent = raw.kernel;
    this.part("cut").textContent = cutText(this.launch);
    this.part("cut").hidden = !this.part("cut").textContent;
    fill(this.part("cta"), ...this.launch.ctas.map((cta) => element("option", { value: cta, text: this.launch.ctaName(cta) })));
    this.part("cta").parentElement.hidden = this.launch.ctas.length < 2;
    this.showFindings();
    const hit = raw.findings.find((one) => one.cta >= 0 && this.launch.ctas.includes(one.cta));
    this.choose(hit ? hit.cta : this.launch.ctas[0]);
  }

  choose(cta) {
    this.cta = cta;
    this.part("cta").value = String(cta);
    this.moments = this.launch.part(cta).moments;
    this.part("scrub").max = String(this.moments.length - 1);
    const warps = this.launch.part(cta).rows.states.map((i) => this.launch.tables.states.warp[i]);
    this.selected = { warp: Math.min(...warps, Infinity) };
    this.timeline.show(this.launch, cta);
    this.go(Math.floor(this.moments.length / 2), false); // early moments show little
  }

  /** Show a moment by its number. Linked views follow to the same time. */
  go(number, follow = true) {
    this.number = Math.min(Math.max(number, 0), this.moments.length - 1);
    [this.time, this.event] = this.moments[this.number];
    if (this.selected.line !== undefined && follow) this.selected = { warp: this.selected.warp };
    this.show();
    if (follow && document.getElementById("link").checked) for (const other of views) if (other !== this) other.goTo(this.time, false);
  }

  /** Show the last moment at or before a time. */
  goTo(time, follow = true) {
    let low = 0;
    let high = this.moments.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.moments[middle][0] <= time) low = middle + 1;
      else high = middle;
    }
    this.go(low - 1, follow);
  }

  /** Show the moment of a finding: its CTA, time, warp and lines. */
  jump(i) {
    const finding = this.launch.raw.findings[i];
    if (finding.cta >= 0 && finding.cta !== this.cta && this.launch.ctas.includes(finding.cta)) this.choose(finding.cta);
    const exact = this.moments.findIndex(([time, event]) => time === finding.time && event >= finding.event - 1);
    if (exact >= 0) this.go(exact);
    else this.goTo(finding.time);
    this.selected = { warp: finding.warp >= 0 ? finding.warp : this.selected.warp, line: finding.place ? finding.place.ptx_line : undefined };
    const [from, to] = this.timeline.life;
    if (this.timeline.view[1] - this.timeline.view[0] > (to - from) / 4) this.timeline.place(finding.time - (to - from) / 12, (to - from) / 6);
    this.current = i;
    this.show();
    for (const [n, button] of [...this.part("findings").querySelectorAll("button")].entries()) button.setAttribute("aria-current", String(n === i));
  }

  picked({ time, track, bar }) {
    if (track && track.type === "warp") this.selected = { warp: track.id };
    if (bar && track.type === "unit") {
      const { ops } = this.launch.tables;
      this.selected = { warp: ops.warp[bar.row], line: ops.line[bar.row], op: bar.row };
      const chosen = this.selected;
      this.goTo(ops.time[bar.row]);
      this.selected = chosen;
      this.show();
      return;
    }
    if (time !== undefined) this.goTo(time);
    else this.show();
  }

  act(what) {
    const view = this.timeline;
    if (what === "next") this.go(this.number + 1);
    if (what === "previous") this.go(this.number - 1);
    if (what === "closer") view.zoom(1.6);
    if (what === "wider") view.zoom(1 / 1.6);
    if (what === "whole") view.place(view.life[0], view.life[1] - view.life[0]);
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity };
    const findings = this.launch.raw.findings.length;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in steps) this.go(Number.isFinite(steps[event.key]) ? this.number + steps[event.key] : steps[event.key] > 0 ? this.moments.length : 0);
    else if (event.key === "+" || event.key === "=") this.act("closer");
    else if (event.key === "-") this.act("wider");
    else if (event.key === "0") this.act("whole");
    else if (event.key === "n" && findings) this.jump(((this.current === undefined ? -1 : this.current) + 1) % findings);
    else return;
    event.preventDefault();
  }

  showFindings() {
    this.current = undefined;
    const { findings } = this.launch.raw;
    this.part("verdict").textContent = findings.length ? `${count(findings.length, "finding")} of the checks` : "The checks found nothing.";
    this.part("verdict").className = findings.some((one) => one.severity === "error") ? "bad" : findings.length ? "lint" : "good";
    fill(this.part("findings"), ...findings.map((one, i) => {
      const where = one.place ? (one.place.file ? `${one.place.file}:${one.place.line}` : `PTX line ${one.place.ptx_line}`) : "";
      const times = one.count > 1 ? ` (${one.count.toLocaleString("en")} times)` : "";
      const button = element("button", { type: "button", onclick: () => this.jump(i) }, element("b", { text: `${one.severity} ${one.kind}` }), ` ${one.meaning || one.message}${times}`, element("small", { text: where }));
      const more = element("details", {}, element("summary", { text: "what, where, fix" }), element("p", { text: one.message }),
        ...[one.place, one.against].filter(Boolean).map((side) => element("p", {}, element("code", { text: `${side.file ? `${side.file}:${side.line}  ${side.text}` : ""}` }), element("small", { text: `${side.threads}; PTX line ${side.ptx_line}: ${side.ptx}` }))),
        element("p", { class: "fix", text: one.fix ? `Fix: ${one.fix}` : "" }));
      return element("li", {}, button, more);
    }));
  }

  /** Say the moment at once, and draw it with the next frame: a fast scrub draws the last of many. */
  show() {
    const { event, time } = this;
    const scrub = this.part("scrub");
    scrub.value = String(this.number);
    const readout = `event ${event < 0 ? "none" : event.toLocaleString("en")}, after ${time.toLocaleString("en")} warp-instructions`;
    scrub.setAttribute("aria-valuetext", readout);
    this.part("moment").textContent = readout;
    if (this.waiting) return;
    this.waiting = true;
    window.requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const { launch, cta, event, time } = this;
    const warps = warpsAt(launch, cta, time);
    const { findings } = launch.raw;
    this.timeline.chosen = this.selected.op;
    this.timeline.moveTo(time);
    const mine = warps.find((one) => one.warp === this.selected.warp);
    const line = this.selected.line !== undefined ? this.selected.line : mine ? mine.line : -1;
    this.part("chosen").textContent = this.chosenText(mine);
    const touched = this.selected.op === undefined ? [] : operandsOf(launch, cta, this.selected.op);
    this.part("operands").textContent = touched.length ? listed(touched, "") : "";
    fill(this.part("warps"), ...warpPanel(launch, warps, this.selected.warp, (warp) => {
      this.selected = { warp };
      this.show();
    }));
    fill(this.part("barriers"), ...barrierPanel(launch, cta, event, time, warps));
    fill(this.part("tmem"), ...tmemPanel(launch, cta, event));
    fill(this.part("smem"), ...smemPanel(launch, cta, event));
    if (this.drawn && this.drawn.launch === launch && this.drawn.line === line) return;
    this.drawn = { launch, line };
    for (const [name, made] of [["source", sourcePanel(launch, line, findings)], ["ptx", ptxPanel(launch, line, findings)]]) {
      this.part(`${name}-title`).textContent = made.title;
      fill(this.part(name), ...made.nodes);
    }
    for (const name of ["source", "ptx"]) centre(this.part(name));
  }

  chosenText(mine) {
    const { ops } = this.launch.tables;
    const { op } = this.selected;
    if (op !== undefined) {
      const done = ops.done_time[op] < 0 ? "never completed" : `completed at ${ops.done_time[op].toLocaleString("en")}`;
      return `${ops.label[op]}: issued by warp ${ops.warp[op]} at ${ops.time[op].toLocaleString("en")}, ${done}`;
    }
    if (!mine) return "";
    const now = this.launch.tables.ops;
    const flying = this.launch.part(this.cta).rows.ops.filter((i) => now.event[i] <= this.event && (now.done_event[i] < 0 || now.done_event[i] > this.event)).length;
    return `warp ${mine.warp} ${mine.state === "wait" ? `waits: ${mine.reason}` : mine.state === "run" ? "runs" : mine.state}; ${count(flying, "asynchronous operation")} in flight`;
  }
}

function count(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

/** What a stream leaves out, in words. */
function cutText(launch) {
  const { cut } = launch.raw;
  const out = [];
  if (cut.kept < cut.events) {
    out.push(`Cut to ${cut.kept.toLocaleString("en")} of ${cut.events.toLocaleString("en")} events: ${cut.shown.length} of ${count(cut.ctas, "CTA")}`);
    if (cut.part) out.push(`of ${launch.ctaName(cut.part.cta)} only the time from ${cut.part.first.toLocaleString("en")} to ${cut.part.last.toLocaleString("en")}`);
    if (cut.part && cut.part.lost) out.push(`older accesses that still show and are left out: ${cut.part.lost.toLocaleString("en")}`);
  }
  if (launch.raw.dropped) out.push(`the recording was full after ${launch.raw.time.toLocaleString("en")} warp-instructions: ${count(launch.raw.dropped, "later event")} and what findings after that saw are not shown`);
  if (launch.raw.left_out) out.push(`launches of the program that are not shown: ${launch.raw.left_out.toLocaleString("en")}`);
  return out.length ? `${out.join("; ")}.` : "";
}

function add(data, name) {
  if (views.length > 1) views.pop().root.remove();
  const view = new View(data, name);
  views.push(view);
  document.getElementById("views").append(view.root);
  document.body.classList.toggle("two", views.length > 1);
  view.start();
  for (const other of views) other.timeline.draw();
}

document.getElementById("other").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  const said = document.getElementById("said");
  said.textContent = "";
  if (!file) return;
  try {
    add(readReport(await file.text()), file.name);
  } catch (error) {
    said.textContent = `${file.name}: ${error.message}`;
  }
});

const data = JSON.parse(document.getElementById("microscope-data").textContent);
add(data, data.target || "this report");
const redraw = () => views.forEach((view) => view.show());
window.addEventListener("resize", () => views.forEach((view) => view.timeline.draw()));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
window.microscope = { views, tmemAt, smemAt, barriersAt, namedAt, warpsAt };
