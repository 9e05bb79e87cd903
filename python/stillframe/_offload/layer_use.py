"""Records the forwards of layers whose weights leave the device, and predicts the next layer.

`LayerUse` records one forward. It tells backward where to find the weights again, and whether they
have changed since. `LayerOrder` predicts the order of the layers, so that the next one can be
prefetched.

Forward uses the layers in the order given; a backward uses them as the last backward did. A wrong
prediction costs a copy. Without checkpointing, backward visits the layers that had gradients in
forward, in reverse. A checkpoint changes that order: it runs a part of forward again, and a
reentrant one has shown none of its layers to autograd before. But every training step does the
same work, so the order of the last backward predicts the next.
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
        self.left: list[int] = []  # versions of the tensors on the device at the end of the forward
        self.versions: list[int] = []  # versions on the CPU at the same time
        self.values: Sequence[Tensor] = ()  # what replaces the layer's tensors in the module
        self.former: Former = []  # the tensors that were replaced
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
        # The layer has another tensor at this index by now, so the old one is copied by itself.
        return self.layer.lowered(number, tensor).to(group.tensors[0].device, copy=True)

    def put(self, values: Sequence[Tensor]) -> None:
        self.values, self.former = values, self.layer.swap(values)

    def take_back(self) -> Former:
        moved = self.layer.swap_back(self.former, self.values)
        self.values, self.former = (), []
        return moved


class LayerOrder:
    """Follows the order in which a training uses its layers."""

    def __init__(self, order: list[Layer]) -> None:
        self._order = order
        self._position = 0  # index of the layer that a forward used last
        self._known: list[Layer] = []  # layers of the last backward, in its order
        self._seen: list[Layer] = []  # layers of the current backward so far
        self._is_known = True  # _seen is a prefix of _known
        self._next: Layer | None = None

    def is_last(self, layer: Layer) -> bool:
        return layer is self._order[-1]

    def forward(self, layer: Layer) -> bool:
        """Record that forward has reached a layer; return whether a new pass begins with it."""
        order, before = self._order, self._position
        for step in range(1, len(order) + 1):
            position = (before + step) % len(order)
            if order[position] is layer:
                self._position = position
                break
        return self._position <= before

    def follower(self) -> Layer | None:
        """Return the layer that forward reaches next."""
        return next(iter(self._order[self._position + 1 :]), None)

    def preceder(self, layer: Layer) -> Layer | None:
        """Return the layer before the last occurrence of a layer in the order."""
        position = max(i for i, each in enumerate(self._order) if each is layer)
        return self._order[position - 1] if position else None

    def backward(self, layer: Layer, otherwise: Layer | None) -> Layer | None:
        """Record that backward has reached a layer, or that a checkpoint runs it again.

        Returns the layer that is predicted to be next.

        Args:
            otherwise: The prediction if this backward has left the order of the last one.
        """
        if self._seen[-1:] != [layer]:
            position = len(self._seen)
            self._seen.append(layer)
            self._is_known = self._is_known and self._known[position : position + 1] == [layer]
            following = self._known[position + 1 : position + 2] if self._is_known else [otherwise]
            self._next = next(iter(following), None)
        return self._next

    def end_backward(self, succeeded: bool) -> None:
        if succeeded:
            self._known = self._seen
        self._seen, self._is_known = [], True
