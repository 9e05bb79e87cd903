"""Implements `offload_layers`: layers live on the CPU and compute on a device, one at a time.

    (l is a layer, l+1 the layer after it)
    forward    l arrives (prefetched)   l computes, l+1 is copied in      l is released
    backward   l arrives (prefetched)   l computes, l-1 is copied in,
                                        gradients of l+1 are copied out   l is released

In a layer's forward autograd saves references to the weights instead of the weights (`saved.py`),
so between forward and backward the device holds no weights. Backward reaches a layer when the node
that made one of its outputs is about to run, or when a node asks for one of its weights. Until
backward reaches another layer, the module keeps its weights on the device, because a checkpoint
inside the layer may repeat parts of its forward. Here a *checkpoint* is torch's activation
checkpointing, which repeats a forward inside backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from stillframe._offload import arguments, graph, optimizers
from stillframe._offload.gradients import Gradient, Gradients
from stillframe._offload.layer import ApplyGuard, Former, Hook, Layer
from stillframe._offload.layer_use import LayerOrder, LayerUse
from stillframe._offload.offloader import Offloader
from stillframe._offload.residents import Group, Residents
from stillframe._offload.run_all import run_all
from stillframe._offload.saved import Onloading, SavedHooks, weights
from stillframe._save.engine import Engine
from stillframe.errors import StillframeError


class _Onload(torch.autograd.Function, Onloading):
    """The autograd function from a layer's parameters on the CPU to their copies on the device. Its
    backward sends the gradients to the CPU.

    Arguments of `forward`: the `OffloadedLayers`, the use, the indices of the parameters in the
    layer, the layer's tensors on the device, and the parameters, which autograd has to see.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Any, use: LayerUse, indices: list[int], group: list[Tensor], *_: Tensor
    ) -> Any:
        ctx.owner, ctx.use, ctx.indices = owner, use, indices
        ctx.set_materialize_grads(False)
        return tuple(group[index].detach() for index in indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, None, *ctx.owner._gradients_out(ctx.use, ctx.indices, grads)


class OffloadedLayers:
    """The handle that `offload_layers` returns.

    As a context manager it calls `remove()` on exit.
    """

    def __init__(
        self, layers: list[Layer], order: list[Layer], keep: int, offloader: Offloader, slots: int
    ) -> None:
        self._layers = layers
        self._layer_order = LayerOrder(order)
        # Layers that stay on the device between forward and backward.
        self._kept = {each for each in order[len(order) - keep :] if not each.partners}
        self._offloader = offloader
        self._residents = Residents(offloader, layers, slots)
        self._gradients = Gradients(offloader, most=slots)
        self._end_listener = graph.EndListener(self._backward_ended)
        self._open: list[LayerUse] = []  # forwards that are running, outermost first
        self._current: LayerUse | None = None  # the use that backward has reached
        self._current_task = graph.NO_TASK  # the backward that has reached `_current`
        self._last: Layer | None = None  # the last layer used with gradients
        self._users: dict[Tensor, list[Layer]] = {}  # by parameter, the layers that have it
        self._handles: list[Any] = []
        self._removed = False
        for layer in layers:
            for parameter in layer.parameters():
                self._users.setdefault(parameter, []).append(layer)
            self._watch(layer)
        optimizers.watch(self._residents)
        self._stop_watching = graph.watch(self._end_listener)

    def __enter__(self) -> OffloadedLayers:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Make the modules ordinary modules on the CPU again, with their trained values and their
        gradients. May be called again."""
        if self._removed:
            return
        self._removed = True
        optimizers.unwatch(self._residents)
        self._stop_watching()
        steps = [self._leave, self._gradients.join_all]
        steps += [handle.remove for handle in self._handles]
        steps += [functools.partial(self._residents.give_up_others, ())]  # gives up all
        steps += [layer.settle for layer in self._layers]
        steps += [self._gradients.close, self._offloader.close]
        steps += [functools.partial(self._let_go, layer) for layer in self._layers]
        run_all(steps)

    def _let_go(self, layer: Layer) -> None:
        """Make a layer's module an ordinary one again."""
        del layer.module._apply
        layer.to_ordinary()
        arguments.offloaded.difference_update(layer.module.modules())

    def wait(self) -> None:
        """Wait until no copy reads the weights on the CPU any more.

        A backward, and a whole forward without gradients, wait before they end. An optimizer's step
        waits before it begins. After any other forward, call this before you write to the weights
        yourself.
        """
        self._offloader.wait_read()

    def stats(self) -> Any:
        """Return counters of what was copied so far; see `Offloader.stats`."""
        return self._offloader.stats()

    def resident(self) -> list[str]:
        """Return the names of the layers that are on the device or on their way there."""
        return [layer.name for layer in self._layers if self._residents.has(layer)]

    def _watch(self, layer: Layer) -> None:
        """Register the hooks of a layer."""
        module = layer.module
        self._handles += [
            module.register_forward_pre_hook(Hook(self._before, layer), prepend=True),
            module.register_forward_hook(Hook(self._after, layer), always_call=True),
        ]
        state = Hook(self._before_state, layer)
        module._apply = ApplyGuard(layer)  # type: ignore[method-assign]
        for each in module.modules():
            self._handles.append(each.register_state_dict_pre_hook(state))  # type: ignore[no-untyped-call]

    # ---- forward ----

    def _before(self, layer: Layer, module: nn.Module, args: Any) -> None:
        """Bring a layer to the device before its forward."""
        arguments.refuse_reduction(layer)
        # If the module is called inside its own forward, the two forwards have one use.
        running = next((use for use in self._open if use.layer is layer), None)
        if running is not None:
            self._open.append(running)
            return
        is_repeated = graph.task() != graph.NO_TASK  # by a checkpoint, in a backward
        before = self._layer_order.preceder(layer) if is_repeated else self._last
        use = LayerUse(self._enter, layer, before)
        if is_repeated:
            # Join this backward now, because the forward may call another one inside it.
            self._end_listener.join()
            # If backward has reached this layer already, do not end the use that it has reached.
            inside = self._current is not None and self._current.layer is layer
            following = self._go_back(use, leave=not inside)
        else:
            self._leave()
            if self._layer_order.forward(layer):
                self._residents.expire_prefetches()
            if self._residents.get(layer) is not None:
                self._residents.give_up(layer)  # weights of an earlier forward
            following = self._layer_order.follower()
        group = use.group = self._residents.bring(layer, fresh=not is_repeated)
        use.tensors = layer.tensors  # `bring` may have found other tensors
        self._open.append(use)
        use.put(self._on_device(use, group))
        weights.add(use, group.tensors)
        use.hooks = SavedHooks()
        use.hooks.enter()
        if torch.is_grad_enabled():
            layer.uses.add(use)
            if not is_repeated:
                self._last = layer
        self._prefetch(following, fresh=not is_repeated)

    def _on_device(self, use: LayerUse, group: Group) -> list[Tensor]:
        """Return the device tensors that replace a layer's tensors during a forward."""
        layer = use.layer
        values = [tensor.detach() for tensor in group.tensors]
        indices = [i for i, each in enumerate(layer.tensors) if each.requires_grad]
        if torch.is_grad_enabled() and indices:
            made = _Onload.apply(  # type: ignore[no-untyped-call]
                self, use, indices, group.tensors, *(layer.tensors[i] for i in indices)
            )
            use.node = weakref.ref(made[0].grad_fn)  # weak: the node refers to the use
        else:  # without a node; modules may still look at `requires_grad`
            made = [values[i].requires_grad_() for i in indices]
        for index, value in zip(indices, made, strict=True):
            values[index] = value
        return values

    def _after(self, layer: Layer, module: nn.Module, args: Any, output: Any) -> None:
        """Put a layer's CPU tensors back. `output` is None if the forward has raised."""
        if not self._open or self._open[-1].layer is not layer:
            return  # the pre-hook failed before the forward
        use = self._open.pop()
        if use in self._open:
            return  # this forward was called inside another one of the same module
        is_repeated = graph.task() != graph.NO_TASK  # by a checkpoint, in a backward
        stays = is_repeated or (torch.is_grad_enabled() and layer in self._kept)
        try:
            self._end_use(use, output, stays)
        except BaseException as error:
            run_all(self._failing(layer), error)
        # Checkpointing ends a repeated forward by an exception once it has what it needs, which is
        # no failure.
        if output is None and not is_repeated:
            run_all(self._failing(layer))
        elif not stays:
            self._residents.give_up(layer)

    def _end_use(self, use: LayerUse, output: Any, stays: bool) -> None:
        """End a forward: restore the layer's CPU tensors, and copy back what the forward has
        written. `stays`: the layer stays on the device."""
        layer = use.layer
        if use.hooks is not None:
            use.hooks.leave()
        moved, group = use.take_back(), use.group
        assert group is not None, "a forward ends once"
        weights.drop(group.tensors)
        self._adopt(layer, moved)
        layer.write_back(group, self._offloader, stays=stays)
        use.end(group)
        if torch.is_grad_enabled():
            _enter_before_backward(use, output)
        else:
            layer.settle()
            if self._layer_order.is_last(layer):
                self._offloader.wait_read()  # the caller may write to the weights now

    def _failing(self, layer: Layer) -> list[Callable[[], object]]:
        """Return the steps that clean up after a failed forward."""
        settle = [each.settle for each in self._layers]
        give_up = functools.partial(self._residents.give_up, layer)
        return [give_up, self._residents.expire_prefetches, self.wait, *settle]

    def _adopt(self, layer: Layer, moved: Former) -> None:
        """Move tensors that a forward has put in place of buffers to the CPU, and keep them.

        Args:
            moved: The references and tensors that `LayerUse.take_back` has returned.

        Raises:
            StillframeError: The forward has replaced a parameter.
        """
        for reference, found in moved:
            if reference.entries is reference.module._parameters or not isinstance(found, Tensor):
                raise StillframeError(
                    f"{layer.name_of(reference.number)} was replaced or moved in its module's"
                    " forward: a module that moves its own parameters cannot be offloaded."
                    " They are on the CPU as they were before"
                )
            reference.entries[reference.name] = found.detach().to("cpu")

    def _prefetch(self, layer: Layer | None, fresh: bool) -> None:
        """Prefetch a layer, unless partners may change its buffers before it is used."""
        self._residents.prefetch(None if layer is None or layer.partners else layer, fresh)

    def _before_state(self, layer: Layer, module: nn.Module, *args: Any) -> None:
        """Complete the CPU's tensors before a state_dict is made of them."""
        layer.settle()

    # ---- backward ----

    def _enter(self, use: LayerUse) -> Group:
        """Bring a layer to the device, because backward has reached it or asks for one of its
        weights. Return its tensors there.

        Raises:
            StillframeError: The layer cannot be brought for this backward.
        """
        if self._removed:
            raise StillframeError(
                f"the backward of {use.layer.name} comes after remove(): it needs its weights"
            )
        # Outside a backward, this is a call by code that unpacks a saved tensor itself.
        if graph.task() == graph.NO_TASK or self._current is use:
            return self._residents.bring(use.layer, fresh=False)
        if torch.is_grad_enabled():
            raise StillframeError(
                "a backward with create_graph=True cannot go through offloaded layers: what it"
                " computes with is gone before it could be differentiated"
            )
        task = self._end_listener.join()
        following = self._go_back(use, leave=True)
        group = self._residents.bring(use.layer, fresh=False)
        # A checkpoint inside the layer may repeat a part of the forward, with the weights of the
        # module. A reentrant checkpoint also runs a backward through that part, which needs a use
        # of its own.
        inside = LayerUse(self._enter, use.layer, use.before)
        inside.device_versions = group.now()
        with torch.enable_grad():
            use.put(self._on_device(inside, group))
        self._current = use
        self._current_task = task
        self._prefetch(following, fresh=False)
        return group

    def _go_back(self, use: LayerUse, leave: bool) -> Layer | None:
        """Record that backward reaches a layer, or that a checkpoint repeats its forward. Return
        the layer that is predicted to be next.

        Args:
            leave: End the use that backward had reached before (`_leave`).
        """
        following = self._layer_order.backward(use.layer, use.before)
        staying = {use.layer, following}
        if leave:
            self._leave(staying)
        running = (each.layer for each in self._open)
        self._residents.give_up_others({*staying, *self._kept, *running})
        return following

    def _leave(self, staying: Container[Layer | None] = ()) -> None:
        """End the use that backward has reached: copy back what was written to the layer. Release
        its slot, unless the layer is in `staying`."""
        use, self._current = self._current, None
        if use is None:
            return
        use.take_back()
        group, stays = self._residents.get(use.layer), use.layer in staying
        steps: list[Callable[[], object]] = []
        if group is not None:
            back = use.layer.write_back
            steps.append(functools.partial(back, group, self._offloader, stays=stays))
        if not stays:
            steps.append(functools.partial(self._residents.give_up, use.layer))
        run_all(steps)

    def _gradients_out(
        self, use: LayerUse, indices: list[int], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Send a layer's gradients to the CPU. Return the results of the autograd function: None
        for each gradient that `Gradients` adds to a `grad`, and the gradient on the CPU otherwise.
        """
        use.task = self._end_listener.join()
        results: list[Tensor | None] = [None] * len(grads)
        sent: list[Gradient] = []
        fetched: list[tuple[int, Gradient]] = []
        for position, (index, grad) in enumerate(zip(indices, grads, strict=True)):
            parameter = use.tensors[index]
            adds = graph.accumulates(parameter)  # None: autograd wants the gradient itself
            if grad is None or adds is False:
                continue
            if grad.layout is not torch.strided:  # only dense gradients can be offloaded
                results[position] = grad.to(device="cpu", dtype=parameter.dtype)
            elif adds:
                sent.append(Gradient(parameter, grad, self._is_last(use, parameter)))
            else:
                fetched.append((position, Gradient(parameter, grad, True)))
        self._gradients.send(use.task, sent)
        came = self._gradients.fetch([each for _, each in fetched])
        for (position, _), value in zip(fetched, came, strict=True):
            results[position] = value
        if self._current is use:
            self._leave()
        return results

    def _is_last(self, use: LayerUse, parameter: Tensor) -> bool:
        """Return whether no other use that this backward reaches adds to the parameter's
        gradient."""
        # A use with the same task has sent its gradients in this backward already.
        return not any(
            other is not use and other.task != use.task and graph.runs_node(other.node())
            for layer in self._users.get(parameter, ())
            for other in tuple(layer.uses)
        )

    def _backward_ended(self, task: int, succeeded: bool) -> None:
        """End a backward: give up its prefetches and add up the gradients."""
        inside = self._end_listener.is_inside(task)
        steps: list[Callable[[], object]] = []
        # Otherwise `_current` belongs to an outer backward, which still computes with it.
        if self._current is None or self._current_task == task:
            steps.append(self._leave)
            self._last = None
        if not inside:
            self._layer_order.end_backward(succeeded)
            steps.append(functools.partial(self._residents.give_up_others, ()))
        end = self._gradients.finish if inside else self._wait_for_end
        run_all([*steps, functools.partial(end, task, succeeded)])

    def _wait_for_end(self, task: int, succeeded: bool) -> None:
        """Wait until gradients are added, changed buffers are copied back, and no copy reads
        weights any more."""
        join = functools.partial(self._gradients.join, task, succeeded)
        settle = [layer.settle for layer in self._layers]
        with self._offloader._waiting():
            run_all([join, *settle, self._offloader.wait_read])


def _enter_before_backward(use: LayerUse, output: Any) -> None:
    """Register hooks that call `use.enter` before backward runs any node of the layer."""

    def enter(grads: Any) -> None:
        use.enter(use)

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
    """Let layers compute on a device while their parameters and buffers live on the CPU.

    Args:
        modules: The layers, in the order in which forward uses them; a module that is used more
            than once may be listed more than once. Their parameters and buffers must be on the
            CPU, and their inputs and the rest of the model on `device`.
        device: Where the layers compute. At most `2 + keep` of them are there at a time.
        keep: How many of the last layers stay on the device between forward and backward.
        dtype: The dtype that parameters are converted to on the device, such as `torch.bfloat16`.
            They keep their own dtype on the CPU, and gradients are converted to that.
        engine: The engine whose pool holds parameters and gradients; `default_engine()` by default.

    Returns:
        A handle whose `remove()` restores the modules; as a context manager it does so on exit.

    Raises:
        TypeError: An element is not a module, or a parameter is not a plain dense tensor.
        ValueError: A module is inside another, or offloaded already; `keep` is below 0 or above
            the number of modules.
        StillframeError: A parameter or a buffer is not on the CPU.
        PoolExhaustedError: The pool is too small for the parameters.
    """
    order_of_modules = arguments.check(modules, keep, dtype)
    unique = list(dict.fromkeys(order_of_modules))
    made = {module: Layer(module, f"layers[{i}]", dtype) for i, module in enumerate(unique)}
    layers = list(made.values())
    arguments.mark_shared(layers)
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
        arguments.offloaded.update(module.modules())
    order = [made[module] for module in order_of_modules]
    return OffloadedLayers(layers, order, keep, offloader, slots)
