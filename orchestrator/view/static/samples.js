// Prompts and responses: a list with filters, and one of them token by token.

import { choice, element, numberBox, replace, tick } from "./dom.js";
import { bytes, figure, visible } from "./format.js";
import { Detail } from "./sample_detail.js";
import { ORDERS } from "./source.js";

const COLUMNS = [["step", "step"], ["kind", "kind"], ["prompt", "prompt_id"], ["reward", "reward"], ["advantage", "advantage"], ["k3", "k3"], ["largest k3", "k3_max"], ["tokens", "num_tokens"], ["stale", "staleness"]];

export class Samples {
  constructor(page) {
    this.page = page;
    this.query = { order: "newest", kind: "", truncated: "", failed: "", turns: "", first_step: "", last_step: "", prompt_id: "", page: 0 };
    this.detail = new Detail(page);
  }

  async show(main) {
    this.main = main;
    this.drawn = "";
    this.list = element("section", { class: "card", id: "samples" });
    this.opened = element("div", {});
    replace(main, this.bar(), this.list, this.opened);
    await this.update();
  }

  async update() {
    const run = this.page.oneRun();
    if (!run) return;
    const asked = JSON.stringify([run.number, run.samples, this.query]);
    if (asked === this.asked && this.drawn) return;
    this.asked = asked;
    const found = await this.page.ask(run, "samples", this.query);
    if (asked !== this.asked) return;
    this.drawn = "yes";
    this.draw(run, found);
  }

  change(name, value) {
    this.query = { ...this.query, page: 0, [name]: value };
    return this.page.refresh();
  }

  bar() {
    const query = this.query;
    const flag = (label, name) => tick(label, query[name] === "1", (value) => this.change(name, value ? "1" : ""));
    return element("div", { class: "bar" }, this.page.runChoice(),
      choice("order", Object.keys(ORDERS).map((order) => [order, order]), query.order, (value) => this.change("order", value)),
      choice("kind", [["", "all"], ["training", "training"], ["held-out", "held-out"]], query.kind, (value) => this.change("kind", value)),
      flag("truncated", "truncated"), flag("no reward", "failed"), flag("episodes", "turns"),
      numberBox("from step", query.first_step, (value) => this.change("first_step", value)),
      numberBox("to step", query.last_step, (value) => this.change("last_step", value)),
      numberBox("prompt", query.prompt_id, (value) => this.change("prompt_id", value)));
  }

  draw(run, found) {
    const pages = Math.max(1, Math.ceil(found.total / found.page_size));
    const go = (page) => { this.query = { ...this.query, page }; return this.page.refresh(); };
    const turn = (label, text, page, isOn) => {
      const made = element("button", { "aria-label": label, onclick: () => go(page) }, text);
      made.disabled = !isOn;
      return made;
    };
    const note = this.page.source.isLive ? `${found.total} of ${found.all} samples` : `${found.total} of the samples in this file; the run has ${found.all}`;
    const head = element("div", { class: "head" }, element("h2", { id: "count" }, note),
      element("span", {}, turn("previous page", "\u2190", found.page - 1, found.page > 0), ` page ${found.page + 1} of ${pages} `, turn("next page", "\u2192", found.page + 1, found.page + 1 < pages)));
    if (found.rows.length === 0) {
      replace(this.list, head, element("p", { class: "empty" }, found.all === 0 ? "samples.jsonl is empty: run.samples_per_step says how many responses of a step are written." : "No sample passes these filters."));
      return;
    }
    const body = element("tbody", {}, ...found.rows.map((row) => this.row(run, row)));
    replace(this.list, head, element("div", { class: "scroll" }, element("table", { class: "list rows" },
      element("thead", {}, element("tr", {}, ...COLUMNS.map(([title], at) => element("th", { class: at === 1 ? "" : "number" }, title)), element("th", {}, "prompt \u2192 response"))), body)));
  }

  row(run, row) {
    const open = () => this.open(run, row.number);
    const badges = [row.truncated ? element("span", { class: "badge" }, "truncated") : null, row.failed ? element("span", { class: "badge bad" }, "no reward") : null, row.num_turns ? element("span", { class: "badge" }, `${row.num_turns} turns`) : null];
    return element("tr", { tabindex: "0", "data-number": row.number, class: this.detail.is(run, row.number) ? "open" : "", onclick: open, onkeydown: (event) => { if (event.key === "Enter") open(); } },
      ...COLUMNS.map(([, name], at) => element("td", { class: at === 1 ? "kind" : "number" }, at === 1 ? row.kind : figure(row[name]), at === 1 ? element("span", {}, ...badges.filter((one) => one)) : null)),
      element("td", { class: "preview" }, row.preview === null ? `a row of ${bytes(row.bytes)}: open it` : visible(row.preview.replace(/\s+/g, " "))));
  }

  async open(run, number) {
    for (const row of this.list.querySelectorAll("tr.open")) row.classList.remove("open");
    this.list.querySelector(`tr[data-number="${number}"]`)?.classList.add("open");
    this.list.classList.add("opened");
    await this.page.guarded(() => this.detail.open(this.opened, run, number, (sibling) => this.open(run, sibling)));
  }
}
