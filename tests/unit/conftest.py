"""How often a property is tried. The examples differ from run to run, so that more are seen over time."""

from hypothesis import settings

settings.register_profile("unit", max_examples=30, deadline=None)
settings.load_profile("unit")
