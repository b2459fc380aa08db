"""Locks: what the page is told about a run, from files in every state that a run and its resumption leave."""

import json
from pathlib import Path

import numpy as np
import pytest
from fakes.run_folders import MadeUpRun
from hypothesis import given, strategies as st

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.cli.status import status_of
from slipstream.orchestrator.files.row_files import GrowingFile, objects
from slipstream.orchestrator.files.startup import read_starts
from slipstream.orchestrator.view.command import run_view, snapshot
from slipstream.orchestrator.view.run_reader import RunReader
from slipstream.orchestrator.view.samples import (
    ENTRY,
    MOST_CHARS,
    MOST_TOKENS,
    ORDERS,
    SampleQuery,
    chosen,
    detail,
    parse_query,
)
from slipstream.orchestrator.view.server import answer
from slipstream.orchestrator.view.tables import FleetTable, MetricsTable, concluded


def test_lines_are_given_once_whole_and_anew_when_the_file_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = GrowingFile(path)
    assert file.news().lines == []
    path.write_bytes(b'{"a": 1}\nno json\n{"b"')
    assert list(objects(file.news())) == [(0, {"a": 1})]
    with path.open("ab") as more:
        more.write(b': 2}\n[3]\n{"c": 4, "d": [5]}\n{"e": 6}\n')
    news = file.news()
    assert list(objects(news)) == [(17, {"b": 2}), (30, {"c": 4, "d": [5]}), (49, {"e": 6})]
    assert list(objects(news, ["b", "c"])) == [(17, {"b": 2}), (30, {"c": 4}), (49, {})]
    assert file.news().lines == []
    other = tmp_path / "other"
    other.write_bytes(b'{"d": 5}\n')
    other.replace(path)
    news = file.news()
    assert news.is_another_file and list(objects(news)) == [(0, {"d": 5})]


def test_metrics_are_columns_and_a_resumed_run_begins_another_generation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "a": None, "b": 1}, {"step": 1, "a": 2.5, "b": None}, {"step": 2, "a": 3}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = MetricsTable(path)
    table.refresh()
    assert table.columns() == {
        "generation": 0, "from_row": 0, "steps": [0, 1, 2], "columns": {"b": [1, None, None], "a": [None, 2.5, 3]}
    }  # fmt: skip
    assert table.columns(["a", "unknown"], after_row=2)["columns"] == {"a": [3]}
    (tmp_path / "shorter").write_text('{"step": 0, "b": 7}\n')
    (tmp_path / "shorter").replace(path)
    table.refresh()
    assert (table.generation, table.steps, table.names) == (1, [0], ["b"])


@st.composite
def queries(draw: st.DrawFn) -> SampleQuery:
    return SampleQuery(
        order=draw(st.sampled_from(list(ORDERS))), kind=draw(st.sampled_from(["", "training", "held-out"])),
        flags=draw(st.integers(0, 3)), has_turns=draw(st.booleans()), first_step=draw(st.integers(0, 5)),
        last_step=draw(st.none() | st.integers(0, 5)), prompt_id=draw(st.none() | st.integers(0, 2)),
    )  # fmt: skip


@given(queries(), st.integers(0, 40), st.integers(0, 99))
def test_a_query_finds_what_a_loop_over_all_entries_finds(query: SampleQuery, size: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    index = np.zeros(size, ENTRY)
    for name in ("step", "kind", "flags", "num_turns", "num_tokens", "staleness", "prompt_id"):
        index[name] = draw.integers(0, 2 if name == "kind" else 4, size)
    for name in ("reward", "advantage", "k3", "k3_max"):
        index[name] = draw.choice([0.0, 0.5, -1.0, np.nan], size)
    name, is_descending = ORDERS[query.order]

    def passes(entry: np.void) -> bool:
        return (
            query.first_step <= entry["step"] <= (9 if query.last_step is None else query.last_step)
            and query.kind in ("", ("training", "held-out")[entry["kind"]])
            and entry["flags"] & query.flags == query.flags
            and (not query.has_turns or entry["num_turns"] > 0)
            and query.prompt_id in (None, entry["prompt_id"])
        )

    def key(number: int) -> tuple[bool, float, int]:
        value = float(index[name][number])
        return (np.isnan(value), 0 if np.isnan(value) else -value if is_descending else value, -number)

    assert chosen(index, query).tolist() == sorted((i for i in range(size) if passes(index[i])), key=key)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"order": "best"}, "order must be one of newest"),
        ({"kind": "x"}, "kind must be"),
        ({"page": "-1"}, "page must be"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(words: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_query(words)


def test_who_waited_for_whom_by_hand() -> None:
    """5 s: prompt 8 is the last before the trainer goes on at 2 s. rollout-0 is idle from 1.5 s, rollout-1 from 1.9 s;
    rollout-1 samples for the next step from 4 s on."""
    spans = [
        ["rollout-0", "sample", -0.5, 1.5, 7], ["rewards", "judge", 1.5, 1.6, 7],
        ["rollout-1", "sample", 0.1, 1.9, 8], ["rewards", "judge", 1.9, 2.0, 8],
        ["trainer", "wait for rollouts", 0.0, 2.0, None], ["trainer", "forward and backward", 2.0, 4.0, None],
        ["trainer", "publish", 4.0, 5.0, None], ["rollout-1", "sample", 4.0, 5.0, 9],
    ]  # fmt: skip
    found = concluded({"step": 1, "from": 100.0, "to": 105.0, "spans": spans})
    assert found["waits"] == [
        "The trainer waited 2.00 s for rollouts; last came prompt 8: rollout-1 sampled it in 1.80 s, the rewards "
        "judged it in 0.10 s.",
        "rollout-0 had nothing to sample for 3.50 s: 0.50 s during the trainer's wait for other workers and rewards, "
        "2.00 s during the trainer's forward and backward, 1.00 s during the publish.",
        "rollout-1 had nothing to sample for 2.20 s: 0.20 s during the trainer's wait for other workers and rewards, "
        "2.00 s during the trainer's forward and backward.",
    ]


def test_a_worker_that_sampled_nothing_in_a_step_was_idle_all_along() -> None:
    spans = [["trainer", "forward and backward", 0.0, 2.0, None], ["rollout-0", "sample", 0.0, 2.0, 7]]
    row = {"step": 1, "from": 100.0, "to": 102.0, "spans": spans, "publish": {"replicas": [{}, {}]}}
    assert concluded(row)["idle"] == {"rollout-0": [], "rollout-1": [(0.0, 2.0, "the trainer's forward and backward")]}


def test_a_fleet_by_hand() -> None:
    """Worker 0 fails at 10 s, its successor counts tokens from 0 again and adopts version 2."""
    events = [(1, "rollout-0", "process_up"), (2, "rollout-0", "up"), (10, "rollout-0", "failed"),
              (11, "rollout-0.1", "restarting"), (15, "rollout-0.1", "serving")]  # fmt: skip
    rows = [{"time": at, "worker": 0, "name": name, "event": event} for at, name, event in events]
    counts = [(4, "rollout-0", 100), (6, "rollout-0", 300), (17, "rollout-0.1", 50), (19, "rollout-0.1", 150)]
    rows += [{"time": at, "worker": 0, "name": name, "event": "tokens", "tokens": n} for at, name, n in counts]
    table = FleetTable()
    table.add([*rows, {"event": "of another version"}])
    (worker,) = table.plain([(3.0, 1, [True]), (9.0, 2, [False]), (18.0, 3, [True])])["workers"]
    assert worker["stretches"] == [
        (1, 2, "starting"), (2, 4, "up"), (4, 10, "serving"), (10, 11, "failed"), (11, 15, "restarting"),
        (15, 19, "serving"),
    ]  # fmt: skip
    assert (worker["state"], worker["version"], worker["restarts"], worker["tokens"]) == ("serving", 3, 1, 450)
    assert worker["rates"] == [(6, 100.0), (19, 50.0)]


def pieces(ids: list[int]) -> list[str]:
    return [f"<{token}>" for token in ids]


def test_a_long_sample_comes_in_windows_and_knows_what_was_cut() -> None:
    size = MOST_TOKENS + 10
    row = {
        "step": 1, "num_tokens": size + 90, "cut": [5, 95], "token_ids": list(range(size)),
        "versions": [[3, 4], [4, size + 86]], "rollout_logprobs": [-0.5] * size, "advantages": [0.25],
        "prompt": "p" * (MOST_CHARS + 7),
        "response": "",
    }  # fmt: skip
    first = detail(row, pieces)
    assert first["segments"][0]["given"] == {"text": "p" * MOST_CHARS, "from": 0, "total": MOST_CHARS + 7}
    assert first["segments"][1] == {"first": 0, "end": size + 90}
    tokens = first["tokens"]
    assert (len(tokens["ids"]), tokens["total"]) == (MOST_TOKENS, size)
    assert tokens["places"][:7] == [0, 1, 2, 3, 4, 95, 96] and tokens["versions"][:7] == [3, 3, 3, 3, 4, 4, 4]
    assert tokens["advantages"] == [0.25] * MOST_TOKENS and tokens["log_ratios"] == [None] * MOST_TOKENS
    rest = detail(row, pieces, first_token=MOST_TOKENS, first_char=MOST_CHARS)
    assert len(rest["tokens"]["ids"]) == 10 and rest["segments"][0]["given"]["text"] == "p" * 7


def test_a_run_is_read_while_it_goes_on_and_after_it_was_resumed(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", num_steps=9)
    reader = RunReader(run.folder.root)
    assert (reader.summary()["step"], reader.samples(SampleQuery())["all"]) == (None, 0)
    assert reader.fleet()["workers"][0]["version"] is None and reader.steps_with_timeline()["steps"] == []
    with run.telemetry:
        for step in (1, 2, 3):
            run.write_step(step)
            assert reader.summary()["step"] == step
            assert reader.samples(SampleQuery())["total"] == 8 * step
            assert reader.timeline(step)["row"]["step"] == step
            assert reader.fleet()["workers"][0]["version"] == step
    sample = reader.sample(23)
    assert len(sample["siblings"]) == 4
    assert len(sample["tokens"]["pieces"]) == 12 and reader.samples(SampleQuery())["rows"][0]["step"] == 3
    rows = run.folder.samples.read_bytes().splitlines(keepends=True)
    run.folder.samples.write_bytes(b"".join(rows[:8]))  # the run goes on from step 1
    again = run.folder.metrics.with_suffix(".again")
    again.write_bytes(run.folder.metrics.read_bytes().splitlines(keepends=True)[0])
    again.replace(run.folder.metrics)
    assert reader.summary()["generation"] == 1 and reader.summary()["step"] == 1
    assert reader.samples(SampleQuery())["all"] == 8
    with pytest.raises(ConfigError, match="sample 23 cannot be read"):
        reader.sample(23)
    for what, name in (("timeline", "99"), ("trace", "..%2Fx"), ("secrets", None)):
        with pytest.raises(ConfigError):
            answer(reader, what, name, {})
    run.folder.root.rename(tmp_path / "elsewhere")
    assert reader.summary()["state"] == "moved or removed"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere is not a run folder; give one like runs/latest"),
        ([".", "--port", "x"], "--port must be an integer, got 'x'"),
        (["--exprt", "x.html"], "unknown flag --exprt. Did you mean --export?"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", *words]) == 2
    assert says in capsys.readouterr().err


DAMAGED = [
    b"\0" * 512,
    b'{"step": 3, "from": 17672',
    b'{"step": 3, "spans": {"step": 4, "from": 1.0, "to": 2.0, "spans": []}',
    b'{"step": 9}',
    b'{"step": 9, "from": 1.0, "to": null, "spans": []}',
    b'{"step": 9, "from": 1.0, "to": 2.0, "spans": [["trainer"]]}',
    b'{"step": 9, "from": 1.0, "to": 2.0, "spans": [["trainer", "publish", "a", 1.0, null]]}',
    b'{"step": 9, "from": 1.0, "to": 2.0, "publish": {"replicas": [null]}}',
    b'{"worker": 0, "time": "a", "event": "up"}',
    b'{"start": "run", "spans": 3}',
    b"[]",
]
"""Lines that a power cut, a full disk or a hand leaves."""


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_any_file_of_rows_is_passed_over(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = MadeUpRun(tmp_path / "run", num_steps=4)
    for step in range(3):
        run.write_step(step)
    folder = run.folder
    whole = snapshot(RunReader(folder.root))["answers"]
    files = (folder.metrics, folder.timeline, folder.fleet, folder.startup, folder.evaluations, folder.samples)
    for file in files:
        with file.open("ab") as more:
            more.write(line + b"\n")
    run_view([folder.root], print, export=tmp_path / "page.html")
    after = snapshot(RunReader(folder.root))["answers"]
    samples = {what for what in after if what.startswith("sample/")}  # of these, a row with its step alone is one
    assert {what: after[what] for what in after.keys() - samples} == {
        what: whole[what] for what in whole.keys() - samples
    }
    assert f"{folder.timeline}: left out 1 line, damaged by a crash or a hand" in caplog.messages
    status_of(folder.root).as_text()
    read_starts(folder.startup)


def test_an_option_that_is_infinite_is_told(tmp_path: Path) -> None:
    folder = MadeUpRun(tmp_path / "run", num_steps=2).folder
    saved = folder.config.read_text()
    folder.config.write_text(saved.replace("correction_max: null", "correction_max: .inf"))
    told = answer(RunReader(folder.root), "options", None, {})
    assert json.loads(json.dumps(told, allow_nan=False))["algorithm.correction_max"] == "inf"


def test_a_port_that_is_taken_and_a_file_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    import socket

    run = MadeUpRun(tmp_path / "run", num_steps=2).folder.root
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be listened on"):
            run_view([run], print, port=port)
    with pytest.raises(ConfigError, match="at most 65535, got 70000"):
        run_view([run], print, port=70000)
    with pytest.raises(ConfigError, match="cannot be written"):
        run_view([run], print, export=tmp_path / "no" / "run.html")
    with pytest.raises(ConfigError, match="at most 12 runs at once, got 13"):
        run_view([run] * 13, print)
