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
}

/** Order of samples -> [field, sign]. */
export const ORDERS = {
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

  async get(path, words = {}) {
    const [, run, ...what] = path.split("/");
    if (run === undefined) return { runs: this.data.runs.map((one) => one.summary) };
    const own = this.data.runs[run];
    if (what[0] === "metrics") return metrics(own.metrics, words);
    if (what[0] === "samples") return samples(own, words);
    const found = own.answers[what.join("/")];
    if (!found || words.first_token || words.first_char) throw new Error("this is not in the file; slipstream view shows all of it");
    return found;
  }
}

function metrics(all, words) {
  const names = words.names.split(",").filter((name) => name in all.columns);
  const columns = Object.fromEntries(names.map((name) => [name, all.columns[name].slice(words.after_row)]));
  return { ...all, from_row: words.after_row, steps: all.steps.slice(words.after_row), columns };
}

function samples(run, query) {
  const [field, sign] = ORDERS[query.order ?? "newest"];
  const wanted = run.samples.filter((row) =>
    (!query.kind || row.kind === query.kind) && (!query.truncated || row.truncated) && (!query.failed || row.failed) &&
    (!query.turns || row.num_turns > 0) && row.step >= Number(query.first_step || 0) &&
    (!query.last_step || row.step <= Number(query.last_step)) && (!query.prompt_id || row.prompt_id === Number(query.prompt_id)));
  const key = (row) => (row[field] === null ? Infinity : sign * row[field]);
  wanted.sort((one, other) => (key(one) === key(other) ? 0 : key(one) - key(other)));
  const page = Number(query.page || 0);
  return { all: run.all_samples, total: wanted.length, page, page_size: PAGE, rows: wanted.slice(page * PAGE, (page + 1) * PAGE) };
}
