"""The scenarios of vs_peers.py: states, and the main thread's work during their saves."""

from __future__ import annotations

import dataclasses

from common import TENSOR_BYTES, Spec, format_size
from measured import Settings
from peers import OURS

LEAST_POOL_BYTES = 16 << 20  # a pool has at least one block, by default of this size
FEW_TENSORS = 24
MANY_TENSORS = 20_000
LAYERS = 6  # in the transformer


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A state and what goes on during its saves: one block of rows in the table.

    state: a name for `spec_of`; scenarios of one state share its processes. kind: the name of the
    method of `Session` that measures it. busy: the main thread computes during a save instead of
    sleeping. only_ours: peers are left out. computing: the number of further Python threads that
    compute during a save.
    """

    name: str
    state: str
    kind: str
    title: str
    busy: bool = False
    only_ours: bool = False
    computing: int = 0

    @property
    def cold_name(self) -> str:
        """Return the name under which the first round is kept: the medians do not include it."""
        return f"{self.name}_cold" if self.kind == "save" else f"{self.name}_first"


SCENARIOS = (
    Scenario("busy", "main", "save", "main thread busy in Python", busy=True),
    Scenario("idle", "main", "save", "main thread idle"),
    Scenario("beside", "main", "save", "one Python thread computes", computing=1),
    Scenario("beside_two", "main", "save", "two Python threads compute", computing=2),
    Scenario("watch", "main", "watch", "bytes over time, main thread idle"),
    Scenario("gate", "main", "gate", "the step after the call", only_ours=True),
    Scenario("loop_large", "main", "loop", "training loop"),
    Scenario("many_busy", "many", "save", "main thread busy in Python", busy=True),
    Scenario("many_idle", "many", "save", "main thread idle"),
    Scenario("large_busy", "large", "save", "main thread busy in Python", busy=True),
    Scenario("large_idle", "large", "save", "main thread idle"),
    Scenario("lightning_busy", "lightning", "save", "main thread busy in Python", busy=True),
    Scenario("lightning_idle", "lightning", "save", "main thread idle"),
    Scenario("lightning_loop", "lightning", "loop", "training loop"),
    Scenario("unowned", "unowned", "save", "main thread idle"),
    Scenario("loop", "loop", "loop", "training loop"),
    Scenario("small_pool", "small_pool", "save", "main thread idle", only_ours=True),
    Scenario("small_pool_loop", "small_pool", "loop", "training loop", only_ours=True),
    Scenario("large_small_pool", "large_small_pool", "save", "main thread idle", only_ours=True),
    Scenario("growth", "growth", "growth", "saves one after another", only_ours=True),
)
# These states are so large that only one process at a time holds one.
ONE_AFTER_ANOTHER = ("large", "large_small_pool")


def spec_of(state: str, s: Settings) -> Spec:
    """Return the description of the state with the name `Scenario.state`."""

    def mlp_spec(nbytes: int, pool_bytes: int = 0) -> Spec:
        nr_params = max(1, round(nbytes / (3 * TENSOR_BYTES)))
        return Spec(nbytes, "mlp", nr_params, s.threads, pool_bytes)

    def small_pool(nbytes: int) -> int:
        return max(nbytes // 8, LEAST_POOL_BYTES)

    # With fewer bytes than the default 64 MB there are fewer tensors, not smaller ones.
    nr_many = max(1, round(MANY_TENSORS / 3 * s.many / 64e6))  # each has two moments
    return {
        "main": mlp_spec(s.state),
        "many": Spec(s.many, "mlp", nr_many, s.threads),
        "large": Spec(s.large, "few", FEW_TENSORS, s.threads),
        "lightning": Spec(s.transformer, "lightning", LAYERS, s.threads),
        "unowned": Spec(s.state, "plain", 3 * mlp_spec(s.state).nr_params, s.threads),
        "loop": mlp_spec(s.loop_state),
        "small_pool": mlp_spec(s.state, small_pool(s.state)),
        "large_small_pool": Spec(s.large, "few", FEW_TENSORS, s.threads, small_pool(s.large)),
        "growth": mlp_spec(s.growth_state),
    }[state]


def title_of(scenario: Scenario, s: Settings) -> str:
    """Return the heading of a scenario's rows: the state, and what goes on during its saves."""
    spec = spec_of(scenario.state, s)
    size = format_size(spec.nbytes)
    states = {
        "mlp": f"{size} in {3 * spec.nr_params} tensors",
        "few": f"{size} in {spec.nr_params} tensors, the largest {format_size(0.55 * spec.nbytes)}",
        "plain": f"{size} in {spec.nr_params} tensors that no optimizer owns",
        "lightning": f"a transformer's whole Lightning checkpoint, about {size}",
    }
    pool = f", pool of {format_size(spec.pool_bytes)}" if spec.pool_bytes else ""
    on = f" on {s.threads} threads" if scenario.kind == "loop" else ""
    return f"{scenario.name}: {states[spec.kind]}{pool}; {scenario.title}{on}"


def peers_of(scenario: Scenario, peers: list[str]) -> list[str]:
    """Return the ways among `peers` that take part in a scenario."""
    return [peer for peer in peers if peer == OURS or not scenario.only_ours]
