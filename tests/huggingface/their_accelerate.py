"""A pytest plugin for Accelerate's own tests: puts our functions into its class, records outcomes.

`theirs_accelerate.py` sets the environment: THEIRS_WITH (stock or ours), THEIRS_OUTCOMES (a file).
"""

import json
import os
import pathlib

from accelerate import Accelerator

outcomes: dict[str, str] = {}


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


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session):
    with open(os.environ["THEIRS_OUTCOMES"], "w") as file:
        json.dump(outcomes, file)
