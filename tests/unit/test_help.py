"""`help()` and `dir()` show documented arguments, examples as code, and nothing internal."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest
import stillframe

FUNCTIONS = [
    getattr(stillframe, name)
    for name in stillframe.__all__
    if inspect.isfunction(getattr(stillframe, name))
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_every_argument_of_a_function_is_documented(function):
    documentation = inspect.getdoc(function)
    named = [name for name in inspect.signature(function).parameters if name != "engine_options"]
    missing = [each for each in named if not re.search(rf"^ +{each}(,.*)?: ", documentation, re.M)]
    if missing:  # several on one line
        listed = re.findall(r"^ +([\w, ]+): ", documentation, re.M)
        missing = [each for each in missing if not any(each in line for line in listed)]
    assert not missing


def test_the_packages_help_shows_its_example_as_code():
    text = pydoc.plain(pydoc.render_doc(stillframe))
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("import stillframe")
    assert lines[at + 2 : at + 6] == [
        'state = {"model": model.state_dict(), "optim": opt.state_dict()}',
        'handle = stillframe.async_save(state, "step100.pt")',
        "...               # keep training; the next optimizer step waits for the copy by itself",
        "handle.result()   # durable; raises what went wrong",
    ]


def test_the_packages_help_names_no_module_but_what_is_in_it():
    text = pydoc.plain(pydoc.render_doc(stillframe))
    assert not re.search(r"^ +_(exit|moves|support)\b", text, re.M)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_plugin_shows_what_users_call(package):
    pytest.importorskip(package)
    plugin = pytest.importorskip(f"stillframe.{package}").AsyncCheckpointIO
    assert [name for name in dir(plugin) if not name.startswith("_")] == [
        "load_checkpoint",
        "remove_checkpoint",
        "save_checkpoint",
        "teardown",
    ]


def test_a_handle_and_an_engine_show_what_users_call():
    assert [name for name in dir(stillframe.SaveHandle) if not name.startswith("_")] == [
        *("add_done_callback", "cancel", "done", "exception", "path", "progress", "result"),
        *("staging_completion", "state", "upload_completion", "wait_staged"),
    ]
    assert [name for name in dir(stillframe.Engine) if not name.startswith("_")] == [
        *("close", "stats", "trim", "warm_up"),
    ]
