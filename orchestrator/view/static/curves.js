// Curves: one chart per panel, all runs in it. Colour is the run, or the metric where there is one run.

import { choice, element, plotted, replace } from "./dom.js";
import { bytes, colourOf, figure, visible } from "./format.js";

const PANELS = [
  { title: "Reward", metrics: ["reward/mean", "eval/reward"], parts: /^reward\/.+_mean$/ },
  { title: "Response tokens", metrics: ["rollout/response_tokens_mean"] },
  { title: "Truncated responses, groups of equal rewards, clipped tokens (fraction)", metrics: ["rollout/truncated_fraction", "reward/no_spread_fraction", "loss/clip_fraction"], zero: true },
  { title: "Negative log-likelihood", metrics: ["sft/nll", "eval/nll"] },
  { title: "Loss of pairs", metrics: ["dpo/loss", "eval/dpo_loss"] },
  { title: "Pairs in the right order", metrics: ["dpo/accuracy", "eval/dpo_accuracy"] },
  { title: "Mismatch of trainer and engine, k3", metrics: ["parity/k3", "parity/k3_stale", "parity/floor_k3"], log: true },
  { title: "Entropy, and KL to the teacher, nats per token", metrics: ["policy/entropy", "distill/kl_mean"] },
  { title: "Turns of an episode", metrics: ["rollout/turns_mean", "rollout/branches_mean"] },
  { title: "Seconds of a step", metrics: ["step/total_s", "rollout/wait_s", "trainer/forward_backward_s", "sync/total_s"] },
  { title: "Seconds of a publish", metrics: ["sync/begin_s", "sync/write_s", "sync/verify_s", "sync/commit_s", "sync/pause_s"] },
  { title: "Share of the adapter's update that merged weights lost in rounding", metrics: ["sync/update_error"], zero: true },
  { title: "Temporary bytes of a publish against the watermark", metrics: ["sync/peak_bytes", "sync/watermark_bytes"], unit: bytes, zero: true },
  { title: "Staleness, steps", metrics: ["staleness/mean", "staleness/max"], zero: true },
  { title: "Gradient norm", metrics: ["optim/grad_norm"] },
  { title: "Tokens per second", metrics: ["rollout/tokens_per_s", "trainer/tokens_per_s_per_rank"] },
  { title: "Replicas in service", metrics: ["rollout/replicas_serving"], zero: true },
  { title: "Goodput of the last 100 steps", metrics: ["step/goodput"], zero: true },
];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [1, 2]];
const HEIGHT = 210;

export class Curves {
  constructor(page) {
    this.page = page;
    this.added = [];
    this.smoothing = 0;
    this.tables = new Map();
    this.charts = [];
  }

  async show(main) {
    this.main = main;
    this.shape = "";
    await this.update();
  }

  async update() {
    const runs = this.page.shownRuns();
    const panels = this.panels(runs);
    await Promise.all(runs.map((run) => this.load(run, [...new Set(panels.flatMap((panel) => panel.metrics))])));
    const shape = JSON.stringify([runs.map((run) => run.number), panels.map((panel) => [panel.title, ...this.series(panel, runs).map((one) => one.metric)])]);
    if (shape !== this.shape) this.build(runs, panels);
    this.shape = shape;
    this.fill();
  }

  /** Gives the charts their rows; the legends show the newest ones until the pointer is over a chart. */
  fill() {
    for (const chart of this.charts) {
      chart.plot.setData(this.data(chart.series), chart.plot.isZoomed !== true);
      if (chart.plot.cursor.idx === null || chart.plot.cursor.idx === undefined) chart.plot.setLegend({ idx: chart.plot.data[0].length - 1 });
    }
  }

  panels(runs) {
    const known = new Set(runs.flatMap((run) => run.names));
    const own = this.added.map((name) => ({ title: name, metrics: [name], isAdded: true }));
    const parts = (panel) => (panel.parts ? [...known].filter((name) => panel.parts.test(name)) : []);
    const several = (found) => (found.length > 1 ? found : []); // a reward of one part is the reward
    return [...own, ...PANELS].map((panel) => ({ ...panel, metrics: [...panel.metrics.filter((name) => known.has(name)), ...several(parts(panel))] }))
      .filter((panel) => panel.metrics.length > 0);
  }

  /** Fetches the rows that came since the last call. A run that was resumed has another generation: all of them. */
  async load(run, names) {
    let table = this.tables.get(run.number);
    const lacks = table && names.some((name) => !table.names.has(name));
    if (!table || table.generation !== run.generation || lacks) table = { generation: run.generation, names: new Set(names), steps: [], columns: {} };
    if (table.steps.length < run.rows || !this.tables.has(run.number) || lacks) {
      const news = await this.page.ask(run, "metrics", { names: [...table.names].join(","), after_row: table.steps.length });
      if (news.generation !== table.generation) table = { generation: news.generation, names: new Set(names), steps: [], columns: {} };
      for (const name of Object.keys(news.columns)) {
        const before = table.columns[name] ?? new Array(table.steps.length).fill(null);
        table.columns[name] = before.concat(news.columns[name]);
      }
      table.steps = table.steps.concat(news.steps);
    }
    this.tables.set(run.number, table);
  }

  series(panel, runs) {
    return runs.flatMap((run, at) => panel.metrics.map((metric, number) => ({
      run, metric, colour: runs.length > 1 ? run.colour : colourOf(number), dash: runs.length > 1 ? DASHES[number % DASHES.length] : [],
      label: runs.length > 1 ? `${run.name} ${metric}` : metric, at,
    }))).filter((one) => one.run.names.includes(one.metric));
  }

  build(runs, panels) {
    for (const chart of this.charts) chart.plot.destroy();
    this.charts = [];
    const grid = element("div", { class: "grid" });
    replace(this.main, this.bar(runs), grid);
    if (panels.length === 0) grid.replaceWith(element("p", { class: "empty" }, "No step has been written yet."));
    for (const panel of panels) {
      const holder = element("div", { class: "plot" });
      const close = panel.isAdded ? element("button", { class: "close", title: "remove", onclick: () => this.remove(panel.title) }, "\u2715") : null;
      grid.append(element("section", { class: "card chart", "data-title": panel.title },
        element("div", { class: "head" }, element("h2", {}, panel.title), close), holder));
      const series = this.series(panel, runs);
      this.charts.push({ series, plot: this.plot(panel, series, holder) });
    }
  }

  bar(runs) {
    const names = [...new Set(runs.flatMap((run) => run.names))].sort();
    const slider = element("input", { type: "range", min: "0", max: "0.98", step: "0.02", "aria-label": "smoothing", oninput: () => {
      this.smoothing = Number(slider.value);
      this.fill();
    } });
    slider.value = this.smoothing;
    return element("div", { class: "bar" },
      choice("add a chart", [["", "metric\u2026"], ...names.map((name) => [name, name])], "", (name) => this.add(name)),
      element("label", {}, "smoothing", slider),
      element("span", { class: "soft" }, "drag to zoom, double-click to see all"));
  }

  add(name) {
    if (name && !this.added.includes(name)) this.added.unshift(name);
    return this.update();
  }

  remove(name) {
    this.added = this.added.filter((one) => one !== name);
    return this.update();
  }

  plot(panel, series, holder) {
    const unit = panel.unit ?? figure;
    const isLog = panel.log === true;
    const ofLog = isLog ? { filter: decades, grid: { filter: decades }, ticks: { filter: decades } } : {};
    const plot = plotted(holder, HEIGHT, [{ size: 30 }, { ...ofLog, size: 62, values: (_, ticks) => ticks.map((value) => (value === null ? "" : unit(value))) }], {
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: (_, low, high) => bounds(low, high, panel.zero) } },
      series: [{ label: "step" }, ...series.map((one) => ({
        label: visible(one.label), stroke: one.colour, dash: one.dash, width: 1.6, spanGaps: true,
        value: (_, value) => (value === null ? "\u2013" : unit(value)),
        points: { show: (self, index) => isSparse(self.data[index]), size: 5 },
      }))],
      hooks: { setSelect: [(self) => { self.isZoomed = self.select.width > 0; }] },
    }, this.data(series));
    plot.over.addEventListener("dblclick", () => { plot.isZoomed = false; });
    return plot;
  }

  /** Aligned columns: the union of the runs' steps, then one column per series. */
  data(series) {
    const steps = [...new Set(series.flatMap((one) => this.tables.get(one.run.number).steps))].sort((one, other) => one - other);
    const place = new Map(steps.map((step, index) => [step, index]));
    const columns = series.map((one) => {
      const table = this.tables.get(one.run.number);
      const values = smoothed(table.columns[one.metric] ?? [], this.smoothing);
      const column = new Array(steps.length).fill(null);
      table.steps.forEach((step, row) => { column[place.get(step)] = values[row] ?? null; });
      return column;
    });
    return [steps, ...columns];
  }
}

/** The mean of all values so far, older ones counting less by `weight` each; the first ones are not pulled to 0. */
export function smoothed(values, weight) {
  if (weight === 0) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    total = weight * total + 1;
    return sum / total;
  });
}

function bounds(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  const first = fromZero ? Math.min(low, 0) : low;
  const margin = (high - first) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [fromZero && first === 0 ? 0 : first - margin, high + margin];
}

/** Of a logarithmic axis, the powers of ten, and of many of them every second, third, ... */
function decades(_, ticks) {
  const powers = ticks.map((value) => Math.log10(value)).map((power) => (Math.abs(power - Math.round(power)) < 1e-6 ? Math.round(power) : null));
  const every = Math.ceil(powers.filter((power) => power !== null).length / 7);
  return every === 0 ? ticks : ticks.map((value, at) => (powers[at] !== null && powers[at] % every === 0 ? value : null));
}

function isSparse(column) {
  const known = column.reduce((count, value) => count + (value !== null), 0);
  return known > 0 && (known < 3 || known * 3 < column.length);
}
