"""Records the forwards of layers whose weights leave the device, and predicts the next layer.

`LayerUse` records one forward, so that backward finds the weights again and learns whether they
have changed.

`LayerOrderPredictor` predicts the next layer, so that it can be prefetched: forward uses the layers
in the order given, and a backward in the order of the last backward. Activation checkpointing makes
that another order than the reverse of forward. A wrong prediction costs a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stillframe._offload import graph
from stillframe._offload.layer import Layer, Replaced, version_with_pending_writes
from stillframe._offload.residents import Group
from stillframe._offload.saved import SavedTensorHooks, check_version


class LayerUse:
    """One forward of a layer, kept for as long as its backward may run.

    Args:
        enter: Brings the layer to the device when backward reaches it, and returns its group there.
        previous: The layer that was used before `layer`. Backward probably reaches it next.
    """

    def __init__(
        self, enter: Callable[[LayerUse], Group], layer: Layer, previous: Layer | None
    ) -> None:
        self.enter = enter
        self.layer = layer
        self.previous = previous
        self.task = graph.NO_TASK  # the last backward that went through this use
        self.node: Callable[[], Any] = lambda: None  # returns the autograd node of the forward
        self.tensors = layer.tensors  # kept here, because `layer.tensors` may be another list later
        self.group: Group | None = None  # the tensors on the device, while the forward runs
        # The versions of the tensors at the end of the forward; empty before it.
        self.device_versions: list[int] = []
        self.cpu_versions: list[int] = []
        # The device tensors that are in the modules now, and the tensors that they replace.
        self.values: Sequence[Tensor] = ()
        self.replaced: Replaced = []
        self.hooks: SavedTensorHooks | None = None  # in force while the forward runs

    def end(self, group: Group) -> None:
        """Record the versions at the end of the forward. `group`: the tensors on the device."""
        self.group = None
        self.device_versions = group.current_versions()
        self.cpu_versions = [version_with_pending_writes(tensor) for tensor in self.tensors]

    def version(self, index: int) -> int:
        """Return the version of a tensor on the device: now if the forward still runs, else at its
        end."""
        versions = self.device_versions if self.group is None else self.group.current_versions()
        return versions[index]

    def check(self, index: int, version: int) -> None:
        """Raise autograd's error in two cases:
        - the forward wrote to a tensor after autograd had saved it, with `version`
        - other code wrote to the tensor on the CPU after the forward
        """
        if not self.cpu_versions:
            return  # the forward has not ended
        tensor = self.tensors[index]
        on_device, on_cpu = self.device_versions[index], version_with_pending_writes(tensor)
        if on_device != version:
            check_version(tensor, version, self.layer.name_of(index), on_device)
        if on_cpu != self.cpu_versions[index]:
            check_version(tensor, self.cpu_versions[index], self.layer.name_of(index), on_cpu)

    def weight(self, index: int) -> Tensor:
        """Bring the layer to the device for backward, and return the tensor with this index."""
        group, tensor = self.enter(self), self.tensors[index]
        if self.layer.tensors[index] is tensor:
            return group.tensors[index]
        # Other code has replaced the layer's tensor since the forward. Copy the old tensor.
        return self.layer.convert_for_device(index, tensor).to(group.tensors[0].device, copy=True)

    def swap_in(self, values: Sequence[Tensor]) -> None:
        """Replace the layer's tensors in the modules by `values`, tensors on the device."""
        self.values, self.replaced = values, self.layer.swap(values)

    def swap_out(self) -> Replaced:
        """Undo `swap_in`. For the result see `Layer.swap_back`."""
        changed = self.layer.swap_back(self.replaced, self.values)
        self.values, self.replaced = (), []
        return changed


class LayerOrderPredictor:
    """Follows the order in which training uses the layers, and predicts the next layer.

    Args:
        order: The layers in the order of forward. A layer may occur more than once.
    """

    def __init__(self, order: list[Layer]) -> None:
        self._order = order
        self._position = 0  # the index of the layer that forward used last
        self._last_backward: list[Layer] = []  # the layers that it reached, in order
        self._this_backward: list[Layer] = []  # the layers that it has reached so far
        self._repeats_last = True  # so far this backward has the order of the last backward
        self._next: Layer | None = None  # the predicted next layer of backward

    def is_last(self, layer: Layer) -> bool:
        return layer is self._order[-1]

    def forward(self, layer: Layer) -> bool:
        """Record that forward has reached a layer. Return whether a new run through the layers
        begins."""
        order, last_position = self._order, self._position
        # Search after the last position, then from the beginning.
        for step in range(1, len(order) + 1):
            position = (last_position + step) % len(order)
            if order[position] is layer:
                self._position = position
                break
        return self._position <= last_position  # forward went back

    def next_in_forward(self) -> Layer | None:
        """Return the predicted next layer of forward; None after the last."""
        position = self._position + 1
        return self._order[position] if position < len(self._order) else None

    def previous(self, layer: Layer) -> Layer | None:
        """Return the layer before the last position of `layer`, if there is any."""
        position = max(i for i, each in enumerate(self._order) if each is layer)
        return self._order[position - 1] if position > 0 else None

    def backward(self, layer: Layer, fallback: Layer | None) -> Layer | None:
        """Record that backward has reached a layer, or that checkpointing runs it again. Return the
        predicted next layer.

        Args:
            fallback: The prediction if this backward differs from the last backward.
        """
        if self._this_backward and self._this_backward[-1] is layer:
            return self._next  # recorded already
        last, position = self._last_backward, len(self._this_backward)
        self._this_backward.append(layer)
        if position >= len(last) or last[position] is not layer:
            self._repeats_last = False
        if not self._repeats_last:
            self._next = fallback
        elif position + 1 < len(last):
            self._next = last[position + 1]
        else:
            self._next = None  # the last backward ended with this layer
        return self._next

    def record_backward_end(self, succeeded: bool) -> None:
        """Record the end of a backward. The order of a failed backward is forgotten."""
        if succeeded:
            self._last_backward = self._this_backward
        self._this_backward = []
        self._repeats_last = True  # the next backward, until it differs
