"""The companion callback: its position, the Trainers it leaves alone, and the hooks it delays."""

import gc
import importlib.metadata
import pickle
import subprocess
import sys
import types

import pytest
import stillframe
import torch
from fix_lightning import PACKAGES, assert_same, copied, every_steps, load, loader, package, trainer
from fix_processes import LIGHTNING, run_python
from stillframe._lightning.trainers import Wraps
from stillframe._watch import gate
from stillframe.testing import slow

OUTSIDE_THE_STEP = {
    *("setup", "teardown", "on_exception"),
    *(
        f"on_{what}_{edge}"
        for edge in ("start", "end")
        for what in (
            *("fit", "sanity_check", "train", "train_epoch"),
            *("validation", "validation_epoch", "validation_batch"),
            *("test", "test_epoch", "test_batch"),
            *("predict", "predict_epoch", "predict_batch"),
        )
    ),
}
WITH_ONE_MORE = ("setup", "teardown", "on_exception")  # hooks with one more argument
AROUND_THE_STEP = {"on_train_batch_start", "on_train_batch_end"}
INSIDE_THE_STEP = {
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint"),
}


def companions(run):
    return [type(each).__name__ for each in run.callbacks].count("StillframeCompanion")


def test_installed_package_has_the_entry_points():
    for name in PACKAGES:
        group = "lightning.pytorch" if name == "lightning" else name
        (point,) = importlib.metadata.entry_points(
            group=f"{group}.callbacks_factory", name="stillframe"
        )
        plugin = package(name).AsyncCheckpointIO()
        assert [type(each) for each in point.load()()] == [package(name).Companion]
        del plugin


def test_the_entry_points_import_neither_stillframe_nor_torch():
    code = (
        "import sys, importlib.metadata as m;"
        "points = [p for p in m.entry_points(name='stillframe')"
        " if p.group.endswith('callbacks_factory')];"
        "assert len(points) == 2, points;"
        "assert [p.load()() for p in points] == [[], []];"
        "assert not {'stillframe', 'torch'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_trainer_without_a_plugin_of_ours_is_left_alone(pkg, tmp_path):
    gc.collect()
    assert len(sys.modules["stillframe._lightning.plugin"].live) == 0
    assert companions(trainer(pkg, tmp_path)) == 0


def test_companion_is_first_after_setup_and_others_keep_their_order(pkg, tmp_path):
    class Observer(pkg.Callback):
        def on_fit_start(self, trainer, module):
            self.seen = list(trainer.callbacks)

    observers = [Observer(), Observer()]
    run = trainer(
        pkg,
        tmp_path,
        plugin=pkg.AsyncCheckpointIO(),
        callbacks=[*observers, every_steps(pkg, tmp_path / "c", 4)],
    )
    before = run.callbacks
    assert companions(run) == 1
    run.fit(pkg.Model(), loader())
    assert type(observers[0].seen[0]) is pkg.Companion
    rest = [each for each in before if type(each) is not pkg.Companion]
    assert observers[0].seen[1:] == observers[1].seen[1:] == rest
    # When the fit is torn down, the Trainer has its own list again.
    assert run.callbacks is before


def test_callbacks_of_the_module_do_not_displace_the_companion(lit, tmp_path):
    class Observer(lit.Callback):
        def on_train_start(self, trainer, module):
            self.seen = list(trainer.callbacks)

    observer = Observer()

    class Model(lit.Model):
        def configure_callbacks(self):
            return [observer]

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[lit.Callback()])
    for _ in range(2):
        run.fit(Model(), loader())
        assert type(observer.seen[0]) is lit.Companion


def test_every_callback_is_still_set_up(lit, tmp_path):
    calls = []

    class Count(lit.Callback):
        def __init__(self, name):
            self.name = name

        def setup(self, trainer, module, stage):
            calls.append(self.name)

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[Count(1), Count(2)])
    run.fit(lit.Model(), loader())
    assert calls == [1, 2]


def test_trainer_with_another_plugin_gets_no_companion(lit, tmp_path, monkeypatch):
    ours = lit.AsyncCheckpointIO()  # while this plugin is alive, every Trainer is inspected
    run = trainer(
        lit, tmp_path, plugin=lit.TorchCheckpointIO(), callbacks=[every_steps(lit, tmp_path, 4)]
    )
    order = list(run.callbacks)
    assert companions(run) == 0
    monkeypatch.setattr(gate, "wait", lambda: pytest.fail("gated"))
    run.fit(lit.Model(), loader())
    assert run.callbacks == order
    del ours


def test_companion_waits_at_every_hook_outside_the_step_and_no_other(pkg, tmp_path, monkeypatch):
    hooks = {name for name in vars(pkg.Callback) if not name.startswith("_")} - {"state_key"}
    assert hooks == OUTSIDE_THE_STEP | AROUND_THE_STEP | INSIDE_THE_STEP
    overridden = {
        name for name in hooks if getattr(pkg.Companion, name) is not getattr(pkg.Callback, name)
    }
    assert overridden == OUTSIDE_THE_STEP | AROUND_THE_STEP

    calls = []
    monkeypatch.setattr(gate, "wait", lambda: calls.append(True))
    plugin = pkg.AsyncCheckpointIO()
    companion = pkg.Companion()
    run = types.SimpleNamespace(
        strategy=types.SimpleNamespace(_checkpoint_io=plugin),
        callbacks=[companion],
        loggers=[],
        world_size=1,
        is_global_zero=True,
    )
    # SimpleNamespace is not hashable and has no weak references, unlike a Trainer.
    run = type("Trainer", (), vars(run))()
    for nr, name in enumerate(sorted(OUTSIDE_THE_STEP), start=1):
        getattr(companion, name)(run, None, *([None] if name in WITH_ONE_MORE else []))
        assert len(calls) == nr, name
    for name in AROUND_THE_STEP:
        getattr(companion, name)(run, None)
    assert len(calls) == len(OUTSIDE_THE_STEP)


def test_companion_in_a_trainer_with_another_plugin_does_nothing(lit, tmp_path, monkeypatch):
    run = trainer(lit, tmp_path, plugin=lit.TorchCheckpointIO(), callbacks=[lit.Companion()])
    monkeypatch.setattr(gate, "wait", lambda: pytest.fail("gated"))
    run.fit(lit.Model(), loader())


def test_a_companion_that_cannot_be_made_is_logged_and_breaks_no_trainer(
    lit, tmp_path, monkeypatch, caplog
):
    import stillframe.lightning

    plugin = lit.AsyncCheckpointIO()
    monkeypatch.setattr(stillframe.lightning, "StillframeCompanion", None)
    run = trainer(lit, tmp_path, plugin=plugin)
    assert companions(run) == 0
    assert "could not be made" in caplog.text


def test_an_extension_that_cannot_be_imported_breaks_no_trainer():
    code = (
        "import sys; sys.modules['stillframe._core'] = None\n"
        "try: import stillframe.lightning\n"
        "except ImportError: pass\n"
        "else: raise SystemExit('imported')\n"
        "from lightning.pytorch import Trainer\n"
        "run = Trainer(accelerator='cpu', logger=False, enable_checkpointing=False)\n"
        "assert 'Companion' not in str(run.callbacks), run.callbacks\n"
    )
    run_python("-W", "ignore", "-c", code, check=True, imported=LIGHTNING)


def test_companion_leaves_no_trace_in_a_checkpoint(pkg, tmp_path):
    contents = []
    for plugin in (pkg.TorchCheckpointIO(), pkg.AsyncCheckpointIO()):
        run = trainer(pkg, tmp_path, plugin=plugin)
        run.fit(pkg.Model(), loader())
        run.save_checkpoint(tmp_path / "a.ckpt")
        contents.append(load(tmp_path / "a.ckpt"))
    assert contents[0]["callbacks"] == contents[1]["callbacks"]
    assert_same(*contents)


def test_companion_can_be_pickled(pkg):
    copy = pickle.loads(pickle.dumps(pkg.Companion()))
    assert type(copy) is pkg.Companion
    assert vars(copy) == {}


def test_trainer_of_one_package_accepts_the_plugin_of_the_other(pkg, tmp_path):
    other = package(PACKAGES[PACKAGES[0] == pkg.name])
    run = trainer(
        pkg,
        tmp_path,
        plugin=other.AsyncCheckpointIO(),
        callbacks=[every_steps(pkg, tmp_path / "c", 2)],
    )
    assert companions(run) == 1
    run.fit(pkg.Model(), loader())
    assert load(tmp_path / "c" / "step=8.ckpt")["global_step"] == 8


@pytest.mark.parametrize("how", ["copy_", "data"])
def test_weights_swapped_for_validation_never_get_into_a_file(pkg, tmp_path, how):
    """During validation, an averaging callback puts the average into the weights."""
    expected, deferred = {}, []

    class Averaging(pkg.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if not hasattr(self, "average"):
                self.average = copied(list(module.parameters()))
            for average, parameter in zip(self.average, module.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.1)

        def swap(self, module):
            kept = copied(list(module.parameters()))
            for parameter, average in zip(module.parameters(), self.average, strict=True):
                if how == "data":
                    parameter.data.copy_(average)
                else:
                    with torch.no_grad():
                        parameter.copy_(average)
            self.average = kept

        def on_validation_start(self, trainer, module):
            if not trainer.sanity_checking:
                self.swap(module)

        on_validation_end = on_validation_start

        def on_save_checkpoint(self, trainer, module, checkpoint):
            expected[trainer.global_step] = copied(checkpoint["state_dict"])

    with slow("lane_copy", 0.01):
        run = trainer(
            pkg,
            tmp_path,
            plugin=pkg.AsyncCheckpointIO(
                on_durable=lambda path, report: deferred.append(report.deferred_nbytes)
            ),
            callbacks=[Averaging(), every_steps(pkg, tmp_path / "c", 1, save_top_k=-1)],
            max_steps=24,
            limit_val_batches=1,
            val_check_interval=4,
        )
        run.fit(pkg.Model(), loader(), loader())
    assert len(expected) == 24
    assert max(deferred) > 4 * 300 * 300  # otherwise the test shows nothing
    for step, state in expected.items():
        assert_same(load(tmp_path / "c" / f"step={step}.ckpt")["state_dict"], state)


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_weight_averaging_saves_as_with_lightnings_plugin(lit, tmp_path, name):
    import lightning.pytorch.callbacks as stock

    if not hasattr(stock, name):
        pytest.skip(f"this Lightning has no {name}")
    options = {"swa_lrs": 0.01, "swa_epoch_start": 1} if name.startswith("Stoch") else {}
    for kind, plugin in (("stock", lit.TorchCheckpointIO()), ("ours", lit.AsyncCheckpointIO())):
        with slow("lane_copy", 0.005):
            trainer(
                lit,
                tmp_path,
                plugin=plugin,
                callbacks=[
                    getattr(stock, name)(**options),
                    every_steps(lit, tmp_path / kind, 3, save_top_k=-1),
                ],
                max_epochs=4,
                max_steps=-1,
                limit_val_batches=1,
            ).fit(lit.Model(), loader(), loader())
    files = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert len(files) >= 10
    assert files == sorted(path.name for path in (tmp_path / "ours").iterdir())
    for file in files:
        ours, theirs = load(tmp_path / "ours" / file), load(tmp_path / "stock" / file)
        for key in ("state_dict", "optimizer_states"):
            assert_same(ours[key], theirs[key], f"{file}: {key}")


def test_a_rare_write_inside_the_step_fails_the_save_or_is_captured(lit, tmp_path):
    expected = {}

    class Rare(lit.Callback):
        def on_train_batch_start(self, trainer, module, *args):
            if trainer.global_step == 12:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(0.5)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            expected[trainer.global_step] = copied(checkpoint["state_dict"])

    torn = None
    with slow("lane_copy", 0.02):
        run = trainer(
            lit,
            tmp_path,
            plugin=lit.AsyncCheckpointIO(),
            callbacks=[Rare(), every_steps(lit, tmp_path / "c", 1, save_top_k=-1)],
            max_steps=16,
        )
        try:
            run.fit(lit.Model(), loader())
        except stillframe.TornSnapshotError as error:
            torn = error
    assert torn is not None
    assert "step=12.ckpt" in str(torn)
    assert not (tmp_path / "c" / "step=12.ckpt").exists()
    for path in (tmp_path / "c").glob("*.ckpt"):
        saved = load(path)
        assert_same(saved["state_dict"], expected[saved["global_step"]])


def test_load_during_training_does_not_change_a_save_in_flight(lit, tmp_path):
    """A restore during a fit overwrites weights that an earlier save may be copying."""
    expected = {}

    class Restore(lit.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            step = trainer.global_step
            if step >= 6:
                trainer.save_checkpoint(tmp_path / f"{step}.ckpt")
                expected[step] = copied(dict(module.state_dict()))
                loaded = trainer.strategy.load_checkpoint(tmp_path / "5.ckpt")
                module.load_state_dict(loaded["state_dict"])
            elif step == 5:
                trainer.save_checkpoint(tmp_path / "5.ckpt")

    with slow("lane_copy", 0.01):
        trainer(
            lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[Restore()], max_steps=8
        ).fit(lit.Model(), loader())
    for step, state in expected.items():
        assert_same(dict(load(tmp_path / f"{step}.ckpt")["state_dict"]), state)


class Owner:
    def name(self):
        return ["theirs"]


def ours(original):
    return [*original(), "ours"]


def test_method_wrapped_twice_is_called_once():
    owner, wraps = Owner(), Wraps()
    for _ in range(2):
        wraps.put(owner, "name", ours)
    assert owner.name() == ["theirs", "ours"]
    wraps.restore()
    assert vars(owner) == {}


def test_attribute_exchanged_twice_is_restored():
    owner, wraps = Owner(), Wraps()
    owner.callbacks = "theirs"
    for each in ("ours", "ours again"):
        wraps.exchange(owner, "callbacks", each)
    wraps.restore()
    assert owner.callbacks == "theirs"


def test_wrapper_restored_too_late_by_others_is_wrapped_again():
    """`mock.patch.object` does that if it starts inside a fit and ends after the fit."""
    owner, wraps = Owner(), Wraps()
    wraps.put(owner, "name", ours)
    kept = vars(owner)["name"]
    wraps.restore()
    owner.name = kept
    assert owner.name() == ["theirs"]
    wraps.put(owner, "name", ours)
    assert owner.name() == ["theirs", "ours"]


def test_foreign_wrapper_around_ours_reaches_the_original_after_removal():
    owner, wraps = Owner(), Wraps()
    wraps.put(owner, "name", ours)
    put = owner.name
    owner.name = lambda: [*put(), "others"]
    assert owner.name() == ["theirs", "ours", "others"]
    wraps.restore()
    assert owner.name() == ["theirs", "others"]


def test_factory_leaves_the_list_of_the_user_alone(pkg, tmp_path):
    """The user may give the list to another Trainer."""
    given = [every_steps(pkg, tmp_path / "c", 4)]
    plugin = pkg.AsyncCheckpointIO()
    for _ in range(2):
        run = trainer(pkg, tmp_path, plugin=plugin, callbacks=given)
        assert not any(type(each) is pkg.Companion for each in given)
        assert companions(run) == 1
    run.fit(pkg.Model(), loader())
    assert not any(type(each) is pkg.Companion for each in given)


def test_hooks_at_the_end_of_training_read_the_best_checkpoint(pkg, tmp_path):
    seen = {}

    def read(name, trainer):
        seen[name] = load(trainer.checkpoint_callback.best_model_path)["global_step"]

    class Reads(pkg.Callback):
        def on_train_end(self, trainer, module):
            read("callback", trainer)

    class Model(pkg.Model):
        def on_train_end(self):
            read("module", self.trainer)

    run = trainer(
        pkg,
        tmp_path,
        plugin=pkg.AsyncCheckpointIO(),
        callbacks=[Reads(), every_steps(pkg, tmp_path / "c", 8)],
    )
    with slow("fdatasync", 0.5):
        run.fit(Model(), loader())
    assert seen == {"callback": 8, "module": 8}
