"""Records the forwards of layers whose weights leave the device, and predicts the next layer.

`LayerUse` records one forward. Through it, backward finds the weights again, and learns whether
they have changed since. `LayerOrder` predicts the order of the layers, so that the next layer can
be prefetched. A wrong prediction costs a copy.

The prediction is that forward uses the layers in the order given, and that a backward uses them in
the order of the last backward. Without activation checkpointing, that is the reverse order of the
layers that required gradients. Checkpointing repeats parts of forward inside backward, and
reentrant checkpointing repeats even layers that autograd has not seen before. But all training
steps use the layers in the same order, so the last backward predicts the next.
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
        before: The layer that was used before this one; backward probably reaches it next.
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
        # The versions of the tensors at the end of the forward.
        self.device_versions: list[int] = []
        self.cpu_versions: list[int] = []
        self.values: Sequence[Tensor] = ()  # the tensors that replace the layer's in the module
        self.former: Former = []  # the tensors that were replaced
        self.hooks: SavedHooks | None = None  # in force while the forward runs

    def end(self, group: Group) -> None:
        """Record the versions of the tensors (`group` on the device) at the end of the forward."""
        self.group, self.device_versions = None, group.now()
        self.cpu_versions = [version_of(tensor) for tensor in self.tensors]

    def version(self, number: int) -> int:
        """Return the version of a tensor on the device: the present one, or the one at the end of
        the forward if that has ended."""
        return (self.device_versions if self.group is None else self.group.now())[number]

    def check(self, number: int, version: int) -> None:
        """Raise autograd's error if the forward wrote to a tensor after autograd had saved it.
        Raise it too if other code wrote to the CPU's tensor after the forward.

        Args:
            number: The tensor's index in the layer.
            version: Its version on the device when autograd saved it.
        """
        if not self.cpu_versions:
            return  # the forward has not ended
        tensor, then = self.tensors[number], self.cpu_versions[number]
        for now, expected in ((self.device_versions[number], version), (version_of(tensor), then)):
            if now != expected:
                check_version(tensor, expected, self.layer.name_of(number), now)

    def weight(self, number: int) -> Tensor:
        """Bring the layer to the device for backward, and return its tensor with this index."""
        group, tensor = self.enter(self), self.tensors[number]
        if self.layer.tensors[number] is tensor:
            return group.tensors[number]
        # Other code has replaced the layer's tensor since the forward. Copy the old one by itself.
        return self.layer.lowered(number, tensor).to(group.tensors[0].device, copy=True)

    def put(self, values: Sequence[Tensor]) -> None:
        """Replace the layer's tensors in its modules by `values`."""
        self.values, self.former = values, self.layer.swap(values)

    def take_back(self) -> Former:
        """Undo `put`. Return what `Layer.swap_back` returns."""
        moved = self.layer.swap_back(self.former, self.values)
        self.values, self.former = (), []
        return moved


class LayerOrder:
    """Follows the order in which a training uses its layers, and predicts the next layer.

    Args:
        order: The layers in the order of forward; a layer may occur more than once.
    """

    def __init__(self, order: list[Layer]) -> None:
        self._order = order
        self._position = 0  # the index of the layer that forward used last
        self._known: list[Layer] = []  # the layers of the last backward, in its order
        self._seen: list[Layer] = []  # the layers of the current backward so far
        self._is_known = True  # `_known` begins with `_seen`
        self._next: Layer | None = None  # the layer that backward is predicted to reach next

    def is_last(self, layer: Layer) -> bool:
        return layer is self._order[-1]

    def forward(self, layer: Layer) -> bool:
        """Record that forward has reached a layer. Return whether a new run through the layers
        begins with it."""
        order, before = self._order, self._position
        # Search after the last position, and after the end from the beginning.
        for step in range(1, len(order) + 1):
            position = (before + step) % len(order)
            if order[position] is layer:
                self._position = position
                break
        return self._position <= before

    def follower(self) -> Layer | None:
        """Return the layer that forward is predicted to reach next; None after the last."""
        position = self._position + 1
        return self._order[position] if position < len(self._order) else None

    def preceder(self, layer: Layer) -> Layer | None:
        """Return the layer before a layer's last position in the order, if there is one."""
        position = max(i for i, each in enumerate(self._order) if each is layer)
        return self._order[position - 1] if position else None

    def backward(self, layer: Layer, otherwise: Layer | None) -> Layer | None:
        """Record that backward has reached a layer, or that checkpointing runs it again. Return the
        layer that is predicted to be next.

        Args:
            otherwise: The prediction if this backward has left the order of the last backward.
        """
        if self._seen[-1:] != [layer]:  # calls for one layer in a row count once
            known, position = self._known, len(self._seen)
            self._seen.append(layer)
            is_as_before = position < len(known) and known[position] is layer
            self._is_known = self._is_known and is_as_before
            if not self._is_known:
                self._next = otherwise
            elif position + 1 < len(known):
                self._next = known[position + 1]
            else:
                self._next = None
        return self._next

    def end_backward(self, succeeded: bool) -> None:
        """Record the end of a backward; a failed one predicts nothing."""
        if succeeded:
            self._known = self._seen
        self._seen, self._is_known = [], True
