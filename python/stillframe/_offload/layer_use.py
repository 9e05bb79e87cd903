"""Records the forwards of layers whose weights leave the device, and predicts the next layer.

`LayerUse` records one forward. It tells backward where to find the weights again, and whether they
have changed since. `LayerOrder` predicts the order of the layers, so that the next layer can be
prefetched. A wrong prediction costs a copy.

The prediction is that forward uses the layers in the order given, and that a backward uses them in
the order of the last backward. That order is simple without activation checkpointing: the layers of
forward that required gradients, in reverse. Checkpointing runs parts of forward again inside
backward, and reentrant checkpointing does so for layers that autograd has not seen before. But
every training step does the same work, so the last backward predicts the next.
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
        enter: Brings the layer to the device when backward reaches it, and returns its group there.
        layer: The layer.
        before: The layer that was used before this one.
    """

    def __init__(
        self, enter: Callable[[LayerUse], Group], layer: Layer, before: Layer | None
    ) -> None:
        self.enter = enter
        self.layer = layer
        self.before = before
        self.task = graph.NO_TASK  # the last backward that went through this use
        self.node: Callable[[], Any] = lambda: None  # returns the node that backward runs for it
        self.tensors = layer.tensors  # as they are now: the layer's list may be replaced later
        self.group: Group | None = None  # the tensors on the device, while the forward runs
        self.left: list[int] = []  # versions of the tensors on the device at the end of the forward
        self.versions: list[int] = []  # versions of the tensors on the CPU at the same time
        self.values: Sequence[Tensor] = ()  # the tensors that replace the layer's in the module
        self.former: Former = []  # the tensors that were replaced
        self.hooks: SavedHooks | None = None

    def end(self, group: Group) -> None:
        """Record the versions of the tensors at the end of the forward."""
        self.group, self.left = None, group.now()
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def version(self, number: int) -> int:
        """Return the version of a tensor on the device, now or at the end of the forward."""
        return (self.left if self.group is None else self.group.now())[number]

    def check(self, number: int, version: int) -> None:
        """Raise autograd's error if a tensor was written to: on the device after autograd saved it,
        when it had this version, or on the CPU since the forward."""
        if not self.versions:
            return
        tensor, then = self.tensors[number], self.versions[number]
        for now, expected in ((self.left[number], version), (version_of(tensor), then)):
            if now != expected:
                check_version(tensor, expected, self.layer.name_of(number), now)

    def weight(self, number: int) -> Tensor:
        """Return a tensor of the layer on the device, for backward."""
        group, tensor = self.enter(self), self.tensors[number]
        if self.layer.tensors[number] is tensor:
            return group.tensors[number]
        # The layer has another tensor at this index by now, so the old one is copied by itself.
        return self.layer.lowered(number, tensor).to(group.tensors[0].device, copy=True)

    def put(self, values: Sequence[Tensor]) -> None:
        """Replace the layer's tensors in its modules by these."""
        self.values, self.former = values, self.layer.swap(values)

    def take_back(self) -> Former:
        """Undo `put`; return as `Layer.swap_back`."""
        moved = self.layer.swap_back(self.former, self.values)
        self.values, self.former = (), []
        return moved


class LayerOrder:
    """Follows the order in which a training uses its layers."""

    def __init__(self, order: list[Layer]) -> None:
        self._order = order
        self._position = 0  # the index of the layer that forward used last
        self._known: list[Layer] = []  # the layers of the last backward, in its order
        self._seen: list[Layer] = []  # the layers of the current backward so far
        self._is_known = True  # _seen is the beginning of _known
        self._next: Layer | None = None  # the current prediction for backward

    def is_last(self, layer: Layer) -> bool:
        return layer is self._order[-1]

    def forward(self, layer: Layer) -> bool:
        """Record that forward has reached a layer. Return whether a new run through the layers
        begins with it."""
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
        """Record that backward has reached a layer, or that checkpointing runs it again. Return the
        layer that is predicted to be next.

        Args:
            otherwise: The prediction if this backward has left the order of the last backward.
        """
        if self._seen[-1:] != [layer]:
            position = len(self._seen)
            self._seen.append(layer)
            self._is_known = self._is_known and self._known[position : position + 1] == [layer]
            following = self._known[position + 1 : position + 2] if self._is_known else [otherwise]
            self._next = next(iter(following), None)
        return self._next

    def end_backward(self, succeeded: bool) -> None:
        """Record the end of a backward; a failed one predicts nothing."""
        if succeeded:
            self._known = self._seen
        self._seen, self._is_known = [], True
