"""stillframe saves PyTorch training state without stopping training.

In any training loop:

    import stillframe

    state = {"model": model.state_dict(), "optim": opt.state_dict()}
    handle = stillframe.async_save(state, "step100.pt")
    ...               # keep training; the next optimizer step waits for the copy by itself
    handle.result()   # durable; raises what went wrong

With Lightning, swap one import:

    from stillframe.lightning import AsyncCheckpointIO

    trainer = Trainer(plugins=[AsyncCheckpointIO()])
"""

# isort: off
from stillframe._base.support import VERSION as _VERSION
from stillframe._base.support import refuse_unsupported_system as _refuse_elsewhere

_refuse_elsewhere()  # first, because the other imports would fail with less clear errors
# isort: on

from stillframe._base.trace import trace
from stillframe._check.latest import latest
from stillframe._load.load import load
from stillframe._preemption.preemption import preemption
from stillframe._save.api import (
    async_save,
    configure,
    default_engine,
    exists,
    remove,
    save,
    wait_all,
)
from stillframe._save.checkpoint import checkpoint
from stillframe._save.engine import Engine
from stillframe._save.exit import install as _install_exit
from stillframe._save.handle import SaveHandle
from stillframe._save.report import SaveReport
from stillframe._snapshot.snapshot import Snapshot, snapshot
from stillframe._watch.gate import register_optimizer
from stillframe._watch.moves import install as _install_moves
from stillframe._watch.step_hooks import install as _install_step_hooks
from stillframe.errors import (
    BusyError,
    CorruptCheckpointError,
    ForkError,
    PoolExhaustedError,
    SaveError,
    StillframeError,
    TornSnapshotError,
)

__version__ = _VERSION

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
    "checkpoint",
    "configure",
    "default_engine",
    "exists",
    "latest",
    "load",
    "preemption",
    "register_optimizer",
    "remove",
    "save",
    "snapshot",
    "trace",
    "wait_all",
]

_install_step_hooks()
_install_exit()
_install_moves()
