"""CPU memory and a device, both ways, beside what the device computes.

from stillframe.offload import Offloader

with Offloader("cuda") as offloader:
    ticket = offloader.offload(tensors)      # leave for the pool; may be dropped at once
    ...
    offloader.prefetch(ticket)               # come back while something else is computed
    tensors = offloader.onload(ticket)       # the current stream waits for them, the host does not
"""

from stillframe._offload.offloader import Offloader
from stillframe._offload.place import OffloadStats
from stillframe._offload.ticket import Ticket

__all__ = ["OffloadStats", "Offloader", "Ticket"]
