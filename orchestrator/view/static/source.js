// Where the page gets a run's data: from `slipstream view`, or from the file that it is in.

/** Asks the server, with the token that came behind the `#` of the address. */
export class LiveSource {
  constructor(token) {
    this.token = token;
    this.isLive = true;
  }

  async get(path, words = {}) {
    const query = new URLSearchParams(Object.entries(words).filter(([, value]) => value !== "" && value !== null));
    const answer = await fetch(`/api/${path}?${query}`, { headers: { Authorization: `Bearer ${this.token}` } });
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error);
    return content;
  }

  async runs() { return (await this.get("runs")).runs; }
  metrics(run, names, afterRow) { return this.get(`runs/${run}/metrics`, { names: names.join(","), after_row: afterRow }); }
  options(run) { return this.get(`runs/${run}/options`); }
  environment(run) { return this.get(`runs/${run}/environment`); }
  fleet(run) { return this.get(`runs/${run}/fleet`); }
  timelineSteps(run) { return this.get(`runs/${run}/timeline`); }
  timeline(run, step) { return this.get(`runs/${run}/timeline/${step}`); }
  trace(run, name) { return this.get(`runs/${run}/trace/${name}`); }
  samples(run, query) { return this.get(`runs/${run}/samples`, query); }
  sample(run, number, window = {}) { return this.get(`runs/${run}/sample/${number}`, window); }
}

const ORDERS = {
  "newest": ["step", -1], "oldest": ["step", 1], "worst k3": ["k3", -1], "worst token k3": ["k3_max", -1],
  "highest reward": ["reward", -1], "lowest reward": ["reward", 1], "highest advantage": ["advantage", -1],
  "lowest advantage": ["advantage", 1], "longest": ["num_tokens", -1], "shortest": ["num_tokens", 1], "stalest": ["staleness", -1],
};
const PAGE = 50;

/** The same answers, from what `slipstream view --export` put into the file. */
export class FileSource {
  constructor(data) {
    this.data = data;
    this.isLive = false;
  }

  async runs() { return this.data.runs.map((run) => run.summary); }

  async metrics(run, names, afterRow) {
    const all = this.data.runs[run].metrics;
    const columns = Object.fromEntries(names.filter((name) => name in all.columns).map((name) => [name, all.columns[name].slice(afterRow)]));
    return { ...all, from_row: afterRow, steps: all.steps.slice(afterRow), columns };
  }

  async options(run) { return this.data.runs[run].options; }
  async environment(run) { return this.data.runs[run].environment; }
  async fleet(run) { return this.data.runs[run].fleet; }
  async timelineSteps(run) { return this.data.runs[run].timeline; }
  async timeline(run, step) { return this.data.runs[run].timelines[step]; }
  async trace(run, name) { return this.data.runs[run].trace[name]; }

  async samples(run, query) {
    const [field, sign] = ORDERS[query.order ?? "newest"];
    const wanted = this.data.runs[run].samples.filter((row) =>
      (!query.kind || row.kind === query.kind) && (!query.truncated || row.truncated) && (!query.failed || row.failed) &&
      (!query.turns || row.num_turns > 0) && row.step >= Number(query.first_step || 0) &&
      (!query.last_step || row.step <= Number(query.last_step)) && (!query.prompt_id || row.prompt_id === Number(query.prompt_id)));
    const key = (row) => (row[field] === null ? Infinity : sign * row[field]);
    wanted.sort((one, other) => (key(one) === key(other) ? 0 : key(one) - key(other)));
    const page = Number(query.page || 0);
    return {
      all: this.data.runs[run].all_samples, total: wanted.length, page, page_size: PAGE,
      rows: wanted.slice(page * PAGE, (page + 1) * PAGE),
    };
  }

  async sample(run, number, window = {}) {
    const found = this.data.runs[run].details[number];
    if (!found) throw new Error("this sample is not in the file; slipstream view shows all of them");
    if (window.first_token || window.first_char) throw new Error("the rest is not in the file; slipstream view shows all of it");
    return found;
  }
}
