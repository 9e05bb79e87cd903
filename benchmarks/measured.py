"""The settings and figures of a run of vs_peers.py."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

from common import Series


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run of vs_peers.py, most of them from its command line.

    state, many, large, transformer, loop_state, growth_state: bytes of the states that scenarios.py
    describes. rounds: warm saves of each scenario. pairs: rounds of a training loop, each with
    steps with a save and steps without. loop_steps, loop_batch: the number of these steps, and the
    rows of a batch. Names with "_large" are those of the main state's loop.
    """

    state: int
    many: int
    large: int
    transformer: int
    loop_state: int
    rounds: int
    pairs: int
    pairs_large: int
    threads: int
    growth_saves: int
    loop_steps: int = 12
    loop_batch: int = 128
    loop_steps_large: int = 4
    loop_batch_large: int = 64
    loop_batch_transformer: int = 8
    growth_state: int = 16_000_000


class Figures:
    """The figures of a run: a value of each round, by scenario, way to save and metric."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        self._from_json: dict[tuple[str, str, str], Series] = {}  # of `add_statistics`

    def add(self, scenario: str, way: str, figures: dict[str, float]) -> None:
        """Add one value of each metric; a value of nan is left out."""
        for metric, value in figures.items():
            if not math.isnan(value):
                self._values[scenario, way, metric].append(value)

    def add_statistics(self, scenario: str, way: str, metric: str, series: Series) -> None:
        """Add a metric whose statistics an earlier run has saved; its values are not known."""
        self._from_json[scenario, way, metric] = series

    def series(self, scenario: str, way: str, metric: str) -> Series | None:
        """Return the statistics of a metric, or None if it was not measured."""
        key = scenario, way, metric
        if key in self._values:
            return Series.of(self._values[key])
        return self._from_json.get(key)

    def median(self, scenario: str, way: str, metric: str) -> float | None:
        series = self.series(scenario, way, metric)
        return None if series is None else series.median

    def everywhere(self, metric: str) -> list[float]:
        """Return every value of one metric, of all scenarios and ways to save."""
        found: list[float] = []
        for (_, _, name), values in self._values.items():
            if name == metric:
                found += values
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the statistics of all values of `add`, by scenario, way and metric."""
        tree: dict[str, Any] = {}
        for (scenario, way, metric), values in self._values.items():
            metrics = tree.setdefault(scenario, {}).setdefault(way, {})
            metrics[metric] = Series.of(values).to_json()
        return tree
