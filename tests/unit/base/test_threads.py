"""The package's threads are real threads; otherwise the call raises an error that says so."""

from __future__ import annotations

import pytest
from fix_processes import run_python

# Represents gevent or eventlet; only this answer of theirs is used.
PROGRAM = """
import sys, types, torch, stillframe
patcher = types.ModuleType({module!r})
patcher.{question} = lambda name: name == {name!r}
sys.modules[{module!r}] = patcher
for save in (stillframe.async_save, stillframe.save):
    try:
        save({{"w": torch.ones(3)}}, "/dev/shm/never.pt")
    except stillframe.StillframeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("module", "question", "name", "remedy"),
    [
        (
            "gevent.monkey",
            "is_module_patched",
            "threading",
            "gevent.monkey.patch_all(thread=False, queue=False)",
        ),
        ("eventlet.patcher", "is_monkey_patched", "thread", "eventlet.monkey_patch(thread=False)"),
    ],
)
def test_save_among_greenlets_is_refused_with_a_remedy(module, question, name, remedy):
    done = run_python("-c", PROGRAM.format(module=module, question=question, name=name))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(remedy) == 2
