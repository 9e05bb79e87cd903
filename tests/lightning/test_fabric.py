"""Fabric: saves and loads, with `wait_all` at the end."""

import pytest
import stillframe
import torch
from fix_holds import held_until_awaited
from fix_lightning import assert_same, copied
from stillframe.testing import fault, slow
from torch import nn


def launched(pkg, plugin):
    fabric = pkg.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    return fabric, model, optimizer


def step(fabric, model, optimizer, nr):
    generator = torch.Generator().manual_seed(nr)
    loss = model(torch.randn(8, 300, generator=generator)).square().mean()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    return loss.item()


def test_resumed_run_is_bit_identical(pkg, tmp_path):
    fabric, model, optimizer = launched(pkg, pkg.AsyncCheckpointIO())
    losses = []
    for nr in range(12):
        losses.append(step(fabric, model, optimizer, nr))
        state = {"model": model, "optimizer": optimizer, "nr": nr}
        fabric.save(tmp_path / "deep" / f"{nr}.ckpt", state)
    stillframe.wait_all()

    fabric, model, optimizer = launched(pkg, pkg.AsyncCheckpointIO())
    state = {"model": model, "optimizer": optimizer, "nr": -1}
    assert fabric.load(tmp_path / "deep" / "7.ckpt", state) == {}
    assert state["nr"] == 7
    again = [step(fabric, model, optimizer, nr) for nr in range(8, 12)]
    assert again == losses[8:]


def test_saves_are_asynchronous_and_loads_wait_for_them(pkg, tmp_path):
    fabric, model, optimizer = launched(pkg, pkg.AsyncCheckpointIO())
    for nr in range(6):
        step(fabric, model, optimizer, nr)
    expected = copied(dict(model.state_dict()))
    path = tmp_path / "a.ckpt"
    with held_until_awaited("fdatasync"), slow("lane_copy", 0.01):
        fabric.save(path, {"model": model})
        assert not path.exists()
        step(fabric, model, optimizer, 6)
        fabric.load(path, {"model": model})
    assert_same(dict(model.state_dict()), expected)


def test_loading_weights_in_place_does_not_change_a_save_in_flight(lit, tmp_path):
    fabric, model, optimizer = launched(lit, lit.AsyncCheckpointIO())
    for nr in range(6):
        step(fabric, model, optimizer, nr)
    fabric.save(tmp_path / "old.ckpt", {"model": model})
    stillframe.wait_all()
    step(fabric, model, optimizer, 6)
    expected = copied(dict(model.state_dict()))
    with slow("lane_copy", 0.05):
        fabric.save(tmp_path / "new.ckpt", {"model": model})
        fabric.load(tmp_path / "old.ckpt", {"model": model})
        stillframe.wait_all()
    assert_same(dict(torch.load(tmp_path / "new.ckpt")["model"]), expected)


def test_wait_all_raises_the_error_of_a_failed_save(lit, tmp_path):
    fabric, model, _ = launched(lit, lit.AsyncCheckpointIO())
    with fault("fdatasync", sticky=True), pytest.raises(stillframe.SaveError):
        fabric.save(tmp_path / "a.ckpt", {"model": model})
        stillframe.wait_all()
    stillframe.wait_all()


def test_filter_and_storage_options_behave_as_in_lightnings_plugin(lit, tmp_path):
    fabric, model, _ = launched(lit, lit.AsyncCheckpointIO())
    fabric.save(
        tmp_path / "a.ckpt",
        {"model": model},
        filter={"model": lambda name, value: name.endswith("bias")},
    )
    stillframe.wait_all()
    assert list(torch.load(tmp_path / "a.ckpt")["model"]) == ["0.bias", "2.bias"]
