"""Metric families of one model, from an engine's counts. Knows neither what they mean nor who asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from paceline.server.monotonic import Monotonic

Values = Iterable[tuple[tuple[str, ...], float]]  # labels' values, in their order, and the number


class Families:
    """Makes families; counters go on over all lives of an engine.

    Args:
        model: the label `model_name`, which every family has.
        prefix: of every name.
    """

    def __init__(self, model: str, prefix: str) -> None:
        self._model, self._prefix = model, prefix
        self._sums: defaultdict[tuple[str, ...], Monotonic] = defaultdict(Monotonic)

    def counter(self, name: str, help: str, value: float) -> Metric:
        """A counter of the engine's life, without further labels."""
        return self.counters(name, help, (), [((), value)])

    def counters(self, name: str, help: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Counters of the engine's life, told apart by labels."""
        family = CounterMetricFamily(self._prefix + name, help, labels=("model_name", *labels))
        for of, value in values:
            family.add_metric((self._model, *of), self._sums[(name, *of)].update(value))
        return family

    def gauge(self, name: str, help: str, value: float) -> Metric:
        """A number of this moment."""
        return self.gauges(name, help, (), [((), value)])

    def gauges(self, name: str, help: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Numbers of this moment, told apart by labels."""
        family = GaugeMetricFamily(self._prefix + name, help, labels=("model_name", *labels))
        for of, value in values:
            family.add_metric((self._model, *of), value)
        return family
