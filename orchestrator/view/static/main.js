// The page: tabs, the runs above them, and the question every two seconds whether something is new.

import { Curves } from "./curves.js";
import { choice, element, replace } from "./dom.js";
import { Fleet } from "./fleet.js";
import { colourOf, figure, visible } from "./format.js";
import { Options } from "./options.js";
import { Samples } from "./samples.js";
import { FileSource, LiveSource } from "./source.js";
import { Timeline } from "./timeline.js";

const EVERY_MS = 2000;
const KEPT = "slipstream-token";

class Page {
  constructor(source) {
    this.source = source;
    this.runs = [];
    this.hidden = new Set();
    this.chosen = 0;
    this.views = { curves: new Curves(this), timeline: new Timeline(this), fleet: new Fleet(this), samples: new Samples(this), options: new Options(this) };
    this.tab = location.hash.slice(1) in this.views ? location.hash.slice(1) : "curves";
  }

  async start() {
    await this.guarded(() => this.read());
    for (const name of Object.keys(this.views)) {
      document.getElementById("tabs").append(element("button", { role: "tab", "data-tab": name, onclick: () => this.open(name) }, name[0].toUpperCase() + name.slice(1)));
    }
    await this.open(this.tab);
    document.body.dataset.ready = "yes";
    if (this.source.isLive) setInterval(() => this.poll(), EVERY_MS);
    else document.getElementById("live").textContent = "a file";
  }

  shownRuns() {
    return this.runs.filter((run) => !this.hidden.has(run.number));
  }

  /** What a run's folder says of something. */
  ask(run, what, words) {
    return this.source.get(`runs/${run.number}/${what}`, words);
  }

  /** The run of views that show one. */
  oneRun() {
    return this.runs[this.chosen];
  }

  runChoice() {
    if (this.runs.length < 2) return null;
    return choice("run", this.runs.map((run) => [String(run.number), visible(run.name)]), String(this.chosen), (value) => {
      this.chosen = Number(value);
      return this.open(this.tab);
    });
  }

  async open(name) {
    this.tab = name;
    history.replaceState(null, "", `#${name}`);
    for (const button of document.querySelectorAll("#tabs button")) button.setAttribute("aria-selected", String(button.dataset.tab === name));
    const main = document.getElementById("view");
    replace(main);
    await this.guarded(() => this.views[name].show(main));
  }

  async read() {
    const found = await this.source.get("runs");
    this.runs = found.runs.map((run, number) => ({ ...run, number, colour: colourOf(number) }));
    const chips = this.runs.map((run) => {
      const dot = element("span", { class: "dot" });
      dot.style.background = run.colour;
      const step = run.step === null ? "no step yet" : `step ${run.step} of ${figure(run.num_steps)}`;
      return element("button", { class: this.hidden.has(run.number) ? "run off" : "run", title: visible(run.error ? `${run.path}\n${run.error}` : run.path), onclick: () => this.toggle(run.number) },
        dot, element("span", { class: "name" }, visible(run.name)), element("span", { class: "state" }, `${run.state}, ${step}`));
    });
    replace(document.getElementById("runs"), ...chips);
  }

  toggle(number) {
    if (this.hidden.has(number)) this.hidden.delete(number);
    else if (this.shownRuns().length > 1) this.hidden.add(number);
    return this.refresh();
  }

  async refresh() {
    await this.guarded(async () => {
      await this.read();
      await this.views[this.tab].update();
    });
  }

  async poll() {
    if (this.isPolling || document.hidden) return;
    this.isPolling = true;
    const live = document.getElementById("live");
    try {
      await this.read();
      await this.views[this.tab].update();
      live.className = "on";
      live.textContent = "live";
    } catch (error) {
      live.className = "lost";
      live.textContent = "lost";
      live.title = visible(error.message);
    } finally {
      this.isPolling = false;
    }
  }

  async guarded(work) {
    const message = document.getElementById("message");
    try {
      await work();
      message.hidden = true;
    } catch (error) {
      message.textContent = visible(error.message);
      message.hidden = false;
    }
  }
}

function source() {
  const embedded = document.getElementById("data");
  if (embedded) return new FileSource(JSON.parse(embedded.textContent));
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", "#curves");
  }
  return new LiveSource(sessionStorage.getItem(KEPT) ?? "");
}

new Page(source()).start();
