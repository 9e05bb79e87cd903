"""Records one forward of a layer whose weights leave the device when it ends.

The record tells backward where to find the weights again, and whether they have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stillframe._offload import graph
from stillframe._offload.layer import Former, Layer, version_of
from stillframe._offload.residents import Group
from stillframe._offload.saved import SavedHooks, check_version


class LayerUse:
    """One forward of a layer, kept for as long as its backward may run.

    Args:
        enter: Brings the layer to the device when backward reaches it.
        before: The layer that was used before this one.
    """

    def __init__(
        self, enter: Callable[[LayerUse], Group], layer: Layer, before: Layer | None
    ) -> None:
        self.enter = enter
        self.layer = layer
        self.before = before
        self.task = graph.NO_TASK  # the last backward that went through it
        self.node: Callable[[], Any] = lambda: None  # the autograd node that backward runs for it
        self.tensors = layer.tensors  # the layer's list may be replaced later
        self.group: Group | None = None  # while the forward runs
        self.left: list[int] = []  # versions on the device at the end of the forward
        self.versions: list[int] = []  # versions on the CPU at the same time
        self.values: Sequence[Tensor] = ()  # what replaces the layer's tensors in the module
        self.former: Former = []  # what it replaced
        self.hooks: SavedHooks | None = None

    def end(self, group: Group) -> None:
        self.group, self.left = None, group.now()
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def version(self, number: int) -> int:
        return (self.left if self.group is None else self.group.now())[number]

    def check(self, number: int, version: int) -> None:
        if not self.versions:
            return
        tensor, then = self.tensors[number], self.versions[number]
        for now, expected in ((self.left[number], version), (version_of(tensor), then)):
            if now != expected:
                check_version(tensor, expected, self.layer.name_of(number), now)

    def weight(self, number: int) -> Tensor:
        group, tensor = self.enter(self), self.tensors[number]
        if self.layer.tensors[number] is tensor:
            return group.tensors[number]
        # The layer has another tensor there by now, so this one is copied alone.
        return self.layer.lowered(number, tensor).to(group.tensors[0].device, copy=True)

    def put(self, values: Sequence[Tensor]) -> None:
        self.values, self.former = values, self.layer.swap(values)

    def take_back(self) -> Former:
        moved = self.layer.swap_back(self.former, self.values)
        self.values, self.former = (), []
        return moved
