"""Users' code type-checks under mypy --strict, including README's snippets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NAMES = """
from __future__ import annotations
from multiprocessing import Process
from typing import Any
import stillframe
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from stillframe.lightning import AsyncCheckpointIO
model = torch.nn.Linear(1, 1)
opt = optimizer = torch.optim.AdamW(model.parameters())
state: dict[str, Any] = {}
def train() -> None: ...
def my_writer(tree: object) -> None: ...
"""

USES = """
from typing import Literal, assert_type
assert_type(stillframe.save(state, "a.pt"), stillframe.SaveReport)
assert_type(stillframe.save(state, "a.pt").blocked_s, float)
handle = stillframe.async_save(state, "a.pt", engine=stillframe.Engine(pool_bytes="4GiB"))
print(handle.result().blocked_s, handle.upload_completion.result().nbytes)
if handle.result() is None:
    print("skipped")
async def wait() -> float:
    return (await handle).durable_after_s
stats = stillframe.default_engine().stats()
assert_type(stats["pool_bytes"], int)
assert_type(stats["driver"], str)
stillframe.configure(pool_bytes="4GiB", when_busy="skip")
snap = stillframe.snapshot({"x": torch.zeros(1)})
assert_type(snap.tree, dict[str, torch.Tensor])
stillframe.Engine(when_busy="never")  # line: when_busy
stillframe.configure(pool=3)  # line: pool
AsyncCheckpointIO(on_error="ignore")  # line: on_error
stats["leased"]  # line: leased
"""


def test_readme_and_the_api_type_check(tmp_path):
    pytest.importorskip("mypy")
    pytest.importorskip("lightning")
    readme = (ROOT / "README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(snippets) >= 5
    for number, snippet in enumerate(snippets):
        code = snippet.replace("(...)", "()")  # the part that readers fill in
        names = NAMES
        if re.search(r"import .*\bTrainer\b", code):  # the snippet has a Trainer of its own
            names = names.replace("from lightning.pytorch import Trainer\n", "")
        (tmp_path / f"readme_{number}.py").write_text(names + code)
    uses = NAMES + USES
    (tmp_path / "uses.py").write_text(uses)
    done = subprocess.run(
        [
            # The options of `make lint`, so that both use one cache.
            *(sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml"),
            *("--cache-dir", ROOT / ".mypy_cache", tmp_path),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    wrong = {n for n, line in enumerate(uses.splitlines(), 1) if "# line:" in line}
    assert not [line for line in found if not line.startswith("uses.py")], done.stdout
    assert {int(line.split(":")[1]) for line in found} == wrong, done.stdout
