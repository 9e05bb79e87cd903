"""Strategies that cannot save with the plugin, or do not use it."""

import warnings

import pytest
from fix_lightning import loader, trainer
from stillframe._lightning import callers


@pytest.mark.parametrize("name", ["XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy"])
def test_xla_is_refused_with_the_reason_before_training(lit, tmp_path, name):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    strategy = type("Own", (type(name, (SingleDeviceStrategy,), {}),), {})("cpu")
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), strategy=strategy)
    model = lit.Model()
    with pytest.raises(TypeError, match=rf"{name} cannot save with stillframe.*XLACheckpointIO"):
        run.fit(model, loader())
    assert model.losses == []


def test_save_without_the_companion_is_refused_on_xla(lit, tmp_path):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class XLAStrategy(SingleDeviceStrategy):
        pass

    run = trainer(lit, tmp_path, strategy=XLAStrategy("cpu"))
    run.fit(lit.Model(), loader())
    run.strategy.checkpoint_io = lit.AsyncCheckpointIO()
    with pytest.raises(TypeError, match="cannot save with stillframe"):
        run.save_checkpoint(tmp_path / "a.ckpt")
    assert list(tmp_path.glob("*.ckpt")) == []


def a_strategy(name, **attributes):
    return type(name, (), attributes)()


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        (a_strategy("FSDPStrategy", _state_dict_type="sharded"), "a save_checkpoint of its own"),
        (a_strategy("DeepSpeedStrategy"), "DeepSpeedStrategy"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_strategy_that_writes_its_own_checkpoints_is_warned_of_once(monkeypatch, strategy, remedy):
    monkeypatch.setattr(callers, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            callers.warn_if_bypassed(strategy, "AsyncCheckpointIO")
    (warning,) = caught
    assert remedy in str(warning.message)
    assert "AsyncCheckpointIO does not see its checkpoints" in str(warning.message)


@pytest.mark.parametrize(
    "strategy",
    [
        a_strategy("FSDPStrategy", _state_dict_type="full"),
        a_strategy("ModelParallelStrategy", _save_distributed_checkpoint=False),
        a_strategy("DDPStrategy"),
        a_strategy("SingleDeviceStrategy"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_strategies_that_use_a_checkpoint_io_are_not_warned_of(monkeypatch, strategy):
    monkeypatch.setattr(callers, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callers.warn_if_bypassed(strategy, "AsyncCheckpointIO")
        callers.refuse_xla_strategy(strategy)
