"""`Accelerator.save_state` and `load_state` of Accelerate, without stopping training.

    from stillframe.accelerate import load_state, save_state

    handle = save_state(accelerator, "step100")    # on every rank
    ...                                            # keep training
    load_state(accelerator, "step100")             # waits for the save

The files are those of Accelerate, and `Accelerator.load_state` reads them.
"""

from __future__ import annotations

# isort: off
from stillframe._base import support

support.refuse_unsupported_framework("accelerate")
# isort: on

from stillframe._huggingface.accelerator import load_state, save_state

__all__ = ["load_state", "save_state"]
