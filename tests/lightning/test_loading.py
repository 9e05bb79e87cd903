"""The plugin's loads, which use stillframe's reader if it gives what Lightning's would."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import stillframe
import torch
from fix_checkpoints import flip, offset_of_storage
from fix_memory import in_a_child, resident
from stillframe._lightning import writers
from stillframe._watch import gate

STATE = {"x": torch.arange(5000.0), "n": 3}


class NotAllowed:
    """A class that weights_only refuses."""


@pytest.fixture
def path(pkg, tmp_path):
    torch.save(STATE, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_a_damaged_checkpoint_is_refused_by_name(pkg, path):
    flip(path, offset_of_storage(path, "x"))
    with pytest.raises(stillframe.CorruptCheckpointError, match=r"data/0.*: x"):
        pkg.AsyncCheckpointIO().load_checkpoint(path)


def test_a_replaced_torch_load_is_called(pkg, path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: "theirs")
    assert pkg.AsyncCheckpointIO().load_checkpoint(path) == "theirs"


@pytest.mark.parametrize("options", [{}, {"weights_only": True}, {"weights_only": False}])
def test_weights_only_default_is_lightnings(options, pkg, path):
    torch.save({"x": NotAllowed()}, path)
    ends = []
    for plugin in (pkg.TorchCheckpointIO(), pkg.AsyncCheckpointIO()):
        try:
            ends.append(type(plugin.load_checkpoint(path, **options)["x"]))
        # older versions of torch.load have no such option
        except (pickle.UnpicklingError, TypeError) as error:
            ends.append(type(error))
    assert ends[0] is ends[1]


@pytest.mark.parametrize("name", writers._FORCED)
@pytest.mark.parametrize("weights_only", [None, True, False])
def test_environment_variables_decide_weights_only(name, weights_only, pkg, path, monkeypatch):
    torch.save({"x": NotAllowed()}, path)
    monkeypatch.setenv(name, "1")
    ends = []
    for plugin in (pkg.TorchCheckpointIO(), pkg.AsyncCheckpointIO()):
        try:
            ends.append(type(plugin.load_checkpoint(path, weights_only=weights_only)["x"]))
        except (pickle.UnpicklingError, TypeError) as error:
            ends.append(type(error))
    assert ends[0] is ends[1]


def test_a_home_directory_is_found_as_lightning_finds_it(pkg, path, monkeypatch):
    monkeypatch.setenv("HOME", str(path.parent))
    loaded = [
        plugin.load_checkpoint("~/a.ckpt")["n"]
        for plugin in (pkg.TorchCheckpointIO(), pkg.AsyncCheckpointIO())
    ]
    assert loaded == [3, 3]


@pytest.mark.parametrize(
    ("world", "on_the_node", "shared"),
    [(None, None, False), (1, None, False), (2, None, True), (2, "2", True), (2, "1", False)],
)
def test_ranks_of_a_node_share_one_read_of_the_disk(
    world, on_the_node, shared, pkg, path, monkeypatch
):
    asked = []
    monkeypatch.setattr(writers, "load", lambda path, **how: asked.append(how))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: world is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if on_the_node is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", on_the_node)
    pkg.AsyncCheckpointIO().load_checkpoint(path)
    assert [how["shared"] for how in asked] == [shared]
    assert asked[0]["map_location"] == "cpu"


# ---- how much memory a training takes that goes on ----

WIDTH, LAYERS = 1024, 8
STATE_NBYTES = 3 * 4 * WIDTH * WIDTH * LAYERS  # with both moments of AdamW
FIXED = 20 << 20  # buffers of the readers and of Lightning; less than another copy of the model


def train(pkg, path, *, resumes):
    """Train a few steps. The first call writes `path`, later calls resume from it.

    Returns the peak of resident bytes from the restart to the first step, without the model's
    bytes.
    """
    peak = []

    class Wide(pkg.LightningModule):
        def __init__(self):
            super().__init__()
            each = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
            self.layers = torch.nn.ModuleList(each)

        def training_step(self, batch, index):
            return torch.stack([layer.weight[0].sum() for layer in self.layers]).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), foreach=False)

        def on_train_start(self):
            peak.append(resident("VmHWM") - before)

    trainer = pkg.Trainer(
        max_steps=2 if resumes else 1,
        plugins=[pkg.AsyncCheckpointIO()],
        accelerator="cpu",
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        enable_model_summary=False,
    )
    module = Wide()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    data = torch.utils.data.DataLoader(torch.zeros(2, 1))
    trainer.fit(module, data, ckpt_path=path if resumes else None)
    if not resumes:
        trainer.save_checkpoint(path)
    return peak[0]


def test_resumed_training_holds_its_state_once(lit, tmp_path):
    path = str(tmp_path / "x.ckpt")
    in_a_child(lambda: train(lit, path, resumes=False))
    peak = in_a_child(lambda: train(lit, path, resumes=True))
    assert 0.9 * STATE_NBYTES <= peak <= 1.05 * STATE_NBYTES + FIXED


def test_load_waits_for_the_copies_of_saves_under_way(pkg, path, monkeypatch):
    waits = []
    monkeypatch.setattr(gate, "wait", lambda: waits.append("for copies"))
    assert pkg.AsyncCheckpointIO().load_checkpoint(path)["n"] == 3
    assert waits == ["for copies"]
