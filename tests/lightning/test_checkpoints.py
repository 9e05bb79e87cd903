"""Stock ModelCheckpoint in all modes and on slow disks.

It leaves the same files as synchronous saving, and never fewer than one while they change."""

import errno
import inspect
import os
import threading
from datetime import timedelta

import pytest
import stillframe
import torch
from fix_lightning import (
    DISKS,
    VERSION,
    LightningManualModel,
    assert_same,
    at,
    copied,
    every_steps,
    load,
    loader,
    trainer,
)
from stillframe._save.ordered import wait_for_saves_of_path
from stillframe.testing import fault, slow


@pytest.fixture(params=DISKS, ids=lambda seconds: f"{seconds}s")
def disk(request):
    """Delay every flush of the disk by the given time."""
    with slow("fdatasync", request.param):
        yield request.param


def files(directory):
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def fit_both(lit, tmp_path, make, **options):
    """Run a fit with Lightning's synchronous plugin and with ours; return both directories."""
    found = []
    for kind, plugin in (("stock", lit.TorchCheckpointIO()), ("ours", lit.AsyncCheckpointIO())):
        model = lit.Model()
        run = trainer(
            lit, tmp_path, plugin=plugin, callbacks=make(tmp_path / kind), **dict(options)
        )
        run.fit(model, loader(), loader())
        found.append(tmp_path / kind)
    return found


MODES = {
    "every 2 steps": {"every_n_train_steps": 2},
    "the best 2": {"every_n_train_steps": 2, "monitor": "clock", "save_top_k": 2},
    "the worst kept": {"every_n_train_steps": 2, "monitor": "clock", "mode": "max"},
    "the best 2 and the last": {
        "every_n_train_steps": 2,
        "monitor": "clock",
        "save_top_k": 2,
        "save_last": True,
    },
    "all": {"every_n_train_steps": 3, "save_top_k": -1},
    "epochs": {"every_n_epochs": 1},
    "validation": {"monitor": "val_loss", "save_top_k": 2, "filename": "{val_loss:.3f}"},
    "the last alone": {"save_top_k": 0, "save_last": True, "every_n_train_steps": 2},
    "weights only": {"every_n_train_steps": 2, "save_weights_only": True, "save_last": True},
    "all the time": {"train_time_interval": timedelta(microseconds=1)},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_leaves_the_files_of_synchronous_saving(lit, tmp_path, disk, mode):
    stock, ours = fit_both(
        lit,
        tmp_path,
        lambda directory: [lit.ModelCheckpoint(directory, **{"filename": "{step}", **MODES[mode]})],
        max_epochs=2,
        max_steps=-1,
        limit_train_batches=4,
        limit_val_batches=1,
    )
    assert files(stock) == files(ours) != []
    for name in files(ours):
        one, other = load(stock / name), load(ours / name)
        assert_same(one["state_dict"], other["state_dict"], name)
        assert one["global_step"] == other["global_step"]


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_rotation_never_has_more_than_one_extra_file(lit, tmp_path, disk, top_k, save_last):
    directory = tmp_path / "c"
    seen = []

    class Observer(lit.Callback):
        def on_train_batch_start(self, *args):
            seen.append([name for name in files(directory) if name.endswith(".ckpt")])

        on_before_optimizer_step = on_after_backward = on_train_batch_start

    run = trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(),
        callbacks=[
            Observer(),
            every_steps(lit, directory, 1, save_top_k=top_k, save_last=save_last),
        ],
        max_steps=8,
    )
    run.fit(lit.Model(), loader())
    counts = [len([name for name in names if name != "last.ckpt"]) for names in seen]
    assert max(counts) <= top_k + 1
    first = next((nr for nr, count in enumerate(counts) if count), len(counts))
    assert all(counts[first:])
    assert len([name for name in files(directory) if name != "last.ckpt"]) == top_k


def test_at_most_max_in_flight_saves_wait_for_the_disk(lit, tmp_path, disk):
    plugin = lit.AsyncCheckpointIO(max_in_flight=2)
    under_way = []

    class Observer(lit.Callback):
        def on_train_batch_start(self, *args):
            under_way.append(sum(not save.done() for save in plugin._checkpoints._work.saves))

    callbacks = [Observer(), every_steps(lit, tmp_path / "c", 1, save_top_k=-1)]
    trainer(lit, tmp_path, plugin=plugin, callbacks=callbacks).fit(lit.Model(), loader())
    assert max(under_way) <= 2
    assert not disk or max(under_way) >= 1  # otherwise the test shows nothing
    assert len(files(tmp_path / "c")) == 8


def test_version_numbers_count_checkpoints_in_flight(lit, tmp_path, disk):
    stock, ours = fit_both(
        lit,
        tmp_path,
        lambda directory: [
            lit.ModelCheckpoint(
                directory,
                filename="m",
                monitor="clock",
                save_top_k=-1,
                every_n_train_steps=2,
            )
        ],
    )
    assert files(ours) == files(stock) == ["m-v1.ckpt", "m-v2.ckpt", "m-v3.ckpt", "m.ckpt"]
    for name in files(ours):
        assert load(ours / name)["global_step"] == load(stock / name)["global_step"]


def test_name_is_free_while_its_remove_is_in_flight(lit, tmp_path, disk):
    stock, ours = fit_both(
        lit,
        tmp_path,
        lambda directory: [
            lit.ModelCheckpoint(directory, filename="m", save_top_k=1, every_n_train_steps=2)
        ],
    )
    assert files(ours) == files(stock)
    assert len(files(ours)) == 1


def test_failed_save_keeps_the_newest_good_file_and_one_extra(lit, tmp_path):
    directory = tmp_path / "c"
    broken = []

    def breaks(run):
        stillframe.wait_all()
        injected = fault("fdatasync", err=errno.ENOSPC, sticky=True)
        injected.__enter__()
        broken.append(injected)

    def mends(run):
        wait_for_saves_of_path(directory / "step=4.ckpt")
        broken.pop().__exit__(None, None, None)

    run = trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(on_error="warn"),
        callbacks=[at(lit, {4: breaks, 5: mends}), every_steps(lit, directory, 2)],
    )
    run.fit(lit.Model(), loader())
    # The save of step 4 failed, so the file of step 2 stays; 6 and 8 rotate as usual.
    assert files(directory) == ["step=2.ckpt", "step=8.ckpt"]
    for name in files(directory):
        load(directory / name)


@pytest.mark.parametrize("which", ["best", "last", "path"])
def test_training_resumes_from_a_checkpoint_in_flight(lit, tmp_path, disk, which):
    """An inner fit starts while the saves of the outer fit are in flight."""
    found = []

    def resume(outer):
        callback = every_steps(lit, tmp_path / "c", 100, save_last=True)
        callback.best_model_path = outer.checkpoint_callback.best_model_path
        inner = trainer(
            lit,
            tmp_path,
            plugin=outer.strategy.checkpoint_io,
            max_steps=5,
            callbacks=[callback],
        )
        path = callback.best_model_path if which == "path" else which
        model = lit.Model()
        inner.fit(model, loader(), ckpt_path=path)
        found.append((inner.global_step, len(model.losses)))

    class Later(lit.Callback):
        # This comes after the save of the same hook, because ModelCheckpoint is called last.
        def on_train_batch_start(self, outer, *args):
            if outer.global_step == 4 and not found:
                resume(outer)

    trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(),
        callbacks=[Later(), every_steps(lit, tmp_path / "c", 4, save_last=True)],
        max_steps=6,
    ).fit(lit.Model(), loader())
    assert found == [(5, 1)]


def test_trainer_fits_validates_and_tests_from_its_checkpoints(lit, tmp_path, disk):
    class Model(lit.Model):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", self(batch[0]).mean())

    callback = every_steps(lit, tmp_path / "c", 2, save_last=True)
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[callback])
    model = Model()
    run.fit(model, loader())
    before = copied(dict(model.state_dict()))
    for path in ("best", "last"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        run.test(model, loader(), ckpt_path=path, verbose=False)
        assert_same(dict(model.state_dict()), before)
    run.validate(model, loader(), verbose=False)
    run.fit_loop.epoch_loop.max_steps = 12
    run.fit(model, loader(), ckpt_path="last")
    assert files(tmp_path / "c") == ["last.ckpt", "step=12.ckpt"]


def test_checkpoint_is_saved_on_a_training_exception(lit, tmp_path, disk):
    if "save_on_exception" not in inspect.signature(lit.ModelCheckpoint).parameters:
        pytest.skip("this Lightning has no save_on_exception")

    def boom(run):
        raise ValueError("boom")

    callback = lit.ModelCheckpoint(
        tmp_path / "c",
        filename="{step}",
        every_n_train_steps=2,
        save_on_exception=True,
    )
    run = trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(),
        callbacks=[at(lit, {3: boom}), callback],
    )
    with pytest.raises(ValueError, match="boom"):
        run.fit(lit.Model(), loader())
    assert "step=3.ckpt" in files(tmp_path / "c")
    assert load(tmp_path / "c" / "step=3.ckpt")["global_step"] == 3


def test_lightnings_on_exception_checkpoint_is_saved_and_removed(lit, tmp_path, disk):
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    def boom(run):
        if not (tmp_path / "on_exception.ckpt").exists():
            raise ValueError

    callbacks = [OnExceptionCheckpoint(tmp_path), at(lit, {3: boom})]
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=callbacks)
    with pytest.raises(ValueError):
        run.fit(lit.Model(), loader())
    assert load(tmp_path / "on_exception.ckpt")["global_step"] == 3
    model = lit.Model()
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=callbacks)
    run.fit(model, loader())
    assert len(model.losses) == 5
    assert files(tmp_path) == []


@pytest.mark.skipif(VERSION < (2, 6), reason="this Lightning swaps no weights")
def test_weights_swapped_for_validation_never_tear_a_rare_save(lit, tmp_path):
    """Under manual optimization ModelCheckpoint loads older weights, saves, and restores the newer
    ones. After many steps without such a write, the weights are deferrable."""
    model = LightningManualModel()
    before = {}

    class Keep(lit.Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            before[run.global_step] = copied(module.saved_models[batch_idx])

    with slow("lane_copy", 0.02):
        trainer(
            lit,
            tmp_path,
            plugin=lit.AsyncCheckpointIO(),
            callbacks=[Keep(), every_steps(lit, tmp_path / "c", 12, save_top_k=-1)],
            max_steps=24,
        ).fit(model, loader())
    for step in (12, 24):
        state = load(tmp_path / "c" / f"step={step}.ckpt")["state_dict"]
        for name, value in before[step].items():
            assert torch.equal(state[f"layer.{name}"], value), (step, name)


# ---- links -----------------------------------------------------------------------------------


def test_last_link_is_relative_and_points_to_the_newest_checkpoint(lit, tmp_path, disk):
    stock, ours = fit_both(
        lit, tmp_path, lambda directory: [every_steps(lit, directory, 2, save_last="link")]
    )
    assert files(ours) == files(stock) == ["last.ckpt", "step=8.ckpt"]
    assert os.readlink(ours / "last.ckpt") == os.readlink(stock / "last.ckpt") == "step=8.ckpt"


def test_last_link_is_always_there_and_never_dangles(lit, tmp_path):
    directory = tmp_path / "c"
    link = directory / "last.ckpt"
    states, over = [], threading.Event()

    def watch():  # checks as often as it can, during all operations of the log
        while not over.is_set():
            if os.path.lexists(link) or states:
                states.append(os.path.exists(link))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with slow("unlink", 0.02), slow("rename", 0.02):
            trainer(
                lit,
                tmp_path,
                plugin=lit.AsyncCheckpointIO(),
                callbacks=[every_steps(lit, directory, 1, save_last="link")],
                max_steps=10,
            ).fit(lit.Model(), loader())
    finally:
        over.set()
        watcher.join()
    assert states and all(states)
    assert files(directory) == ["last.ckpt", "step=10.ckpt"]


def test_link_keeps_its_old_target_if_the_new_save_failed(lit, tmp_path):
    directory = tmp_path / "c"

    def breaks(run):
        stillframe.wait_all()
        injected = fault("fdatasync", err=errno.ENOSPC, sticky=True)
        injected.__enter__()
        broken.append(injected)

    broken = []
    run = trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(on_error="warn"),
        callbacks=[at(lit, {4: breaks}), every_steps(lit, directory, 2, save_last="link")],
        max_steps=5,
    )
    try:
        run.fit(lit.Model(), loader())
    finally:
        broken.pop().__exit__(None, None, None)
    assert files(directory) == ["last.ckpt", "step=2.ckpt"]
    assert load(directory / "last.ckpt")["global_step"] == 2


def test_link_does_not_replace_a_checkpoint_of_its_name(lit, tmp_path):
    stock, ours = fit_both(
        lit,
        tmp_path,
        lambda directory: [
            every_steps(
                lit,
                directory,
                4,
                filename="last",
                save_last="link",
                enable_version_counter=False,
            )
        ],
    )
    assert files(ours) == files(stock) == ["last.ckpt"]
    assert load(ours / "last.ckpt")["global_step"] == 8


def test_failure_to_make_a_link_fails_the_run(lit, tmp_path, monkeypatch):
    directory = tmp_path / "c"
    symlink = os.symlink

    def full(source, path, **options):
        if "step=4" in os.fspath(source):
            raise OSError(errno.ENOSPC, "no room", os.fspath(path))
        symlink(source, path, **options)

    monkeypatch.setattr(os, "symlink", full)
    plugin = lit.AsyncCheckpointIO()
    run = trainer(
        lit,
        tmp_path,
        plugin=plugin,
        callbacks=[every_steps(lit, directory, 2, save_last="link")],
        max_steps=4,
    )
    with pytest.raises(stillframe.SaveError, match=r"last\.ckpt") as caught:
        run.fit(lit.Model(), loader())
    assert (caught.value.errno, caught.value.phase) == (errno.ENOSPC, "link")
    # The old link's target is still there, and so is the newest file.
    assert files(directory) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert load(directory / "last.ckpt")["global_step"] == 2
    plugin.teardown()


def test_a_link_replaces_a_file_and_a_directory_of_its_name(lit, tmp_path):
    for nr, prepare in enumerate((lambda path: path.mkdir(), lambda path: path.write_text("x"))):
        directory = tmp_path / str(nr)
        callback = every_steps(lit, directory, 2, save_last="link")
        callback.last_model_path = str(directory / "last.ckpt")  # as after a resume
        directory.mkdir()
        prepare(directory / "last.ckpt")
        trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[callback]).fit(
            lit.Model(), loader()
        )
        assert os.readlink(directory / "last.ckpt") == "step=8.ckpt"


def test_load_through_a_link_waits_for_the_new_target(lit, tmp_path, disk):
    directory = tmp_path / "c"
    loaded = []

    class Load(lit.Callback):
        def on_train_batch_start(self, run, *args):
            if run.global_step in (2, 4):
                path = directory / "last.ckpt"
                loaded.append(run.strategy.load_checkpoint(path)["global_step"])
                loaded.append(stillframe.load(path, weights_only=False)["global_step"])

    trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(),
        callbacks=[Load(), every_steps(lit, directory, 2, save_last="link")],
        max_steps=5,
    ).fit(lit.Model(), loader())
    assert loaded == [2, 2, 4, 4]


def test_overridden_link_method_finds_its_target_on_disk(lit, tmp_path, disk):
    there = []

    class Own(lit.ModelCheckpoint):
        @staticmethod
        def _link_checkpoint(trainer, filepath, linkpath):
            there.append(os.path.exists(filepath))

    callback = Own(tmp_path / "c", every_n_train_steps=4, save_last="link", filename="{step}")
    trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[callback]).fit(
        lit.Model(), loader()
    )
    assert there and all(there)
