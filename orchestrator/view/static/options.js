// Options of the runs, one column each; those that differ first.

import { element, replace, tick } from "./dom.js";
import { visible } from "./format.js";

export class Options {
  constructor(page) {
    this.page = page;
    this.onlyDiffering = false;
    this.words = "";
  }

  async show(main) {
    this.main = main;
    const runs = this.page.shownRuns();
    this.columns = await Promise.all(runs.map((run) => this.page.ask(run, "options")));
    this.facts = await Promise.all(runs.map((run) => this.page.ask(run, "environment")));
    this.onlyDiffering = runs.length > 1;
    this.draw();
  }

  async update() {
    const shown = JSON.stringify(this.page.shownRuns().map((run) => run.number));
    if (this.shown !== shown) await this.show(this.main);
    this.shown = shown;
  }

  draw() {
    const runs = this.page.shownRuns();
    const names = [...new Set(this.columns.flatMap((column) => Object.keys(column)))];
    const rows = names.map((name) => {
      const values = this.columns.map((column) => (name in column ? JSON.stringify(column[name]) : ""));
      return { name, values, differs: new Set(values).size > 1 };
    });
    const search = element("input", { type: "search", placeholder: "find an option", "aria-label": "find an option", oninput: () => {
      this.words = search.value;
      replace(body, ...this.rows(rows));
    } });
    search.value = this.words;
    const body = element("tbody", {}, ...this.rows(rows));
    const heads = runs.map((run) => element("th", {}, visible(run.name)));
    const commands = this.facts.map((facts) => element("td", {}, visible((facts.overrides ?? []).join(" "))));
    const commits = this.facts.map((facts) => element("td", {}, visible(facts.git ? `${facts.git.commit.slice(0, 10)}${facts.git.has_local_changes ? " and local changes" : ""}` : "")));
    replace(this.main,
      element("div", { class: "bar" }, search, tick("only options that differ", this.onlyDiffering, (value) => { this.onlyDiffering = value; replace(body, ...this.rows(rows)); })),
      element("section", { class: "card scroll" }, element("table", { class: "list", id: "options" },
        element("thead", {}, element("tr", {}, element("th", {}, "option"), ...heads),
          element("tr", {}, element("td", { class: "soft" }, "words of the command"), ...commands),
          element("tr", {}, element("td", { class: "soft" }, "commit"), ...commits)), body)));
  }

  rows(rows) {
    const shown = rows.filter((row) => (!this.onlyDiffering || row.differs) && row.name.includes(this.words));
    if (shown.length === 0) return [element("tr", {}, element("td", { class: "soft" }, "no option"))];
    return shown.map((row) => element("tr", {}, element("td", {}, row.name), ...row.values.map((value) => element("td", { class: row.differs ? "differs" : "" }, visible(value)))));
  }
}
