"""Moves tensors between a device and CPU memory, both ways, while the device computes.

    from stillframe.offload import Offloader

    with Offloader("cuda") as offloader:
        ticket = offloader.offload(tensors)    # copies them to the pool; you may drop the tensors
        ...
        offloader.prefetch(ticket)             # copies them back while the device computes
        tensors = offloader.onload(ticket)     # the current stream, not the host, waits for them

`offload_layers`, `offload_activations` and `offload_optimizer_state` do this for a model.
"""

from stillframe._offload.activations import OffloadedActivations, offload_activations
from stillframe._offload.device_pool import OffloadStats
from stillframe._offload.layers import OffloadedLayers, offload_layers
from stillframe._offload.offloader import Offloader
from stillframe._offload.optimizer_state import OffloadedOptimizerState, offload_optimizer_state
from stillframe._offload.ticket import Ticket

__all__ = [
    "OffloadStats",
    "OffloadedActivations",
    "OffloadedLayers",
    "OffloadedOptimizerState",
    "Offloader",
    "Ticket",
    "offload_activations",
    "offload_layers",
    "offload_optimizer_state",
]
