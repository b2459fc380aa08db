"""How long `slipstream view` takes to show a run of 1,000 steps and 100,000 samples, in a real browser.

    python -m bench.view                       makes the run (a minute), then opens it five times

Prints one JSON object: bytes of the run's files, seconds until the server answers, seconds until the page is ready
(curves drawn), until the first page of samples is there, and until a filtered and sorted one is; and the machine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.run_folders import make_run

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100, help="of each step")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--run", type=Path, help="a run folder that is there, instead of one that is made")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = flags.run or make_run(Path(folder) / "run", num_steps=flags.steps, num_samples=flags.samples).root
        openings = [opened(root) for _ in range(flags.times)]
        files = {path.name: path.stat().st_size for path in sorted(root.glob("*.jsonl"))}
        num_samples = (root / "samples.jsonl").read_bytes().count(b"\n")
    print(
        json.dumps(
            {
                "samples": num_samples,
                "bytes": files,
                "seconds": {name: [round(one[name], 3) for one in openings] for name in openings[0]},
                "median": {name: round(statistics.median(one[name] for one in openings), 3) for name in openings[0]},
                "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()},
            },
            indent=2,
        )
    )


def opened(root: Path) -> dict[str, float]:
    """Start the command, open its page in a fresh browser, and look at samples."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    began = time.monotonic()
    words = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "view", str(root)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found: dict[str, Any] = {}
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        found["server answers"] = time.monotonic() - began
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto("about:blank")
            began = time.monotonic()
            page.goto(address)
            page.wait_for_selector("body[data-ready]")
            found["page is ready"] = time.monotonic() - began
            began = time.monotonic()
            page.click("#tabs button[data-tab=samples]")
            page.wait_for_selector("#samples tbody tr")
            found["samples are listed"] = time.monotonic() - began
            first = page.locator("#samples tbody tr >> nth=0").get_attribute("data-number")
            began = time.monotonic()
            page.select_option("select[aria-label=order]", "worst k3")
            page.wait_for_selector(f"#samples tbody tr:first-child:not([data-number='{first}'])")
            found["samples are sorted by k3"] = time.monotonic() - began
            browser.close()
    finally:
        process.terminate()
        process.wait(20)
    return found


if __name__ == "__main__":
    main()
