"""What Prometheus gets from a run that goes on: through Ray's page, with the run's token, as monitoring/prometheus.yml
says.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


def scraped(said: str) -> dict[str, float]:
    """Value of each sample of all targets, by its name; of samples that differ in labels alone, one.

    Args:
        said: What the run's terminal shows.
    """
    ((page, token),) = re.findall(r"Ray dashboard: (http://\S+) asks for the token in (\S+)", said)
    request = urllib.request.Request(
        f"{page}/api/prometheus/sd", headers={"Authorization": f"Bearer {Path(token).read_text()}"}
    )
    found: dict[str, float] = {}
    for group in json.loads(_read(request)):
        for target in group["targets"]:
            for family in text_string_to_metric_families(_read(f"http://{target}/metrics")):
                found |= {sample.name: sample.value for sample in family.samples}
    return found


def _read(request: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()
