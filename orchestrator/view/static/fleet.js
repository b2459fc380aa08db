// Rollout workers: their state, the version that each serves, tokens per second, and what happened to them.

import { element, plotted, replace, swatch } from "./dom.js";
import { clock, colourOf, figure, visible } from "./format.js";
import { bar, drawLanes, legend } from "./timeline.js";

const FILLS = { "serving": "#009e73", "up": "#56b4e9", "starting": "#e69f00", "restarting": "#e69f00", "waits for a publish": "#8c6bb1", "hands over": "#8c6bb1", "gone": "#6b7280", "failed": "#d55e00", "out of service": "#6b7280" };
const HEIGHT = 200;

export class Fleet {
  constructor(page) {
    this.page = page;
  }

  async show(main) {
    this.main = main;
    this.drawn = "";
    await this.update();
  }

  async update() {
    const run = this.page.oneRun();
    if (!run) return;
    const fleet = await this.page.ask(run, "fleet");
    const drawn = JSON.stringify([run.number, fleet]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    if (fleet.workers.length === 0) {
      replace(this.main, this.page.runChoice(), element("p", { class: "empty" }, "No rollout worker has been heard of: fleet.jsonl is empty, or this run has none (algorithm=sft, algorithm=dpo)."));
      return;
    }
    const versions = element("div", { class: "plot" });
    const rates = element("div", { class: "plot" });
    replace(this.main, element("div", { class: "bar" }, this.page.runChoice()),
      element("section", { class: "card", id: "workers-card" }, element("h2", {}, "Rollout workers"), table(fleet), states(fleet.workers)),
      element("div", { class: "grid two" },
        element("section", { class: "card" }, element("h2", {}, "Policy version that each worker serves"), versions),
        element("section", { class: "card" }, element("h2", {}, "Tokens per second of each worker"), rates)),
      element("section", { class: "card" }, element("h2", {}, "Events, newest first"), events(fleet.workers)));
    const named = fleet.workers.map((worker) => [`rollout-${worker.worker}`, worker.versions]);
    plot(versions, named, true);
    plot(rates, fleet.workers.map((worker) => [`rollout-${worker.worker}`, worker.rates]), false);
  }
}

function table(fleet) {
  const newest = fleet.trainer.length ? fleet.trainer[fleet.trainer.length - 1][1] : null;
  return element("table", { class: "list" },
    element("thead", {}, element("tr", {}, ...["worker", "process", "state", "version", "restarts", "tokens"].map((name, at) => element("th", { class: at > 2 ? "number" : "" }, name)))),
    element("tbody", {}, ...fleet.workers.map((worker) => {
      const isBehind = worker.version !== null && newest !== null && worker.version < newest;
      return element("tr", {}, element("td", {}, `rollout-${worker.worker}`), element("td", {}, visible(worker.name)),
        element("td", {}, swatch(fillOf(worker.state), worker.state)),
        element("td", { class: "number" }, figure(worker.version), isBehind ? element("span", { class: "badge bad" }, `newest is ${newest}`) : null),
        element("td", { class: "number" }, figure(worker.restarts)), element("td", { class: "number" }, figure(worker.tokens)));
    })));
}

function fillOf(state) {
  return FILLS[state] ?? "#6b7280";
}

/** A lane per worker: its states over the time of the run. */
function states(workers) {
  const stretches = workers.flatMap((worker) => worker.stretches);
  if (stretches.length === 0) return null;
  const first = Math.min(...stretches.map(([from]) => from));
  const last = Math.max(...stretches.map(([, to]) => to));
  const lanes = workers.map((worker) => ({ who: `rollout-${worker.worker}`, bars: worker.stretches.map(([from, to, state]) => bar(state, from - first, to - first, "")) }));
  const kinds = [...new Set(stretches.map(([, , state]) => state))];
  return element("div", {}, drawLanes(lanes, last - first, "states of the workers", fillOf, (at) => clock(first + at)), legend(kinds, fillOf));
}

function events(workers) {
  const rows = workers.flatMap((worker) => worker.events).sort((one, other) => other.time - one.time).slice(0, 200);
  return element("div", { class: "scroll" }, element("table", { class: "list" },
    element("thead", {}, element("tr", {}, ...["time", "process", "event", "facts"].map((name) => element("th", {}, name)))),
    element("tbody", {}, ...rows.map((row) => {
      const facts = Object.entries(row).filter(([name]) => !["time", "worker", "name", "event"].includes(name));
      return element("tr", {}, element("td", {}, clock(row.time)), element("td", {}, visible(row.name)), element("td", {}, visible(row.event)),
        element("td", {}, visible(facts.map(([name, value]) => `${name} ${figure(value)}`).join(", "))));
    }))));
}

function plot(holder, named, isStepped) {
  const times = [...new Set(named.flatMap(([, points]) => points.map(([at]) => at)))].sort((one, other) => one - other);
  const columns = named.map(([, points]) => {
    const known = new Map(points);
    return times.map((at) => known.get(at) ?? null);
  });
  plotted(holder, HEIGHT, [{ size: 42 }, { size: 56 }], {
    series: [{}, ...named.map(([name], number) => ({
      label: name, stroke: colourOf(number), width: 1.6, spanGaps: true, points: { show: false }, dash: isStepped && number % 2 ? [7, 5] : [],
      paths: isStepped ? uPlot.paths.stepped({ align: 1 }) : undefined, value: (_, value) => figure(value),
    }))],
  }, [times, ...columns]);
}
