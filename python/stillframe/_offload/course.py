"""In which order layers are used: forward as they were given, backward as the last one went.

What comes ahead of need is a guess, and a wrong one costs a copy. Backward goes back through the
layers that had gradients in forward. A checkpoint makes it another way: a part of forward runs
again, in its own order, and a reentrant one has told nothing of its layers before. But a training
does the same at every step, so the way of the last backward is that of the next.
"""

from __future__ import annotations

from stillframe._offload.layer import Layer


class Course:
    """Where in the order of the layers a training is."""

    def __init__(self, order: list[Layer]) -> None:
        self._order = order
        self._place = 0  # of the layer used last in a forward
        self._known: list[Layer] = []  # where the last backward came, and
        self._seen: list[Layer] = []  # this one so far
        self._is_known = True  # up to here it went the same way
        self._next: Layer | None = None

    def is_last(self, layer: Layer) -> bool:
        return layer is self._order[-1]

    def forward(self, layer: Layer) -> bool:
        """Notes that forward has come to a layer. Returns whether another pass begins with it."""
        order, before = self._order, self._place
        for step in range(1, len(order) + 1):
            place = (before + step) % len(order)
            if order[place] is layer:
                self._place = place
                break
        return self._place <= before

    def follower(self) -> Layer | None:
        """The layer that forward comes to next."""
        return next(iter(self._order[self._place + 1 :]), None)

    def preceder(self, layer: Layer) -> Layer | None:
        """The layer that stands before another one, where that stands last."""
        place = max(i for i, each in enumerate(self._order) if each is layer)
        return self._order[place - 1] if place else None

    def backward(self, layer: Layer, otherwise: Layer | None) -> Layer | None:
        """Notes that backward has come to a layer, or that a checkpoint runs it again. Returns the
        one that it comes to next.

        Args:
            otherwise: That one, where this backward goes another way than the last one.
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
