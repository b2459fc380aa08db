"""How often a property is tried, however slow the machine. The examples are the same in each run, so that only what has
changed makes one fail; `make long` tries others.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit", max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("unit"), max_examples=200, derandomize=False)
settings.load_profile(os.environ.get("PROPERTIES", "unit"))
