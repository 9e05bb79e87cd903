"""Run transformers' own tests, as a pytest plugin, with our Trainer instead of theirs.

`theirs.py` sets THEIRS_WITH (stock or ours).

Our mixin becomes the first base of the Trainer itself, so each subclass in the tests has it too.
"""

import os

import transformers

if os.environ["THEIRS_WITH"] == "ours":
    import stillframe.transformers

    class Trainer(stillframe.transformers.AsyncCheckpointMixin, transformers.Trainer):
        pass

    Trainer.__module__, Trainer.__qualname__ = "transformers.trainer", "Trainer"
    transformers.trainer.Trainer = transformers.Trainer = Trainer


def pytest_report_header():
    return f"bases of the Trainer: {[each.__name__ for each in transformers.Trainer.__mro__]}"
