"""Runs the Python blocks of pages and notebooks, for test_docs.py: `run_pages.py DIRECTORY
PAGE...`.

A page is one program: its blocks run in order in one namespace, in a scratch directory. README
shows parts of programs, so this script defines the names that they need. Each page runs in a fork
of this process, which has imported torch and Lightning and done nothing else with them. A block
```text title="prints" must equal the output of the block before it; `...` matches anything. Prints
one line of JSON for each page: its name, and the error or null.
"""

import contextlib
import doctest
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import stillframe
import torch

_BLOCK = re.compile(
    r'^```python\n(?P<code>.*?)^```\n(?:\n```text title="prints"\n(?P<prints>.*?)^```\n)?',
    re.M | re.S,
)


def text_of(page: Path) -> str:
    """Return the page's text; for a notebook, the equivalent page."""
    text = page.read_text()
    if page.suffix != ".ipynb":
        return text
    blocks = []
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            blocks.append("```python\n" + "".join(cell["source"]) + "\n```\n\n")
            for output in cell["outputs"]:
                printed = "".join(output["text"])
                blocks.append(f'```text title="prints"\n{printed}```\n\n')
    return "".join(blocks)


class Model(lightning.pytorch.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Trainer(lightning.pytorch.Trainer):
    """Trains at once, because README does not show the training."""

    def __init__(self, **options: Any) -> None:
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        super().__init__(max_steps=4, accelerator="cpu", **quiet, **options)
        self.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8))


def of_the_reader() -> dict[str, object]:
    """Define the names that README uses, in a directory with an old checkpoint."""
    model = torch.nn.Linear(64, 64)
    opt = torch.optim.AdamW(model.parameters())
    Path("step90.pt").touch()
    state = {"model": model.state_dict(), "optim": opt.state_dict()}
    of_lightning = {
        "Trainer": Trainer,
        "ModelCheckpoint": lightning.pytorch.callbacks.ModelCheckpoint,
    }
    return {"model": model, "opt": opt, "state": state, **of_lightning}


def run(page: Path) -> str | None:
    """Run a page; return what is wrong with it, or None."""
    text = text_of(page)
    names = {"__name__": "__main__", **(of_the_reader() if page.name == "README.md" else {})}
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        code = compile("\n" * line + block["code"], str(page), "exec")
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, names)
        except BaseException:
            return traceback.format_exc()
        wanted = block["prints"]
        if wanted is not None and not doctest.OutputChecker().check_output(
            wanted, printed.getvalue(), doctest.ELLIPSIS
        ):
            return f"line {line} prints\n{printed.getvalue()}and is said to print\n{wanted}"
    stillframe.wait_all()
    return None


def run_forked(page: Path, scratch: Path) -> str | None:
    scratch.mkdir()
    answer = scratch.with_suffix(".answer")
    child = os.fork()
    if child == 0:
        os.chdir(scratch)
        with contextlib.redirect_stderr(io.StringIO()):
            wrong = run(page)
        answer.write_text(json.dumps(wrong))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return f"ended with status {status}" if status else json.loads(answer.read_text())


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(2)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    directory = Path(sys.argv[1])
    for number, argument in enumerate(sys.argv[2:]):
        wrong = run_forked(Path(argument).resolve(), directory / str(number))
        print(json.dumps([argument, wrong]), flush=True)
