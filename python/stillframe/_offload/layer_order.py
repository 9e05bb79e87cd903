"""Predicts the layer order, so that the next layer can be prefetched.

Forward uses the layers in the order given; a backward uses them as the last backward did. A wrong
prediction costs a copy. Without checkpointing, backward visits the layers that had gradients in
forward, in reverse. A checkpoint changes that order: it runs a part of forward again, and a
reentrant one has shown none of its layers to autograd before. But every training step does the
same work, so the order of the last backward predicts the next.
"""

from __future__ import annotations

from stillframe._offload.layer import Layer


class LayerOrder:
    """Follows a training through the order of its layers."""

    def __init__(self, order: list[Layer]) -> None:
        self._order = order
        self._place = 0  # index of the layer that a forward used last
        self._known: list[Layer] = []  # layers of the last backward, in its order
        self._seen: list[Layer] = []  # layers of the current backward so far
        self._is_known = True  # _seen is a prefix of _known
        self._next: Layer | None = None

    def is_last(self, layer: Layer) -> bool:
        return layer is self._order[-1]

    def forward(self, layer: Layer) -> bool:
        """Record that forward has reached a layer; return whether a new pass begins with it."""
        order, before = self._order, self._place
        for step in range(1, len(order) + 1):
            place = (before + step) % len(order)
            if order[place] is layer:
                self._place = place
                break
        return self._place <= before

    def follower(self) -> Layer | None:
        """Return the layer that forward reaches next."""
        return next(iter(self._order[self._place + 1 :]), None)

    def preceder(self, layer: Layer) -> Layer | None:
        """Return the layer before the last occurrence of a layer in the order."""
        place = max(i for i, each in enumerate(self._order) if each is layer)
        return self._order[place - 1] if place else None

    def backward(self, layer: Layer, otherwise: Layer | None) -> Layer | None:
        """Record that backward has reached a layer, or that a checkpoint runs it again.

        Returns the layer that is predicted to be next.

        Args:
            otherwise: The prediction if this backward has left the order of the last one.
        """
        if self._seen[-1:] != [layer]:
            place = len(self._seen)
            self._seen.append(layer)
            self._is_known = self._is_known and self._known[place : place + 1] == [layer]
            following = self._known[place + 1 : place + 2] if self._is_known else [otherwise]
            self._next = next(iter(following), None)
        return self._next

    def end_backward(self, succeeded: bool) -> None:
        if succeeded:
            self._known = self._seen
        self._seen, self._is_known = [], True
