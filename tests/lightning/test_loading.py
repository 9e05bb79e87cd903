"""The plugin's loads: stillframe's, wherever that does what Lightning's own reader would."""

from __future__ import annotations

import pickle

import pytest
import stillframe
import torch
from fix_checkpoints import flip, offset_of_storage
from stillframe._lightning import reading

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
def test_what_is_trusted_is_what_lightning_trusts(options, pkg, path):
    torch.save({"x": NotAllowed()}, path)
    ends = []
    for plugin in (pkg.TorchCheckpointIO(), pkg.AsyncCheckpointIO()):
        try:
            ends.append(type(plugin.load_checkpoint(path, **options)["x"]))
        except (pickle.UnpicklingError, TypeError) as error:  # an older one has no such option
            ends.append(type(error))
    assert ends[0] is ends[1]


@pytest.mark.parametrize("several", [False, True])
def test_ranks_share_what_the_disk_reads(several, pkg, path, monkeypatch):
    asked = []
    monkeypatch.setattr(reading, "load", lambda path, **how: asked.append(how))
    monkeypatch.setattr(reading, "has_several_ranks", lambda: several)
    pkg.AsyncCheckpointIO().load_checkpoint(path)
    assert [how["shared"] for how in asked] == [several]
    assert asked[0]["map_location"] == "cpu"
