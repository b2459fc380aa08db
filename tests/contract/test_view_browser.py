"""`slipstream view` in a real browser: every view, filters, two runs, a run that goes on, the exported file, and
responses that would take the page over if they were HTML.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from fakes.run_folders import MadeUpRun, make_run
from playwright.sync_api import BrowserContext, Page, Route, expect, sync_playwright
from tokenizers import Tokenizer

from slipstream.orchestrator.control.control_folder import alive
from slipstream.rollout.types import Group, Prompt, Rollout, Turn

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
ATTACKS = [
    "<img src=x onerror=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script>",
    "<svg onload=document.title='taken'>${document.title='taken'}{{7*7}}",
    "\x00\x07\x1b[31mred\x1b[0m\u202eright to left\u2028\ud800",
]
NUM_STEPS, NUM_SAMPLES, PATIENCE_MS = 1000, 12, 240_000
expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Served:
    """Runs, and the page about them in a browser."""

    page: Page
    address: str
    big: Path
    attacked: MadeUpRun
    errors: list[str] = field(default_factory=list)

    def open(self, tab: str) -> None:
        self.page.click(f"#tabs button[data-tab={tab}]")

    def choose(self, label: str, value: str) -> None:
        self.page.select_option(f"select[aria-label='{label}']", value)

    def list_samples(self, run: str = "0") -> Page:
        """Without what another test has chosen."""
        self.page.reload()
        self.page.wait_for_selector("body[data-ready]")
        self.open("samples")
        self.choose("run", run)
        self.page.wait_for_selector("#samples tbody tr")
        return self.page

    def enter(self, label: str, value: str) -> None:
        self.page.fill(f"input[aria-label='{label}']", value)
        self.page.press(f"input[aria-label='{label}']", "Enter")


def attack_run(root: Path) -> MadeUpRun:
    """One step per attack, as a prompt, as a response's tokens, as turns; and a response of 10 MB."""
    run = MadeUpRun(root, num_steps=40)
    tokenizer = Tokenizer.from_file(str(run.folder.model / "tokenizer.json"))
    for step, attack in enumerate(ATTACKS, 1):
        tokens = tokenizer.encode(attack.encode("utf-8", "replace").decode(), add_special_tokens=False).ids
        said = Rollout(tokens, [-0.5] * len(tokens), [0] * len(tokens), attack, attack, failure=attack)
        turns = (Turn(None, [1], len(tokens), attack, attack, attack),)
        episode = Rollout(tokens, [-0.5] * len(tokens), [0] * len(tokens), attack, "stop", turns=turns)
        parts = [{attack: 1.0}, {attack: 0.5}]
        run.write_step(step, [Group(Prompt(step, (1,), attack), [said, episode], [1.0, 0.5], parts)])
    long = Rollout([], [], [0], "<b>10 MB</b> " * (10_000_000 // 13), "length")
    run.write_step(len(ATTACKS) + 1, [Group(Prompt(99, (1,), "long"), [long], [0.0], [{}])])
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    assert CHROMIUM is not None, "run requirements/browser.sh"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE_MS)
        context = opened.new_context(viewport={"width": 1400, "height": 900})
        context.set_default_timeout(PATIENCE_MS)
        yield context
        opened.close()


@pytest.fixture(scope="module")
def served(browser: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs")
    big = make_run(folder / "big", num_steps=NUM_STEPS, num_samples=NUM_SAMPLES, num_tokens=6).root
    attacked = attack_run(folder / "attacked")
    words = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "view", str(big), str(attacked.folder.root)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        page = browser.new_page()
        served = Served(page, address, big, attacked)
        page.on("pageerror", lambda error: served.errors.append(str(error)))
        page.on("console", lambda message: served.errors.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        yield served
        assert served.errors == [], "the browser had something to complain of"
        with attacked.telemetry:
            pass
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM


def rows_of(served: Served) -> list[dict]:
    return [json.loads(line) for line in (served.big / "samples.jsonl").read_text().splitlines()]


def listed(served: Served) -> list[int]:
    return [int(row.get_attribute("data-number") or -1) for row in served.page.query_selector_all("#samples tbody tr")]


def test_curves_of_two_runs_are_in_the_same_charts(served: Served) -> None:
    page = served.page
    assert "token" not in page.url, "who looks over the shoulder, or at the history, does not get the token"
    expect(page.locator("#runs .run")).to_have_count(2)
    reward = page.locator(".chart[data-title=Reward]")
    expect(reward).to_contain_text("big reward/mean")
    expect(reward).to_contain_text("attacked reward/mean")
    assert page.locator(".chart canvas").count() >= 11
    ink = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert reward.locator("canvas").evaluate(ink) > 20, "something is drawn"
    served.choose("add a chart", "optim/lr")
    expect(page.locator(".chart[data-title='optim/lr']")).to_contain_text("optim/lr")
    page.dispatch_event("#runs .run >> nth=1", "click")  # made anew every two seconds, also under a mouse
    expect(page.locator(".chart[data-title=Reward]")).not_to_contain_text("attacked")
    page.dispatch_event("#runs .run >> nth=1", "click")
    page.click("button[title=remove]")
    expect(page.locator(".chart[data-title='optim/lr']")).to_have_count(0)


def test_timeline_says_who_waited_for_whom(served: Served) -> None:
    served.open("timeline")
    page, card = served.page, served.page.locator("#step-card")
    expect(card).to_contain_text(f"Step {NUM_STEPS}")
    served.enter("step", "30")
    expect(card).to_contain_text("Step 30")
    expect(card).to_contain_text("The trainer waited 3.20 s for rollouts; last came prompt")
    expect(card).to_contain_text("rollout-0 had nothing to sample for")
    assert {box.get_attribute("data-what") for box in card.locator("rect").element_handles()} >= {
        "wait for rollouts", "forward and backward", "optimizer", "publish", "sample", "judge", "idle", "paused",
    }  # fmt: skip
    expect(page.locator("#publish-card")).to_contain_text("of the 16.8 MB of the watermark")
    expect(page.locator("#publish-card")).to_contain_text("rollout-1: TransferTimeout: made up")
    page.click("button[aria-label='next step']")
    expect(card).to_contain_text("Step 31")
    page.click("button[aria-label='follow the newest step']")
    expect(card).to_contain_text(f"Step {NUM_STEPS}")


def test_fleet_shows_states_versions_and_what_happened(served: Served) -> None:
    served.open("fleet")
    card = served.page.locator("#workers-card")
    expect(card.locator("tbody tr")).to_have_count(2)
    expect(card.locator("tbody tr >> nth=1")).to_contain_text("rollout-1.1")
    expect(card.locator("tbody tr >> nth=1")).to_contain_text("serving")
    expect(card.locator("tbody tr >> nth=0")).to_contain_text(str(NUM_STEPS))
    expect(served.page.locator("main")).to_contain_text("restarting")
    expect(served.page.locator("main canvas")).to_have_count(2)


FILTERS: list[tuple[str, Callable[[Page], object], Callable[[dict], bool], Callable[[dict], float]]] = [
    ("newest", lambda page: None, lambda row: True, lambda row: -row["step"]),
    ("worst k3", lambda page: None, lambda row: row.get("k3") is not None, lambda row: -float(np.float32(row["k3"]))),
    (
        "lowest reward", lambda page: page.check("input[aria-label=truncated]"),
        lambda row: row["finish_reason"] == "length", lambda row: row["reward"],
    ),
    (
        "highest advantage", lambda page: page.check("input[aria-label=episodes]"),
        lambda row: "turns" in row and bool(row["kind"] == "training"),
        lambda row: -float(np.float32(row["mean_advantage"])),
    ),
    (
        "shortest", lambda page: page.select_option("select[aria-label=kind]", "held-out"),
        lambda row: row["kind"] == "held-out", lambda row: row["num_tokens"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("order", "narrow", "passes", "key"), FILTERS, ids=[case[0] for case in FILTERS])
def test_samples_are_filtered_and_sorted_like_the_rows_of_the_file(
    served: Served, order: str, narrow: Callable, passes: Callable, key: Callable
) -> None:
    """The rows themselves, sorted in Python, are the oracle: equal keys come newest first."""
    page = served.list_samples()
    narrow(page)
    served.choose("order", order)
    if order == "highest advantage":
        served.choose("kind", "training")
    rows = rows_of(served)
    wanted = sorted((number for number in range(len(rows)) if passes(rows[number])), key=lambda n: (key(rows[n]), -n))
    total = len(wanted) if order != "worst k3" else len(rows)  # those without a k3 come last
    expect(page.locator("#count")).to_have_text(f"{total} of {len(rows)} samples")
    page.wait_for_function("n => document.querySelector('#samples tbody tr').dataset.number === n", arg=str(wanted[0]))
    assert listed(served) == wanted[:50]
    if total > 100:
        page.click("button[aria-label='next page']")
        first = str(wanted[50])
        page.wait_for_function("n => document.querySelector('#samples tbody tr').dataset.number === n", arg=first)
        assert listed(served) == wanted[50:100]


def test_steps_and_prompts_narrow_the_list(served: Served) -> None:
    page, rows = served.list_samples(), rows_of(served)
    page.fill("input[aria-label='from step']", "500")
    served.enter("to step", "502")
    between = [row for row in rows if 500 <= row["step"] <= 502]
    expect(page.locator("#count")).to_have_text(f"{len(between)} of {len(rows)} samples")
    served.enter("prompt", str(between[0]["prompt_id"]))
    same = [row for row in between if row["prompt_id"] == between[0]["prompt_id"]]
    expect(page.locator("#count")).to_have_text(f"{len(same)} of {len(rows)} samples")
    served.enter("prompt", "999999")
    expect(page.locator("#samples")).to_contain_text("No sample passes these filters.")


def test_a_sample_is_shown_token_by_token_and_an_episode_turn_by_turn(served: Served) -> None:
    page = served.list_samples()
    page.check("input[aria-label=episodes]")
    served.choose("kind", "training")
    served.enter("to step", "999")  # odd steps have tokens of two versions
    expect(page.locator("#samples tbody td >> nth=0")).to_have_text("995")
    number = listed(served)[0]
    page.click("#samples tbody tr >> nth=0")
    detail = page.locator("#detail")
    expect(detail).to_contain_text(f"Sample {number}")
    expect(detail.locator("h3")).to_have_text(
        ["Turn 1 begins", "Turn 2 goes on from turn 1", "Turn 3 begins anew (edited)"]
    )
    expect(detail.locator(".given >> nth=2")).to_have_text("user: a shorter history")
    row = rows_of(served)[number]
    assert detail.locator(".token").count() == len(row["token_ids"])
    colours = {
        colouring: [token.evaluate("t => t.style.backgroundColor") for token in detail.locator(".token").all()]
        for colouring in ("version", "advantage", "probability", "log_ratio_here", "none")
        if not served.choose("colour", colouring)
    }
    assert len(set(colours["version"])) == len(row["versions"]) == 2
    assert len(set(colours["advantage"])) == 1 and colours["advantage"][0]
    blue, red = (f"rgba({rgb}" for rgb in ("0, 114, 178", "213, 94, 0"))
    for colour, ratio in zip(colours["log_ratio_here"], row["log_ratios"], strict=True):
        assert colour == "" or colour.startswith(blue if ratio > 0 else red)
    assert len(set(colours["probability"])) > 2 and set(colours["none"]) == {""}
    detail.locator(".token >> nth=1").hover()
    expect(page.locator("#tip")).to_contain_text(f"token {row['token_ids'][1]} at 1")
    expect(page.locator("#tip")).to_contain_text(f"version {row['versions'][0][0]}")


def shown(attack: str) -> str:
    """What `visible` of format.js makes of it."""
    said = re.sub("[\x00-\x08\x0b-\x1f]", lambda sign: chr(0x2400 + ord(sign.group())), attack)
    return re.sub("[\u202e\u2028\ud800]", lambda sign: f"<U+{ord(sign.group()):04X}>", said)


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_responses_are_text_whatever_they_hold(served: Served, number: int) -> None:
    page, attack = served.list_samples("1"), ATTACKS[number]
    served.choose("order", "oldest")
    for kind, sample in (("response", 2 * number), ("episode", 2 * number + 1)):
        page.click(f'#samples tbody tr[data-number="{sample}"]')
        detail = page.locator("#detail")
        expect(detail).to_contain_text(f"Sample {sample}: step {number + 1},")
        expect(detail.locator(".given")).to_have_text(shown(attack), use_inner_text=False)
        expect(detail.locator(".figures")).to_contain_text(shown(attack).replace("\n", " ")[:10])
        assert ("Turn 1" in detail.inner_text()) == (kind == "episode")
        said = "".join(detail.locator(".token").all_text_contents())
        assert said.startswith("<img" if number == 0 else said[:4]) and len(said) >= min(len(attack), 10)
    assert page.title() == "Slipstream", "no script of a response has run"
    assert page.locator("main img, main script, main svg").count() == 0


def test_the_sample_that_was_asked_for_last_is_shown_though_its_answer_came_first(served: Served) -> None:
    page = served.list_samples("1")
    served.choose("order", "oldest")
    held: list[Route] = []
    is_first = re.compile(r"/runs/1/sample/0\b")
    page.route(is_first, lambda route: held.append(route))
    page.click('#samples tbody tr[data-number="0"]')
    page.click('#samples tbody tr[data-number="3"]')
    expect(page.locator("#detail")).to_contain_text("Sample 3:")
    with page.expect_response(is_first):
        held.pop().continue_()
    page.wait_for_timeout(200)
    expect(page.locator("#detail")).to_contain_text("Sample 3:")
    page.unroute(is_first)


def test_ten_megabytes_are_shown_a_part_at_a_time(served: Served) -> None:
    page = served.list_samples("1")
    served.enter("prompt", "99")
    expect(page.locator("#count")).to_contain_text("1 of")
    expect(page.locator("#samples td.preview")).to_have_text("a row of 10.0 MB: open it")
    page.click("#samples tbody tr >> nth=0")
    said = page.locator("#detail .said")
    expect(said).to_contain_text("<b>10 MB</b> <b>10 MB</b>")
    assert len(said.inner_text()) < 21_000
    page.click("button.more-text")
    expect(page.locator("button.more-text")).to_contain_text("show more of 9959")
    assert 40_000 < len(said.inner_text()) < 41_000 and page.locator("#detail b b").count() == 0


def test_a_run_that_goes_on_is_followed(served: Served) -> None:
    """What is half-written does no harm; the page asks again every two seconds."""
    page, run = served.list_samples("1"), served.attacked
    count = page.locator("#count")
    expect(count).to_contain_text(" samples")
    before = int(count.inner_text().split()[0])
    with alive(run.folder.root):
        run.write_step(20)
        with run.folder.metrics.open("a") as file:
            file.write('{"step": 21, "reward/mean":')
        expect(page.locator("#runs .run >> nth=1")).to_contain_text("running, step 20 of 40")
        expect(count).to_contain_text(f"{before + 8 + 8} of")  # step 20 has an evaluation, too
        served.open("curves")
        expect(page.locator(".chart[data-title=Reward]")).to_contain_text("attacked reward/mean")
        expect(page.locator("#live")).to_have_text("live")


def test_options_that_differ_are_marked(served: Served) -> None:
    served.open("options")
    table = served.page.locator("#options")
    expect(table.locator("td.differs")).to_have_count(2)
    expect(table).to_contain_text("run.num_steps")
    served.page.uncheck("input[aria-label='only options that differ']")
    served.page.fill("input[type=search]", "optim.lr")
    expect(table).to_contain_text("trainer.optim.lr")


def test_the_exported_file_needs_nothing_else(served: Served, browser: BrowserContext, tmp_path: Path) -> None:
    target = tmp_path / "run.html"
    words = ["view", str(served.attacked.folder.root), str(served.big), "--export", str(target)]
    subprocess.run([sys.executable, "-m", "slipstream.orchestrator.cli.main", *words], check=True, capture_output=True)
    assert target.stat().st_size < 40_000_000
    page, asked, errors = browser.new_page(), list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(target.as_uri())
    page.wait_for_selector("body[data-ready]")
    expect(page.locator(".chart[data-title=Reward]")).to_contain_text("big reward/mean")
    page.click("#tabs button[data-tab=timeline]")
    expect(page.locator("#step-card")).to_contain_text("Who waited for whom")
    page.click("#tabs button[data-tab=fleet]")
    expect(page.locator("#workers-card tbody tr")).to_have_count(2)
    page.click("#tabs button[data-tab=samples]")
    page.select_option("select[aria-label=order]", "oldest")
    page.click("#samples tbody tr >> nth=0")
    expect(page.locator("#detail .given")).to_have_text(ATTACKS[0])
    page.click("#tabs button[data-tab=options]")
    expect(page.locator("#options td.differs")).to_have_count(2)
    assert page.title() == "Slipstream" and errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()


def test_nothing_is_told_without_the_token(served: Served) -> None:
    base, _, token = served.address.partition("#token=")

    def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        request = urllib.request.Request(base + path, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, answer.read().decode(), answer.headers["Content-Security-Policy"]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers["Content-Security-Policy"]

    allowed = {"Authorization": f"Bearer {token}"}
    assert ask("api/runs", **allowed)[0] == 200
    for key in (None, "", token[:-1], "\xff"):
        status, text, policy = ask("api/runs/0/samples", **({} if key is None else {"Authorization": f"Bearer {key}"}))
        assert status == 401 and "find" not in text and "default-src 'none'" in policy
    assert ask("api/runs", **allowed, Host="evil.example")[0] == 403
    assert ask("", Host="evil.example")[0] == 403
    assert ask("api/runs", method="POST", **allowed)[0] == 405
    for path in ("static/../server.py", "static/%2e%2e/server.py", "static//etc/passwd", "api/runs/7/samples"):
        assert ask(path, **allowed)[0] == 404
    for path in ("api/runs/0/samples?order=none", "api/runs/0/sample/99999999", "api/runs/0/trace/..%2fx"):
        status, text, policy = ask(path, **allowed)
        assert status in (400, 404) and "Traceback" not in text and "default-src 'none'" in policy
    status, page, policy = ask("")
    assert status == 200 and token not in page
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy and "unsafe" not in policy
