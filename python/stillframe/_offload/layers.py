"""`offload_layers`: layers that live on the CPU and compute on a device, one after the other.

    forward    l comes in (it was prefetched)   computes, while l+1 comes in     goes
    backward   l comes in (it was prefetched)   computes, while l-1 comes in and the gradients of
               l+1 leave                                                         goes

What a layer's forward saves of its weights is where to find them (`saved`), so between forward and
backward the device holds none. Backward comes to a layer when the node that made one of its outputs
is about to run, or when something asks for one of its weights; until it has come to another, the
module has its weights on the device, since a checkpoint inside the layer may run parts of its
forward again.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from stillframe._offload import given, graph
from stillframe._offload.every import every
from stillframe._offload.gradients import Gradient, Gradients
from stillframe._offload.layer import Former, Hook, Layer, Stay
from stillframe._offload.offloader import Offloader
from stillframe._offload.residents import Group, Residents
from stillframe._offload.saved import Onloading, SavedHooks, check_version, weights
from stillframe._save import gate
from stillframe._save.engine import Engine
from stillframe.errors import StillframeError

_owners: weakref.WeakSet[OffloadedLayers] = weakref.WeakSet()


class _Use:
    """One forward of a layer, for as long as its backward may come."""

    def __init__(self, owner: OffloadedLayers, layer: Layer, before: Layer | None) -> None:
        self.owner = owner
        self.layer = layer
        self.before = before  # the layer that was used before this one
        self.task = graph.NO_TASK  # the backward that has come through it last
        self.node: Callable[[], Any] = lambda: None  # where it does so
        self.versions: list[int] = []
        self.values: Sequence[Tensor] = ()  # in the places of the layer's tensors, and
        self.former: Former = []  # what stands there otherwise
        self.hooks: SavedHooks | None = None

    def weight(self, index: int) -> Tensor:
        name = self.layer.name_of(index)
        if self.versions:
            check_version(self.layer.tensors[index], self.versions[index], name)
        return self.owner._enter(self).tensors[index]

    def put(self, values: Sequence[Tensor]) -> None:
        self.values, self.former = values, self.layer.swap(values)

    def take_back(self) -> Former:
        moved = self.layer.swap_back(self.former, self.values)
        self.values, self.former = (), []
        return moved


class _Onload(torch.autograd.Function, Onloading):
    """From parameters on the CPU to what stands for them on the device, and gradients back."""

    @staticmethod
    def forward(ctx: Any, use: _Use, indices: list[int], group: list[Tensor], *_: Tensor) -> Any:
        ctx.use, ctx.indices = use, indices
        ctx.set_materialize_grads(False)
        return tuple(group[index].detach() for index in indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, None, *ctx.use.owner._gradients_out(ctx.use, ctx.indices, grads))


class OffloadedLayers:
    """Made by `offload_layers`. A context manager: leaving it calls `remove()`."""

    def __init__(
        self, layers: list[Layer], order: list[Layer], keep: int, offloader: Offloader, slots: int
    ) -> None:
        self._layers = layers
        self._order = order
        self._place = 0  # in the order: the layer used last
        self._kept = {each for each in order[len(order) - keep :] if not each.partners}
        self._offloader = offloader
        self._residents = Residents(offloader, slots)
        self._gradients = Gradients(offloader, slots)
        self._ends = graph.Ends(self._backward_ended)
        self._open: list[_Use] = []  # forwards that run
        self._current: _Use | None = None  # where backward is, and
        self._current_task = graph.NO_TASK  # which
        self._last: Layer | None = None  # used with gradients
        self._users: dict[Tensor, list[Layer]] = {}
        self._handles: list[Any] = []
        self._removed = False
        for layer in layers:
            for parameter in layer.parameters():
                self._users.setdefault(parameter, []).append(layer)
            self._watch(layer)
        _owners.add(self)
        _watch_steps()

    def __enter__(self) -> OffloadedLayers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Gives the modules back as they were, on the CPU, with what training has made of them.

        Gradients stay. May be called again.
        """
        if self._removed:
            return
        self._removed = True
        _owners.discard(self)
        steps = [self._leave, self._gradients.join_all]
        steps += [handle.remove for handle in self._handles]
        steps += [functools.partial(self._residents.give_up_others, ())]
        steps += [layer.settle for layer in self._layers]
        steps += [self._gradients.close, self._offloader.close]
        steps += [functools.partial(self._let_go, layer) for layer in self._layers]
        every(steps)

    def _let_go(self, layer: Layer) -> None:
        del layer.module._apply
        layer.to_ordinary()
        given.offloaded.difference_update(layer.module.modules())

    def wait(self) -> None:
        """Returns when nothing reads the weights on the CPU any more. A backward has waited for
        that when it ends, a whole forward without gradients too, and an optimizer's step waits
        before it begins. Call it before you write to them by hand behind any other forward."""
        self._offloader.wait_read()

    def stats(self) -> Any:
        """What went each way so far; see `Offloader.stats`."""
        return self._offloader.stats()

    def resident(self) -> list[str]:
        """The layers that are on the device, or on their way there, by their numbers."""
        return [layer.name for layer in self._layers if self._residents.has(layer)]

    def _watch(self, layer: Layer) -> None:
        module = layer.module
        self._handles += [
            module.register_forward_pre_hook(Hook(self._before, layer), prepend=True),
            module.register_forward_hook(Hook(self._after, layer), always_call=True),
        ]
        state = Hook(self._before_state, layer)
        module._apply = Stay(layer)  # type: ignore[method-assign]
        for each in module.modules():
            self._handles.append(each.register_state_dict_pre_hook(state))  # type: ignore[no-untyped-call]

    # ---- forward ----

    def _before(self, layer: Layer, module: nn.Module, args: Any) -> None:
        given.refuse_reduction(layer)
        if any(use.layer is layer for use in self._open):  # it calls itself
            self._open.append(next(use for use in self._open if use.layer is layer))
            return
        again = graph.task() != graph.NO_TASK  # a checkpoint runs it again
        if self._current is not None and not (again and self._current.layer is layer):
            self._leave()
        if not again:
            if self._begins_anew(layer):
                self._residents.end_pass()
            if self._residents.get(layer) is not None:
                self._residents.give_up(layer)  # weights of an earlier forward
        use = _Use(self, layer, self._last)
        if again:
            self._ends.join()  # of the backward around, if what runs again gets one of its own
        group = self._residents.bring(layer, anew=not again)
        self._open.append(use)
        use.put(self._on_device(use, group))
        weights.add(use, group.tensors, layer.volatile)
        use.hooks = SavedHooks()
        use.hooks.enter()
        if torch.is_grad_enabled():
            layer.uses.add(use)
        if not again:
            if torch.is_grad_enabled():
                self._last = layer
            self._residents.prefetch(self._follower(), anew=True)

    def _on_device(self, use: _Use, group: Group) -> list[Tensor]:
        """What stands in the places of a layer's tensors in a forward."""
        layer = use.layer
        values = [tensor.detach() for tensor in group.tensors]
        indices = [i for i, each in enumerate(layer.tensors) if each.requires_grad]
        if torch.is_grad_enabled() and indices:
            made = _Onload.apply(  # type: ignore[no-untyped-call]
                use, indices, group.tensors, *(layer.tensors[i] for i in indices)
            )
            use.node = weakref.ref(made[0].grad_fn)  # which refers to the use
        else:
            made = [values[i].requires_grad_() for i in indices]
        for index, value in zip(indices, made, strict=True):
            values[index] = value
        return values

    def _after(self, layer: Layer, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open or self._open[-1].layer is not layer:
            return  # its forward has not begun
        use = self._open.pop()
        if use in self._open:
            return
        if use.hooks is not None:
            use.hooks.leave()
        if output is None:  # its forward has failed, and nothing goes on from here
            self._residents.end_pass()
            self.wait()
        group = self._residents.bring(layer, anew=False)
        weights.drop(group.tensors)
        moved = use.take_back()
        self._adopt(layer, moved)
        with_gradients = torch.is_grad_enabled()
        stays = graph.task() != graph.NO_TASK or (with_gradients and layer in self._kept)
        layer.write_back(group, self._offloader, stays=stays)
        use.versions = [tensor._version for tensor in layer.tensors]
        if with_gradients:
            _tell_of_backward(use, output)
        else:
            layer.settle()
            if layer is self._order[-1]:
                self._offloader.wait_read()  # the caller may write to the weights now
        if not stays:
            self._residents.give_up(layer)

    def _adopt(self, layer: Layer, moved: Former) -> None:
        """A forward may have put other buffers in the place of its own; never other parameters."""
        for place, found in moved:
            if place.entries is place.module._parameters or not isinstance(found, Tensor):
                raise StillframeError(
                    f"{layer.name_of(place.number)} was replaced or moved in its module's forward:"
                    " a module that moves its own parameters cannot be offloaded. They are on the"
                    " CPU as they were before"
                )
            place.entries[place.name] = found.detach().to("cpu")

    def _begins_anew(self, layer: Layer) -> bool:
        """Notes where in the order forward is; whether it is another pass than before."""
        order, before = self._order, self._place
        for step in range(1, len(order) + 1):
            place = (before + step) % len(order)
            if order[place] is layer:
                self._place = place
                break
        return self._place <= before

    def _follower(self) -> Layer | None:
        """The layer that comes after the one that forward is at."""
        order = self._order
        following = order[self._place + 1 : self._place + 2]
        return following[0] if following and not following[0].partners else None

    def _before_state(self, layer: Layer, module: nn.Module, *args: Any) -> None:
        layer.settle()

    # ---- backward ----

    def _enter(self, use: _Use) -> Group:
        """Backward has come to a layer, or somebody asks for one of its weights."""
        if self._removed:
            raise StillframeError(
                f"the backward of {use.layer.name} comes after remove(): it needs its weights"
            )
        if graph.task() == graph.NO_TASK or self._current is use:
            return self._residents.bring(use.layer, anew=False)
        if torch.is_grad_enabled():
            raise StillframeError(
                "a backward with create_graph=True cannot go through offloaded layers: what it"
                " computes with is gone before it could be differentiated"
            )
        self._leave()
        task = self._ends.join()
        self._residents.give_up_others({use.layer, use.before, *self._kept})
        group = self._residents.bring(use.layer, anew=False)
        # A checkpoint inside may run its part again, and a reentrant one take gradients of that.
        with torch.enable_grad():
            use.put(self._on_device(_Use(self, use.layer, use.before), group))
        self._current = use
        self._current_task = task
        if use.before is not None and not use.before.partners:
            self._residents.prefetch(use.before, anew=False)
        return group

    def _leave(self) -> None:
        """Backward has left the layer it was at."""
        use, self._current = self._current, None
        if use is None:
            return
        use.take_back()
        group = self._residents.get(use.layer)
        if group is not None:
            use.layer.write_back(group, self._offloader, stays=False)
        self._residents.give_up(use.layer)

    def _gradients_out(
        self, use: _Use, indices: list[int], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Sends a layer's gradients to the CPU. Returns those that autograd wants to be handed."""
        use.task = self._ends.join()
        handed: list[Tensor | None] = [None] * len(grads)
        sent: list[Gradient] = []
        fetched: list[tuple[int, Gradient]] = []
        for place, (index, grad) in enumerate(zip(indices, grads, strict=True)):
            parameter = use.layer.tensors[index]
            adds = graph.accumulates(parameter)
            if grad is None or adds is False:
                continue
            if grad.layout is not torch.strided:
                handed[place] = grad.to(device="cpu", dtype=parameter.dtype)
            elif adds:
                sent.append(Gradient(parameter, grad, self._is_last(use, parameter)))
            else:
                fetched.append((place, Gradient(parameter, grad, True)))
        self._gradients.send(use.task, sent)
        came = self._gradients.fetch([each for _, each in fetched])
        for (place, _), value in zip(fetched, came, strict=True):
            handed[place] = value
        if self._current is use:
            self._leave()
        return handed

    def _is_last(self, use: _Use, parameter: Tensor) -> bool:
        """Whether this backward gives nothing more to the parameter, in uses that it comes to."""
        return not any(
            other is not use and other.task != use.task and graph.comes(other.node())
            for layer in self._users.get(parameter, ())
            for other in tuple(layer.uses)
        )

    def _backward_ended(self, task: int, succeeded: bool) -> None:
        steps: list[Callable[[], object]] = []
        if self._current is None or self._current_task == task:  # else it ran inside another one
            steps = [self._leave, functools.partial(self._residents.give_up_others, ())]
            self._last = None
        end = self._gradients.finish if self._ends.is_inside() else self._wait_for_end
        every([*steps, functools.partial(end, task, succeeded)])

    def _wait_for_end(self, task: int, succeeded: bool) -> None:
        """Waits, once, for whatever has not come and gone yet."""
        join = functools.partial(self._gradients.join, task, succeeded)
        settle = [layer.settle for layer in self._layers]
        with self._offloader.waiting():
            every([join, *settle, self._offloader.wait_read])


@functools.cache
def _watch_steps() -> None:
    """Has optimizers wait for what still reads the weights; and passes end where one has stepped:
    fused ones write what no version tells of. One that steps inside a backward writes what that is
    through with."""

    def before() -> None:
        for owner in tuple(_owners) if graph.task() == graph.NO_TASK else ():
            owner.wait()

    def after(*_: Any) -> None:
        for owner in tuple(_owners) if graph.task() == graph.NO_TASK else ():
            owner._residents.end_pass()

    gate.before_steps_write(before)
    register_optimizer_step_post_hook(after)
    # In a forked child they are the parent's, and nothing reads their weights there.
    os.register_at_fork(after_in_child=_owners.clear)


def _tell_of_backward(use: _Use, output: Any) -> None:
    """Has backward come to the layer before it runs any node of it."""

    def enter(grads: Any) -> None:
        use.owner._enter(use)

    nodes = {each.grad_fn for each in tree_leaves(output) if isinstance(each, Tensor)}
    for node in nodes:
        if node is not None:
            node.register_prehook(enter)


def offload_layers(
    modules: Iterable[nn.Module],
    *,
    device: torch.device | str,
    keep: int = 0,
    dtype: torch.dtype | None = None,
    engine: Engine | None = None,
) -> OffloadedLayers:
    """Lets layers compute on a device while their parameters and buffers live on the CPU.

    Args:
        modules: The layers, in the order in which forward goes through them; a module that is used
            more than once may stand there more than once. Their parameters and buffers are on the
            CPU, what they are called with is on `device`, and so is the rest of the model.
        device: Where they compute. At most `2 + keep` of them are there at a time.
        keep: So many of the last ones stay there between forward and backward.
        dtype: What parameters are converted to on their way to the device, such as
            `torch.bfloat16`. They keep their own dtype on the CPU, and their gradients get it.
        engine: Whose pool parameters and gradients live in, `default_engine()` by default.

    Returns:
        A handle: `remove()` gives the modules back as they were. It is a context manager that does
        so.

    Raises:
        TypeError: What is given are no modules, or their parameters are no plain dense tensors.
        ValueError: One is inside another, or offloaded already; `keep` is below 0 or above their
            number.
        StillframeError: A parameter or a buffer is not on the CPU.
        PoolExhaustedError: The pool is too small for the parameters.
    """
    order_of_modules = given.check(modules, keep, dtype)
    unique = list(dict.fromkeys(order_of_modules))
    made = {module: Layer(module, f"layers[{i}]", dtype) for i, module in enumerate(unique)}
    layers = list(made.values())
    given.mark_shared(layers)
    slots = 2 + keep
    offloader = Offloader(device, slots=slots, engine=engine)
    try:
        for layer in layers:
            layer.to_pool(offloader)
    except BaseException:
        for layer in layers:
            layer.to_ordinary()
        offloader.close()
        raise
    for module in unique:
        given.offloaded.update(module.modules())
    return OffloadedLayers(layers, [made[m] for m in order_of_modules], keep, offloader, slots)
