"""stillframe saves PyTorch training state without stopping training.

    import stillframe
    handle = stillframe.async_save({"model": model.state_dict(), "optim": opt.state_dict()},
    "step100.pt") ...                # keep training; the next optimizer step waits for the copy by
    itself handle.result()    # durable; raises what went wrong

With Lightning: `from stillframe.lightning import AsyncCheckpointIO`, then
`Trainer(plugins=[AsyncCheckpointIO()])`.
"""

from stillframe.engine import (
    Engine,
    async_save,
    configure,
    default_engine,
    exists,
    remove,
    save,
    wait_all,
)
from stillframe.errors import (
    BusyError,
    CorruptCheckpointError,
    ForkError,
    PoolExhaustedError,
    SaveError,
    StillframeError,
    TornSnapshotError,
)
from stillframe.gate import register_optimizer
from stillframe.handle import SaveHandle, SaveReport
from stillframe.reader import load
from stillframe.snapshot import Snapshot, snapshot

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "CorruptCheckpointError",
    "Engine",
    "ForkError",
    "PoolExhaustedError",
    "SaveError",
    "SaveHandle",
    "SaveReport",
    "Snapshot",
    "StillframeError",
    "TornSnapshotError",
    "async_save",
    "configure",
    "default_engine",
    "exists",
    "load",
    "register_optimizer",
    "remove",
    "save",
    "snapshot",
    "wait_all",
]
