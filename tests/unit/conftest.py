"""How often a property is tried, however slow the machine. The examples differ from run to run, so that more are seen
over time.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("unit", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
