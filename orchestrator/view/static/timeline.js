// The timeline of a step, who waited for whom, its publish beside the watermark, and the trace of a publish.

import { choice, drawingWidth, element, numberBox, replace, shape, swatch, tip } from "./dom.js";
import { bytes, clock, seconds, visible } from "./format.js";

const FILLS = {
  "wait for rollouts": "#d55e00", "wait for the evaluation": "#e69f00", "evaluation": "#e69f00", "forward and backward": "#0072b2", "optimizer": "#8c6bb1",
  "publish": "#009e73", "sample": "#56b4e9", "judge": "#cc79a7", "paused": "#d55e00", "idle": "#9aa3b2",
  "begin": "#6b7280", "write": "#009e73", "verify": "#0072b2", "commit": "#8c6bb1",
};
const LEFT = 92;
const MOST_ROWS = 24;
const SAME_S = 1e-5;

export class Timeline {
  constructor(page) {
    this.page = page;
    this.step = null;
    this.traceName = "";
  }

  async show(main) {
    this.main = main;
    this.drawn = "";
    await this.update();
  }

  async update() {
    const run = this.page.oneRun();
    if (!run) return;
    const known = await this.page.ask(run, "timeline");
    if (known.steps.length === 0) {
      replace(this.main, this.page.runChoice(), element("p", { class: "empty" }, "This run has no timeline.jsonl yet: a row is written after every step."));
      return;
    }
    const last = known.steps[known.steps.length - 1];
    const step = this.step !== null && known.steps.includes(this.step) ? this.step : last;
    const drawn = JSON.stringify([run.number, step, known.traces, this.traceName]);
    if (drawn === this.drawn) return;
    const found = await this.page.ask(run, `timeline/${step}`);
    replace(this.main, this.bar(run, known, step), this.stepCard(found), this.publishCard(found.row));
    if (known.traces.length > 0) await this.traceCard(run, known.traces);
    this.drawn = drawn;
  }

  bar(run, known, step) {
    const at = known.steps.indexOf(step);
    const go = (to) => { this.step = to; return this.page.refresh(); };
    const button = (label, text, to, isOn) => {
      const made = element("button", { "aria-label": label, title: label, onclick: () => go(to) }, text);
      made.disabled = !isOn;
      return made;
    };
    return element("div", { class: "bar" }, this.page.runChoice(),
      button("previous step", "\u2190", known.steps[at - 1], at > 0),
      numberBox("step", step, (value) => go(Number(value))),
      button("next step", "\u2192", known.steps[at + 1], at < known.steps.length - 1),
      button("follow the newest step", "newest", null, this.step !== null),
      element("span", { class: "soft" }, `${known.steps.length} steps, ${known.steps[0]} to ${known.steps[known.steps.length - 1]}`));
  }

  stepCard(found) {
    const row = found.row;
    const pauses = publishPauses(row);
    const lanes = [];
    const byWho = new Map();
    for (const span of row.spans) {
      if (!byWho.has(span[0])) byWho.set(span[0], []);
      byWho.get(span[0]).push(bar(span[1], span[2], span[3], span[4] === null ? "" : `prompt ${span[4]}`));
    }
    for (const [worker, gaps] of Object.entries(found.idle)) {
      if (!byWho.has(worker)) byWho.set(worker, []);
      byWho.get(worker).push(...gaps.map(([from, to, cause]) => bar("idle", from, to, `during ${cause}`)));
    }
    for (const [worker, pause] of pauses) {
      if (!byWho.has(worker)) byWho.set(worker, []);
      byWho.get(worker).push(pause);
    }
    for (const who of ["trainer", ...[...byWho.keys()].filter((name) => name.startsWith("rollout-")).sort(), "rewards"]) {
      if (byWho.has(who)) lanes.push({ who, bars: byWho.get(who) });
    }
    const kinds = [...new Set(lanes.flatMap((lane) => lane.bars.map((one) => one.what)))];
    return element("section", { class: "card", id: "step-card" },
      element("div", { class: "head" }, element("h2", {}, `Step ${row.step}: who did what`),
        element("span", { class: "soft" }, `${clock(row.from)} to ${clock(row.to)}, ${seconds(found.seconds)}`)),
      drawLanes(lanes, found.seconds, "lanes of the step"), legend(kinds),
      element("h3", {}, "Who waited for whom"),
      element("ul", { class: "waits" }, ...(found.waits.length ? found.waits : ["Nobody waited for longer than a millisecond."]).map((said) => element("li", {}, visible(said)))),
      row.num_left_out ? element("p", { class: "soft" }, `${row.num_left_out} shorter stretches are not in the file.`) : null);
  }

  publishCard(row) {
    const publish = row.publish;
    if (!publish) return element("section", { class: "card" }, element("h2", {}, "No publish in this step"));
    const share = publish.watermark_bytes ? publish.peak_bytes / publish.watermark_bytes : 0;
    const fill = element("i", {});
    fill.style.width = `${Math.min(share * 100, 100)}%`;
    const wrote = Math.max(publish.total_s - publish.begin_s - publish.verify_s - publish.commit_s - publish.relay_s, 0);
    let at = 0;
    const phases = [["begin", publish.begin_s], ["write", wrote], ["verify", publish.verify_s], ["commit", publish.commit_s]].map(([what, length]) => {
      const one = bar(what, at, at + length, "");
      at += length;
      return one;
    });
    const lanes = [{ who: "publish", bars: phases }, ...publish.replicas.map((replica, number) => ({
      who: `rollout-${number}`,
      bars: replica.pause_s > 0 ? [bar("paused", 0, replica.pause_s, replica.committed ? "committed" : visible(replica.error ?? "failed"))] : [],
    }))];
    return element("section", { class: "card", id: "publish-card" },
      element("div", { class: "head" }, element("h2", {}, `Publish of version ${publish.version}`),
        element("span", { class: "soft" }, `${bytes(publish.bytes)} in ${seconds(publish.total_s)}`)),
      drawLanes(lanes, Math.max(publish.total_s, ...publish.replicas.map((replica) => replica.pause_s)), "phases of the publish"),
      legend(["begin", "write", "verify", "commit", "paused"]),
      element("h3", {}, `Temporary bytes: ${bytes(publish.peak_bytes)} of the ${bytes(publish.watermark_bytes)} of the watermark (${(share * 100).toFixed(1)} %)`),
      element("div", { class: "gauge" }, fill),
      ...publish.replicas.map((replica, number) => (replica.committed ? null : element("p", { class: "badge bad" }, `rollout-${number}: ${visible(replica.error ?? "did not commit")}`))));
  }

  async traceCard(run, names) {
    const name = names.includes(this.traceName) ? this.traceName : names[names.length - 1];
    const trace = await this.page.ask(run, `trace/${name}`);
    const lanes = tracedLanes(trace.traceEvents ?? []);
    const length = Math.max(0, ...lanes.flatMap((lane) => lane.bars.map((one) => one.to)));
    this.main.append(element("section", { class: "card", id: "trace-card" },
      element("div", { class: "head" }, element("h2", {}, `Trace of publish ${name}`),
        choice("trace", names.map((one) => [one, one]), name, (value) => { this.traceName = value; return this.page.refresh(); })),
      drawLanes(lanes, length, "trace of the publish"),
      element("p", { class: "soft" }, `Written by weight_sync.trace_every_steps; ui.perfetto.dev opens ${visible(trace.file)} as well.`)));
  }
}

export function bar(what, from, to, about) {
  return { what, from, to, about };
}

/** Pauses of replicas, placed at the start of the trainer's last publish of the step. */
function publishPauses(row) {
  const spans = row.spans.filter((span) => span[1] === "publish");
  if (!row.publish || spans.length === 0) return [];
  const from = spans[spans.length - 1][2];
  return row.publish.replicas.map((replica, number) => [`rollout-${number}`, bar("paused", from, from + replica.pause_s, "for the publish")])
    .filter(([, pause]) => pause.to > pause.from);
}

function tracedLanes(events) {
  const names = new Map();
  for (const event of events) {
    if (event.ph === "M") names.set(event.name === "process_name" ? `${event.pid}` : `${event.pid}/${event.tid}`, String(event.args.name));
  }
  const lanes = new Map();
  for (const event of events) {
    if (event.ph !== "X") continue;
    const key = `${event.pid}/${event.tid}`;
    if (!lanes.has(key)) lanes.set(key, { who: `${names.get(`${event.pid}`)} ${names.get(key)}`, bars: [] });
    const facts = Object.entries(event.args ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
    lanes.get(key).bars.push(bar(String(event.name), event.ts / 1e6, (event.ts + event.dur) / 1e6, facts));
  }
  return [...lanes.values()];
}

/** Bars of one lane in rows, so that none hides another. */
export function packed(bars) {
  const ends = [];
  return [...bars].sort((one, other) => one.from - other.from).map((one) => {
    let row = ends.findIndex((end) => end <= one.from + SAME_S);
    if (row < 0) row = ends.length < MOST_ROWS ? ends.push(0) - 1 : ends.indexOf(Math.min(...ends));
    ends[row] = Math.max(ends[row], one.to);
    return { ...one, row };
  });
}

/** `fill`: the colour of a bar, by what it is. `told`: a time in words. */
export function drawLanes(lanes, length, label, fill = fillOf, told = seconds) {
  const width = drawingWidth();
  const left = Math.max(LEFT, ...lanes.map((lane) => lane.who.length * 6.6 + 12));
  const scale = (width - left - 12) / Math.max(length, 1e-9);
  const x = (at) => left + Math.min(Math.max(at, 0), length) * scale;
  const drawing = shape("svg", { class: "lanes", role: "img", "aria-label": label });
  let top = 22;
  for (const lane of lanes) {
    const bars = packed(lane.bars);
    const rows = Math.max(1, ...bars.map((one) => one.row + 1));
    const height = rows === 1 ? 20 : Math.max(3, Math.min(12, 72 / rows));
    const name = shape("text", { x: left - 10, y: top + (rows * height) / 2 + 4, "text-anchor": "end" }, visible(lane.who));
    drawing.append(name, shape("line", { class: "rule", x1: left, x2: width - 12, y1: top + rows * height + 4, y2: top + rows * height + 4 }));
    for (const one of bars) {
      const box = shape("rect", {
        x: x(one.from), y: top + one.row * height, width: Math.max(x(one.to) - x(one.from), 0.7), height: height - 1, rx: 2,
        fill: fill(one.what), "fill-opacity": one.what === "idle" ? 0.35 : 0.9, "data-what": one.what,
      });
      drawing.append(tip(box, visible(`${lane.who}: ${one.what} ${one.about}\n${seconds(one.to - one.from)}, from ${told(one.from)} to ${told(one.to)}`)));
      if (rows === 1 && (x(one.to) - x(one.from)) > one.what.length * 6.4 + 10) {
        drawing.append(shape("text", { class: "inside", x: x(one.from) + 5, y: top + 14 }, visible(one.what)));
      }
    }
    top += rows * height + 10;
  }
  for (let number = 0; number <= 5; number += 1) {
    const at = (length * number) / 5;
    drawing.prepend(shape("line", { class: "rule", x1: x(at), x2: x(at), y1: 16, y2: top - 4 }));
    drawing.append(shape("text", { class: "tick", x: x(at), y: 11, "text-anchor": number === 5 ? "end" : number === 0 ? "start" : "middle" }, told(at)));
  }
  drawing.setAttribute("viewBox", `0 0 ${width} ${top}`);
  return drawing;
}

function fillOf(what) {
  if (FILLS[what]) return FILLS[what];
  const hash = [...what.split(" ")[0]].reduce((sum, sign) => (sum * 31 + sign.charCodeAt(0)) % 997, 7);
  return Object.values(FILLS)[hash % 8];
}

export function legend(kinds, fill = fillOf) {
  return element("div", { class: "legend" }, ...kinds.map((kind) => swatch(fill(kind), kind)));
}
