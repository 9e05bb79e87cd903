"""A pytest plugin for transformers' own tests: puts our Trainer into place, records outcomes.

`theirs_trainer.py` sets the environment: THEIRS_WITH (stock or ours), THEIRS_OUTCOMES (a file).

Our mixin becomes the first base of the Trainer itself, so each subclass in the tests has it too.
"""

import json
import os

import transformers

outcomes: dict[str, str] = {}

if os.environ["THEIRS_WITH"] == "ours":
    import stillframe.transformers

    class Trainer(stillframe.transformers.AsyncCheckpointMixin, transformers.Trainer):
        pass

    Trainer.__module__, Trainer.__qualname__ = "transformers.trainer", "Trainer"
    transformers.trainer.Trainer = transformers.Trainer = Trainer


def pytest_report_header():
    return f"bases of the Trainer: {[each.__name__ for each in transformers.Trainer.__mro__]}"


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session):
    with open(os.environ["THEIRS_OUTCOMES"], "w") as file:
        json.dump(outcomes, file)
