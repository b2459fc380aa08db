"""The newest row of metrics as Ray's gauges, which Prometheus reads.

Owns: their names. Does not own: what is in a row (step_rows).
"""

from collections.abc import Mapping

from slipstream.conf.json_files import JsonObject


class RayGauges:
    """The newest row as Ray gauges. Does nothing when this process is not part of a Ray cluster.

    Args:
        meanings: what each metric means, by name.
    """

    def __init__(self, meanings: Mapping[str, str]) -> None:
        self._meanings = meanings
        self._gauges: JsonObject = {}

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        try:
            import ray
            from ray.util.metrics import Gauge
        except ImportError:
            return
        if not ray.is_initialized():
            return
        for name, value in numbers.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge("slipstream_" + name.replace("/", "_"), description=self._meanings[name])
            self._gauges[name].set(float(value))

    def close(self) -> None:
        """Nothing to do: Ray forgets gauges with their process."""
