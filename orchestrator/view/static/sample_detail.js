// One sample: what was given, and every sampled token in the colour of a figure.

import { choice, element, replace, swatch, tip } from "./dom.js";
import { colourOf, figure, visible } from "./format.js";

const COLOURINGS = [["log_ratio", "trainer's minus engine's log-probability"], ["log_ratio_here", "the same, by the largest here"], ["probability", "engine's probability"], ["version", "policy version"], ["advantage", "advantage"], ["none", "nothing"]];
const SMALLEST = 1e-4;

export class Detail {
  constructor(page) {
    this.page = page;
    this.colouring = "log_ratio";
    this.shown = null;
  }

  is(run, number) {
    return this.shown !== null && this.shown.run.number === run.number && this.shown.number === number;
  }

  // What was asked for last is shown, whichever answer comes last.
  async open(holder, run, number, openSibling) {
    const asked = { run, number };
    this.asked = asked;
    const found = await this.page.ask(run, `sample/${number}`);
    if (this.asked !== asked) return;
    this.shown = asked;
    this.holder = holder;
    this.openSibling = openSibling;
    this.found = found;
    this.tokens = columnsOf(found.tokens);
    this.draw();
    holder.scrollIntoView({ block: "nearest" });
  }

  draw() {
    const found = this.found;
    const title = `Sample ${this.shown.number}: step ${found.step}, ${found.kind}, prompt ${figure(found.prompt_id)}`;
    const card = element("section", { class: "card", id: "detail" },
      element("div", { class: "head" }, element("h2", {}, title), choice("colour", COLOURINGS, this.colouring, (value) => { this.colouring = value; this.draw(); })),
      figures(found), this.siblings(), this.legend());
    for (const segment of found.segments) card.append(...this.segment(segment));
    const left = found.tokens.total - this.tokens.length;
    if (left > 0) card.append(element("button", { id: "more", onclick: () => this.page.guarded(() => this.more()) }, `show the next ${Math.min(left, 4000)} of ${left} further tokens`));
    replace(this.holder, card);
  }

  async more() {
    const shown = this.shown;
    const next = await this.page.ask(shown.run, `sample/${shown.number}`, { first_token: this.tokens.length });
    if (this.shown !== shown) return;
    this.tokens = this.tokens.concat(columnsOf(next.tokens));
    this.draw();
  }

  async moreText(part, segment, name) {
    const shown = this.shown;
    const next = await this.page.ask(shown.run, `sample/${shown.number}`, { first_char: part.from + part.text.length });
    if (this.shown !== shown) return;
    const place = this.found.segments.indexOf(segment);
    const further = next.segments[place][name];
    segment[name] = { from: part.from, total: part.total, text: part.text + further.text };
    this.draw();
  }

  siblings() {
    if (this.found.siblings.length < 2) return null;
    return element("p", { class: "soft" }, "of this prompt in this step: ", ...this.found.siblings.map((one) => {
      const button = element("button", { onclick: () => this.openSibling(one.number) }, `reward ${figure(one.reward)}`);
      button.disabled = one.number === this.shown.number;
      return button;
    }));
  }

  segment(segment) {
    const parts = [];
    if (segment.turn !== undefined && segment.given) {
      const why = segment.parent === null ? (segment.reason && segment.reason !== "start" ? `begins anew (${segment.reason})` : "begins") : `goes on from turn ${segment.parent + 1}${segment.reason ? ` (${segment.reason})` : ""}`;
      parts.push(element("h3", {}, visible(`Turn ${segment.turn + 1} ${why}`)));
    }
    if (segment.given) parts.push(this.text(segment, "given"));
    if (segment.said) parts.push(this.text(segment, "said"));
    if (segment.first !== undefined) parts.push(this.sampled(segment));
    return parts;
  }

  text(segment, name) {
    const part = segment[name];
    const box = element("div", { class: `text ${name}` }, visible(part.text));
    const left = part.total - part.from - part.text.length;
    if (left > 0) box.append(element("button", { class: "more-text", onclick: () => this.page.guarded(() => this.moreText(part, segment, name)) }, `show more of ${left} further characters`));
    return box;
  }

  sampled(segment) {
    this.mark = this.largest();
    const box = element("div", { class: "text said" });
    const own = this.tokens.filter((token) => token.place >= segment.first && token.place < segment.end);
    const cut = this.found.cut;
    let wasCut = false;
    for (const token of own) {
      if (cut && !wasCut && token.place >= cut[1]) { box.append(leftOut(cut)); wasCut = true; }
      const part = element("span", { class: "token" }, visible(token.piece));
      const colour = this.colourOf(token);
      if (colour) part.style.backgroundColor = colour;
      box.append(tip(part, () => describe(token)));
    }
    if (own.length === 0) box.append(element("span", { class: "left-out" }, segment.end > segment.first ? "its tokens come further down, or were left out" : "no token"));
    return box;
  }

  colourOf(token) {
    if (this.colouring.startsWith("log_ratio")) return signed(token.log_ratio, strength(token.log_ratio, this.mark));
    if (this.colouring === "probability") return token.rollout_logprob === null ? null : `rgba(213, 94, 0, ${(1 - Math.exp(token.rollout_logprob)) * 0.75})`;
    if (this.colouring === "version") return token.version === null ? null : `${colourOf(token.version)}55`;
    if (this.colouring === "advantage") return signed(token.advantage, Math.min(Math.abs(token.advantage ?? 0) / 2, 1));
    return null;
  }

  /** What has the strongest colour: a difference of 1, or the largest of this sample. */
  largest() {
    if (this.colouring === "log_ratio") return 1;
    return Math.max(...this.tokens.map((token) => Math.abs(token.log_ratio ?? 0)), 1e-30);
  }

  legend() {
    const box = element("div", { class: "legend" });
    const sample = (colour, words) => box.append(swatch(colour, words));
    if (this.colouring.startsWith("log_ratio")) {
      const largest = this.largest();
      for (const value of [-1, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1]) sample(signed(value, strength(value * largest, largest)), figure(value * largest));
      sample(null, `none: outside of the loss, or below ${figure(SMALLEST * largest)}`);
    } else if (this.colouring === "probability") {
      for (const value of [1, 0.75, 0.5, 0.25, 0]) sample(`rgba(213, 94, 0, ${(1 - value) * 0.75})`, figure(value));
    } else if (this.colouring === "version") {
      for (const version of [...new Set(this.tokens.map((token) => token.version))].slice(0, 20)) sample(version === null ? null : `${colourOf(version)}55`, `version ${figure(version)}`);
    } else if (this.colouring === "advantage") {
      for (const value of [-2, -1, -0.5, 0.5, 1, 2]) sample(signed(value, Math.min(Math.abs(value) / 2, 1)), figure(value));
    }
    return box;
  }
}

function figures(found) {
  const shown = [["set", found.set], ["reward", found.reward], ...Object.entries(found.parts ?? {}), ["advantage", found.mean_advantage], ["k3", found.k3], ["largest k3", found.k3_max], ["staleness", found.staleness], ["tokens", found.num_tokens], ["ended by", found.finish_reason], ["versions", (found.versions ?? []).map(([version, count]) => `${version} (${count})`).slice(0, 8).join(", ")], ["failure", found.failure || null]];
  return element("div", { class: "figures" }, ...shown.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => element("span", {}, element("span", { class: "soft" }, `${visible(name)} `), element("b", {}, visible(figure(value))))));
}

function columnsOf(tokens) {
  return tokens.places.map((place, at) => ({
    place, id: tokens.ids[at], piece: tokens.pieces[at] ?? `[${tokens.ids[at]}]`, rollout_logprob: tokens.rollout_logprobs[at], log_ratio: tokens.log_ratios[at],
    advantage: tokens.advantages[at], version: tokens.versions[at],
  }));
}

function leftOut([first, end]) {
  return element("span", { class: "left-out" }, ` [${end - first} tokens are left out here] `);
}

/** 0 at 0.0001 of the largest and below, 1 at the largest and above, in decades between. */
function strength(ratio, largest) {
  const size = Math.abs(ratio ?? 0) / largest;
  return size <= SMALLEST ? 0 : Math.min((Math.log10(size) + 4) / 4, 1);
}

function signed(value, share) {
  if (value === null || value === undefined || share === 0) return null;
  return value > 0 ? `rgba(0, 114, 178, ${0.12 + share * 0.6})` : `rgba(213, 94, 0, ${0.12 + share * 0.6})`;
}

function describe(token) {
  const known = (value) => (value === null || value === undefined ? "\u2013" : figure(value));
  const own = token.log_ratio === null || token.rollout_logprob === null ? null : token.rollout_logprob + token.log_ratio;
  return [`token ${token.id} at ${token.place}: ${visible(JSON.stringify(token.piece))}`, `engine   ${known(token.rollout_logprob)}`, `trainer  ${known(own)}`, `differ by ${known(token.log_ratio)}`, `advantage ${known(token.advantage)}, version ${known(token.version)}`].join("\n");
}
