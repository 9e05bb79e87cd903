"""The worked examples run, print what their page shows, and are on the page unchanged."""

import pathlib
import re

import pytest
from fix_processes import LIGHTNING, run_python

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/examples.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def shown_output(name):
    """Return the output that the page shows for an example, as patterns that match any seconds."""
    block = re.search(rf"`examples/{name}`.*?```py\n(.*?)```.*?```text\n(.*?)```", PAGE, re.S)
    assert block, f"docs/examples.md does not show {name}"
    lines = [re.escape(line) for line in block[2].splitlines()]
    return block[1], [re.sub(r"\d+\\\.\d{3}\\ s", r"\\d+\\.\\d{3}\\ s", line) for line in lines]


def test_every_example_has_a_test():
    assert [each.name for each in EXAMPLES] == [
        "accelerate_state.py",
        "huggingface_trainer.py",
        "lightning_plugin.py",
        "offload.py",
        "offload_callback.py",
        "preemption.py",
        "training_loop.py",
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_page_shows(path, tmp_path):
    code, lines = shown_output(path.name)
    assert code == path.read_text()
    done = run_python("-W", "ignore", path, cwd=tmp_path, imported=LIGHTNING)
    assert done.returncode == 0, done.stderr
    # Lightning prints more, which differs between versions.
    printed = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    at = 0
    for line in lines:
        while at < len(printed) and not re.fullmatch(line, printed[at]):
            at += 1
        assert at < len(printed), f"{line} is not in {printed}"
