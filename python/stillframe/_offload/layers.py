"""Implements `offload_layers`: layers live on the CPU and compute on a device, one at a time.

    (l is a layer, l+1 the layer after it)
    forward    l arrives (prefetched)   l computes, l+1 is copied in      l is released
    backward   l arrives (prefetched)   l computes, l-1 is copied in,
                                        gradients of l+1 are copied out   l is released

In a forward, autograd saves references to the weights instead of the weights (`saved.py`). So
between forward and backward the device holds no weights. Backward *reaches* a layer when the first
node of the layer is about to run. Until backward reaches another layer, the module has the tensors
on the device, because a checkpoint inside the layer may repeat parts of the forward. Here a
*checkpoint* is torch's activation checkpointing, which repeats a forward inside backward.
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
from stillframe._offload.gradients import DeviceGradient, Gradients
from stillframe._offload.layer import Layer, LayerHook, ModuleMoveGuard, Replaced
from stillframe._offload.layer_use import LayerOrderPredictor, LayerUse
from stillframe._offload.offloader import Offloader
from stillframe._offload.residents import Group, LayersOnDevice
from stillframe._offload.run_all import run_all
from stillframe._offload.saved import OnloadFunctionBase, SavedTensorHooks, weights
from stillframe._save.engine import Engine
from stillframe.errors import StillframeError


class _OnloadFunction(torch.autograd.Function, OnloadFunctionBase):
    """The autograd function from a layer's parameters on the CPU to the copies on the device. Its
    backward sends the gradients to the CPU.

    Arguments of `forward`: the `OffloadedLayers`, the `LayerUse` of this forward, the indices of
    the parameters in the layer, the layer's tensors on the device, and the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Any, use: LayerUse, indices: list[int], group: list[Tensor], *_: Tensor
    ) -> Any:
        ctx.owner, ctx.use, ctx.indices = owner, use, indices
        ctx.set_materialize_grads(False)  # a missing gradient is None instead of zeros
        return tuple(group[index].detach() for index in indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gradients = ctx.owner._send_gradients(ctx.use, ctx.indices, grads)
        return None, None, None, None, *gradients  # only the parameters get gradients


class OffloadedLayers:
    """The handle of `offload_layers`. As a context manager it calls `remove()` on exit."""

    def __init__(
        self, layers: list[Layer], order: list[Layer], keep: int, offloader: Offloader, slots: int
    ) -> None:
        self._layers = layers
        self._layer_order = LayerOrderPredictor(order)
        # The layers that stay on the device between forward and backward. A layer that shares
        # buffers does not stay, because forwards of other layers may change its buffers.
        last_layers = order[len(order) - keep :]
        self._kept = {layer for layer in last_layers if not layer.shares_buffers_with}
        self._offloader = offloader
        self._residents = LayersOnDevice(offloader, layers, slots)
        self._gradients = Gradients(offloader, max_in_flight=slots)
        self._end_listener = graph.BackwardEndListener(self._handle_backward_end)
        self._running: list[LayerUse] = []  # the running forwards, outermost first
        self._reached: LayerUse | None = None  # the use that backward has reached
        self._reached_task = graph.NO_TASK  # the backward that has reached `_reached`
        self._last_used: Layer | None = None  # the last layer used with gradients
        self._layers_with: dict[Tensor, list[Layer]] = {}  # by parameter
        self._handles: list[Any] = []
        self._removed = False
        for layer in layers:
            for parameter in layer.parameters():
                self._layers_with.setdefault(parameter, []).append(layer)
            self._add_hooks(layer)
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
        steps = [self._finish_layer_in_backward, self._gradients.wait_for_all_gradients]
        steps += [handle.remove for handle in self._handles]
        steps += [functools.partial(self._residents.give_up_all_except, ())]
        steps += [layer.finish_writes for layer in self._layers]
        steps += [self._gradients.close, self._offloader.close]
        steps += [functools.partial(self._restore, layer) for layer in self._layers]
        run_all(steps)

    def _restore(self, layer: Layer) -> None:
        """Make a layer's module an ordinary module again."""
        del layer.module._apply
        layer.move_tensors_out_of_pool()
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

    def _add_hooks(self, layer: Layer) -> None:
        module = layer.module
        self._handles += [
            module.register_forward_pre_hook(LayerHook(self._before_forward, layer), prepend=True),
            module.register_forward_hook(LayerHook(self._after_forward, layer), always_call=True),
        ]
        state_hook = LayerHook(self._before_state_dict, layer)
        module._apply = ModuleMoveGuard(layer)  # type: ignore[method-assign]
        for each in module.modules():
            self._handles.append(each.register_state_dict_pre_hook(state_hook))  # type: ignore[no-untyped-call]

    # ---- forward ----

    def _before_forward(self, layer: Layer, module: nn.Module, args: Any) -> None:
        """Bring a layer to the device before its forward."""
        arguments.refuse_inside_ddp(layer)
        for running in self._running:
            if running.layer is layer:  # the module is called inside its own forward
                self._running.append(running)
                return
        is_repeated = graph.task() != graph.NO_TASK  # by a checkpoint, in a backward
        previous = self._layer_order.previous(layer) if is_repeated else self._last_used
        use = LayerUse(self._bring_layer_for_backward, layer, previous)
        if is_repeated:
            # not later, because the forward may call another backward
            self._end_listener.register_for_running_backward()
            # If backward is in this layer, its use goes on after the repeated forward.
            is_in_layer = self._reached is not None and self._reached.layer is layer
            next_layer = self._record_backward(use, end_reached=not is_in_layer)
        else:
            self._finish_layer_in_backward()
            new_run_begins = self._layer_order.forward(layer)
            if new_run_begins:  # the weights may have changed since the last run
                self._residents.expire_prefetches()
            if self._residents.get(layer) is not None:
                self._residents.give_up(layer)  # weights of an earlier forward
            next_layer = self._layer_order.next_in_forward()
        group = use.group = self._residents.bring(layer, fresh=not is_repeated)
        use.tensors = layer.tensors  # `bring` may have found other tensors
        self._running.append(use)
        use.swap_in(self._device_tensors(use, group))
        weights.add(use, group.tensors)
        use.hooks = SavedTensorHooks()
        use.hooks.enter()
        if torch.is_grad_enabled():
            layer.uses.add(use)
            if not is_repeated:
                self._last_used = layer
        self._prefetch(next_layer, fresh=not is_repeated)

    def _device_tensors(self, use: LayerUse, group: Group) -> list[Tensor]:
        """Return the device tensors that replace a layer's tensors during a forward."""
        layer = use.layer
        values = [tensor.detach() for tensor in group.tensors]
        indices = [i for i, each in enumerate(layer.tensors) if each.requires_grad]
        if torch.is_grad_enabled() and indices:
            parameters = _OnloadFunction.apply(  # type: ignore[no-untyped-call]
                self, use, indices, group.tensors, *(layer.tensors[i] for i in indices)
            )
            use.node = weakref.ref(parameters[0].grad_fn)  # weak: the node refers to the use
        else:  # without autograd, but modules may still read `requires_grad`
            parameters = [values[i].requires_grad_() for i in indices]
        for index, parameter in zip(indices, parameters, strict=True):
            values[index] = parameter
        return values

    def _after_forward(self, layer: Layer, module: nn.Module, args: Any, output: Any) -> None:
        """Put a layer's CPU tensors back. `output` is None if the forward has raised."""
        if not self._running or self._running[-1].layer is not layer:
            return  # the pre-hook has failed, so there was no forward
        use = self._running.pop()
        if use in self._running:
            return  # the module was called inside its own forward, which still runs
        is_repeated = graph.task() != graph.NO_TASK  # by a checkpoint, in a backward
        stays = is_repeated or (torch.is_grad_enabled() and layer in self._kept)
        try:
            self._end_forward(use, output, stays)
        except BaseException as error:
            run_all(self._cleanup_steps(layer), error)
        # `output` is None after an exception. But a checkpoint ends a repeated forward by an
        # exception, which is no failure.
        has_failed = output is None and not is_repeated
        if has_failed:
            run_all(self._cleanup_steps(layer))
        elif not stays:
            self._residents.give_up(layer)

    def _end_forward(self, use: LayerUse, output: Any, stays: bool) -> None:
        """End a forward: restore the layer's CPU tensors, and copy back what the forward has
        written. `stays`: the layer stays on the device."""
        layer = use.layer
        if use.hooks is not None:
            use.hooks.leave()
        changed, group = use.swap_out(), use.group
        assert group is not None, "a forward ends once"
        weights.drop(group.tensors)
        self._copy_new_buffers_to_cpu(layer, changed)
        layer.start_copying_changes_back(group, self._offloader, stays=stays)
        use.end(group)
        if torch.is_grad_enabled():
            _register_backward_prehooks(use, output)
        else:
            layer.finish_writes()
            if self._layer_order.is_last(layer):
                self._offloader.wait_read()  # the caller may write to the weights now

    def _cleanup_steps(self, layer: Layer) -> list[Callable[[], object]]:
        """Return the steps that clean up after a failed forward."""
        finish_writes = [each.finish_writes for each in self._layers]
        give_up = functools.partial(self._residents.give_up, layer)
        return [give_up, self._residents.expire_prefetches, self.wait, *finish_writes]

    def _copy_new_buffers_to_cpu(self, layer: Layer, changed: Replaced) -> None:
        """Copy the tensors by which a forward has replaced buffers to the CPU, and keep them as the
        buffers. Raise StillframeError if the forward has replaced a parameter."""
        for reference, found in changed:
            if reference.entries is reference.module._parameters or not isinstance(found, Tensor):
                raise StillframeError(
                    f"{layer.name_of(reference.tensor_index)} was replaced or moved in its module's"
                    " forward: a module that moves its own parameters cannot be offloaded."
                    " They are on the CPU as they were before"
                )
            reference.entries[reference.name] = found.detach().to("cpu")

    def _prefetch(self, layer: Layer | None, fresh: bool) -> None:
        """Prefetch a layer, unless other layers may change its buffers before it is used."""
        if layer is not None and layer.shares_buffers_with:
            layer = None  # `prefetch` then only gives up expired prefetches
        self._residents.prefetch(layer, fresh)

    def _before_state_dict(self, layer: Layer, module: nn.Module, *args: Any) -> None:
        layer.finish_writes()

    # ---- backward ----

    def _bring_layer_for_backward(self, use: LayerUse) -> Group:
        """Bring a layer to the device for backward. Return the tensors there."""
        if self._removed:
            raise StillframeError(
                f"the backward of {use.layer.name} comes after remove(): it needs its weights"
            )
        is_outside = graph.task() == graph.NO_TASK  # other code unpacks a saved tensor
        has_entered = self._reached is use
        if is_outside or has_entered:
            return self._residents.bring(use.layer, fresh=False)
        if torch.is_grad_enabled():  # this backward itself is to be differentiated
            raise StillframeError(
                "a backward with create_graph=True cannot go through offloaded layers: what it"
                " computes with is gone before it could be differentiated"
            )
        task = self._end_listener.register_for_running_backward()
        next_layer = self._record_backward(use, end_reached=True)
        group = self._residents.bring(use.layer, fresh=False)
        # A checkpoint inside the layer may repeat a part of the forward, and run another backward
        # through that part. That inner backward gets a use of its own.
        inner_use = LayerUse(self._bring_layer_for_backward, use.layer, use.previous)
        inner_use.device_versions = group.current_versions()
        with torch.enable_grad():
            use.swap_in(self._device_tensors(inner_use, group))
        self._reached = use
        self._reached_task = task
        self._prefetch(next_layer, fresh=False)
        return group

    def _record_backward(self, use: LayerUse, end_reached: bool) -> Layer | None:
        """Record that backward reaches a layer, or that a checkpoint repeats the layer's forward.
        Return the predicted next layer."""
        next_layer = self._layer_order.backward(use.layer, use.previous)
        staying = {use.layer, next_layer}
        if end_reached:
            self._finish_layer_in_backward(staying)
        running = (each.layer for each in self._running)
        self._residents.give_up_all_except({*staying, *self._kept, *running})
        return next_layer

    def _finish_layer_in_backward(self, staying: Container[Layer | None] = ()) -> None:
        """End the use that backward has reached, if any: copy back what was written to the layer.
        Release the layer's slot, unless the layer is in `staying`."""
        use, self._reached = self._reached, None
        if use is None:
            return
        use.swap_out()
        group = self._residents.get(use.layer)
        stays = use.layer in staying  # on the device
        steps: list[Callable[[], object]] = []
        if group is not None:
            start_copying_changes_back = use.layer.start_copying_changes_back
            steps.append(
                functools.partial(start_copying_changes_back, group, self._offloader, stays=stays)
            )
        if not stays:
            steps.append(functools.partial(self._residents.give_up, use.layer))
        run_all(steps)

    def _send_gradients(
        self, use: LayerUse, indices: list[int], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Send a layer's gradients to the CPU. Return for each gradient:
        - None if `Gradients` adds it to a `grad`
        - the gradient on the CPU if autograd needs it
        """
        use.task = self._end_listener.register_for_running_backward()
        results: list[Tensor | None] = [None] * len(grads)
        to_add: list[DeviceGradient] = []
        to_return: list[tuple[int, DeviceGradient]] = []  # each with its position in `grads`
        for position, (index, grad) in enumerate(zip(indices, grads, strict=True)):
            parameter = use.tensors[index]
            target = graph.gradient_target(parameter)
            if grad is None or target == "nothing":
                continue  # there is no gradient, or nothing needs it
            if grad.layout is not torch.strided:  # only dense gradients can be offloaded
                results[position] = grad.to(device="cpu", dtype=parameter.dtype)
            elif target == "grad":
                is_complete = self._completes_gradient(use, parameter)
                to_add.append(DeviceGradient(parameter, grad, is_complete))
            else:  # autograd itself needs the gradient
                to_return.append((position, DeviceGradient(parameter, grad, is_complete=True)))
        self._gradients.send(use.task, to_add)
        values = self._gradients.fetch([gradient for _, gradient in to_return])
        for (position, _), value in zip(to_return, values, strict=True):
            results[position] = value
        if self._reached is use:
            self._finish_layer_in_backward()
        return results

    def _completes_gradient(self, use: LayerUse, parameter: Tensor) -> bool:
        """Return whether `use` computes the last gradient of a parameter in this backward."""
        for layer in self._layers_with.get(parameter, ()):
            for other in tuple(layer.uses):
                is_done = other is use or other.task == use.task  # in this backward
                if not is_done and graph.is_node_in_current_backward(other.node()):
                    return False  # `other` will compute another gradient
        return True

    def _handle_backward_end(self, task: int, succeeded: bool) -> None:
        """End a backward: give up its layers, and add up the gradients."""
        steps: list[Callable[[], object]] = []
        # A backward inside another one must not end the use that the outer one has reached.
        belongs_to_outer = self._reached is not None and self._reached_task != task
        if not belongs_to_outer:
            steps.append(self._finish_layer_in_backward)
            self._last_used = None
        if self._end_listener.is_nested(task):
            # Do not wait: the end of the outer backward waits for both.
            last_step = self._gradients.finish
        else:
            self._layer_order.record_backward_end(succeeded)
            steps.append(functools.partial(self._residents.give_up_all_except, ()))
            last_step = self._wait_for_backward_copies
        run_all([*steps, functools.partial(last_step, task, succeeded)])

    def _wait_for_backward_copies(self, task: int, succeeded: bool) -> None:
        """Wait until gradients are added, buffers are copied back, and no copy reads weights."""
        join = functools.partial(self._gradients.join, task, succeeded)
        finish_writes = [layer.finish_writes for layer in self._layers]
        with self._offloader._waiting():
            run_all([join, *finish_writes, self._offloader.wait_read])


def _register_backward_prehooks(use: LayerUse, output: Any) -> None:
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
        modules: The layers, in the order in which forward uses them. A module may be listed more
            than once. Parameters and buffers must be on the CPU, inputs and the rest of the model
            on `device`.
        device: Where the layers compute. At most `2 + keep` layers are there at a time.
        keep: How many of the last layers stay on the device between forward and backward.
        dtype: The dtype that parameters have on the device, such as `torch.bfloat16`. On the CPU,
            parameters and gradients have the parameters' own dtype.
        engine: The engine whose pool holds parameters and gradients; `default_engine()` by default.

    Returns:
        A handle whose `remove()` restores the modules. As a context manager it does so on exit.

    Raises:
        TypeError: An element is not a module, or a parameter is not a plain dense tensor.
        ValueError: A module is inside another module, or is offloaded already; `keep` is below 0 or
            above the number of modules.
        StillframeError: A parameter or a buffer is not on the CPU.
        PoolExhaustedError: The pool is too small for the parameters.
    """
    order_of_modules = arguments.check(modules, keep, dtype)
    unique = list(dict.fromkeys(order_of_modules))
    made = {module: Layer(module, f"layers[{i}]", dtype) for i, module in enumerate(unique)}
    layers = list(made.values())
    arguments.record_layers_sharing_tensors(layers)
    slots = 2 + keep
    offloader = Offloader(device, slots=slots, engine=engine)
    try:
        for layer in layers:
            layer.move_tensors_to_pool(offloader)
    except BaseException:
        for layer in layers:
            layer.move_tensors_out_of_pool()
        offloader.close()
        raise
    for module in unique:
        arguments.offloaded.update(module.modules())
    order = [made[module] for module in order_of_modules]
    return OffloadedLayers(layers, order, keep, offloader, slots)
