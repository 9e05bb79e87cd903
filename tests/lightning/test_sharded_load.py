"""Loads of sharded checkpoints: what they wait for. test_sharded.py loads on several ranks."""

import stillframe
import torch
from stillframe._lightning.sharded import sharded
from stillframe._save import ordered
from stillframe._watch import gate


def save_checkpoint(self):
    pass


save_checkpoint.__module__ = "lightning.fabric.strategies.fsdp"


class FSDPStrategy:
    """Fabric's FSDP strategy with one rank."""

    _state_dict_type = "sharded"
    global_rank = 0
    save_checkpoint = save_checkpoint

    def load_checkpoint(self, path):
        return torch.load(path)

    def broadcast(self, path):
        return path

    def reduce_boolean_decision(self, decision, all):
        return decision


def test_load_waits_for_the_save_of_its_path_and_for_all_copies(tmp_path, monkeypatch):
    path = str(tmp_path / "c")
    stillframe.save(3, path)
    waits = []
    monkeypatch.setattr(ordered, "wait_for_saves_of_path", waits.append)
    monkeypatch.setattr(gate, "wait", lambda: waits.append("for copies"))
    assert sharded(FSDPStrategy()).load_checkpoint(path) == 3
    assert waits == [path, "for copies"]
