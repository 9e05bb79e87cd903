"""A pytest plugin for Accelerate's own tests: puts our functions into its class.

`theirs.py` sets THEIRS_WITH (stock or ours).
"""

import os
import pathlib

from accelerate import Accelerator


def save_state(accelerator, *args, **kwargs):
    """Save as the tests expect: the directory is there when the call returns, old ones are not."""
    import stillframe
    import stillframe.accelerate

    handle = stillframe.accelerate.save_state(accelerator, *args, **kwargs)
    handle.result()
    stillframe.wait_all()
    return pathlib.Path(handle.path)


if os.environ["THEIRS_WITH"] == "ours":
    import stillframe.accelerate

    Accelerator.save_state = save_state
    Accelerator.load_state = stillframe.accelerate.load_state
