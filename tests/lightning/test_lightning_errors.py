"""Errors of saves are raised once, and never instead of the training's own exception."""

import errno
import logging
import signal

import pytest
import stillframe
import torch
from fix_lightning import at, every_steps, load, loader, trainer
from stillframe._save.ordered import wait_for_saves_of_path
from stillframe.testing import fault, held, slow


class Boom(Exception):
    """An exception of the training."""


def save_badly(path):
    """Return an action that saves to `path` on a failing disk and waits for the end."""

    def action(trainer):
        with fault("fdatasync", sticky=True):
            trainer.save_checkpoint(path)
            wait_for_saves_of_path(path)

    return action


def save_well(path):
    return lambda trainer: trainer.save_checkpoint(path)


def boom(trainer):
    raise Boom


def fit(pkg, tmp_path, actions, plugin=None, callbacks=()):
    plugin = pkg.AsyncCheckpointIO() if plugin is None else plugin
    run = trainer(
        pkg,
        tmp_path,
        plugin=plugin,
        callbacks=[at(pkg, actions), *callbacks],
        enable_checkpointing=bool(callbacks),
    )
    run.fit(pkg.Model(), loader())
    return plugin


def test_next_save_raises_the_error_and_is_still_made(pkg, tmp_path):
    bad, good = tmp_path / "bad.ckpt", tmp_path / "good.ckpt"
    with pytest.raises(stillframe.SaveError) as caught:
        fit(pkg, tmp_path, {2: save_badly(bad), 3: save_well(good)})
    assert caught.value.errno == errno.EIO
    assert caught.value.phase == "sync"
    assert caught.value.filename == str(bad)
    assert load(good)["global_step"] == 3
    assert not bad.exists()


def test_error_is_raised_once(lit, tmp_path):
    third = tmp_path / "third.ckpt"

    def next_save(trainer):
        with pytest.raises(stillframe.SaveError):
            trainer.save_checkpoint(tmp_path / "second.ckpt")
        trainer.save_checkpoint(third)

    plugin = fit(lit, tmp_path, {2: save_badly(tmp_path / "bad.ckpt"), 3: next_save})
    assert load(third)["global_step"] == 3
    plugin.teardown()
    stillframe.wait_all()


def test_each_save_raises_one_error_oldest_first(lit, tmp_path):
    seen = []

    def bad_again(trainer):
        with fault("fdatasync", sticky=True):
            for name in ("b.ckpt", "c.ckpt"):
                try:
                    trainer.save_checkpoint(tmp_path / name)
                except stillframe.SaveError as error:
                    seen.append(error.filename)
                wait_for_saves_of_path(tmp_path / name)

    with pytest.raises(stillframe.SaveError) as caught:
        fit(lit, tmp_path, {2: save_badly(tmp_path / "a.ckpt"), 3: bad_again})
    # The save of b raises the error of a, the save of c that of b, and teardown that of c.
    assert seen == [str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]
    assert caught.value.filename == str(tmp_path / "c.ckpt")


def test_teardown_raises_once_with_all_errors_and_the_plugin_stays_usable(pkg, tmp_path, caplog):
    plugin = pkg.AsyncCheckpointIO()
    state = {"x": torch.ones(3)}
    # On a slow disk, the first save has not ended when the second is submitted.
    with slow("pwrite", 0.2), fault("fdatasync", sticky=True):
        plugin.save_checkpoint(state, tmp_path / "a.ckpt")
        plugin.save_checkpoint(state, tmp_path / "b.ckpt")
        with pytest.raises(stillframe.SaveError) as caught:
            plugin.teardown()
    assert caught.value.filename == str(tmp_path / "a.ckpt")
    (note,) = caught.value.__notes__
    assert "b.ckpt" in note
    assert "b.ckpt" in caplog.text
    plugin.teardown()
    plugin.teardown()
    stillframe.wait_all()
    fit(pkg, tmp_path, {2: save_well(tmp_path / "good.ckpt")}, plugin=plugin)
    assert load(tmp_path / "good.ckpt")["global_step"] == 2


def test_fit_raises_the_last_saves_error_at_its_end(pkg, tmp_path):
    plugin = pkg.AsyncCheckpointIO()
    with pytest.raises(stillframe.SaveError):
        fit(pkg, tmp_path, {3: save_badly(tmp_path / "bad.ckpt")}, plugin=plugin)
    plugin.teardown()


def test_training_exception_is_not_replaced(pkg, tmp_path, caplog):
    bad = tmp_path / "bad.ckpt"
    with caplog.at_level(logging.ERROR), pytest.raises(Boom) as caught:
        fit(pkg, tmp_path, {2: save_badly(bad), 4: boom})
    assert caught.value.__context__ is None
    assert "bad.ckpt" in caplog.text
    stillframe.wait_all()


def test_keyboard_interrupt_is_not_replaced(lit, tmp_path, caplog):
    def interrupt(trainer):
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        with caplog.at_level(logging.ERROR), pytest.raises(SystemExit):
            fit(lit, tmp_path, {2: save_badly(tmp_path / "bad.ckpt"), 4: interrupt})
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "bad.ckpt" in caplog.text


def test_save_on_exception_does_not_replace_the_exception(pkg, tmp_path, caplog):
    states = []

    class Emergency(pkg.Callback):
        def on_exception(self, trainer, module, exception):
            path = tmp_path / "emergency.ckpt"
            trainer.save_checkpoint(path)
            states.append(path.exists())  # durable on return: training has ended
            with fault("fdatasync", sticky=True):
                trainer.save_checkpoint(tmp_path / "failed.ckpt")

    with caplog.at_level(logging.ERROR), pytest.raises(Boom):
        fit(
            pkg,
            tmp_path,
            {2: save_badly(tmp_path / "bad.ckpt"), 4: boom},
            callbacks=[Emergency(), every_steps(pkg, tmp_path / "c", 100)],
        )
    assert states == [True]
    assert "bad.ckpt" in caplog.text
    assert "failed.ckpt" in caplog.text


def test_fit_inside_an_except_block_still_raises(lit, tmp_path):
    try:
        raise Boom
    except Boom:
        with pytest.raises(stillframe.SaveError):
            fit(lit, tmp_path, {3: save_badly(tmp_path / "bad.ckpt")})


def test_a_save_outside_training_raises_its_own_error(pkg, tmp_path):
    run = trainer(pkg, tmp_path, plugin=pkg.AsyncCheckpointIO())
    run.fit(pkg.Model(), loader())
    with fault("fdatasync", sticky=True), pytest.raises(stillframe.SaveError):
        run.save_checkpoint(tmp_path / "bad.ckpt")
    run.save_checkpoint(tmp_path / "good.ckpt")
    assert load(tmp_path / "good.ckpt")["global_step"] == 8


def test_object_that_cannot_be_pickled_raises_in_the_call_and_keeps_earlier_errors(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO()
    with fault("fdatasync", sticky=True):
        plugin.save_checkpoint({"x": 1}, tmp_path / "bad.ckpt")
        wait_for_saves_of_path(tmp_path / "bad.ckpt")
    with pytest.raises((AttributeError, TypeError)):
        plugin.save_checkpoint({"x": lambda: None}, tmp_path / "lambda.ckpt")
    with pytest.raises(stillframe.SaveError):
        plugin.teardown()
    assert list(tmp_path.glob("*.ckpt")) == []


def test_teardown_called_during_an_exception_only_logs(lit, tmp_path, caplog):
    plugin = lit.AsyncCheckpointIO()
    with caplog.at_level(logging.ERROR), pytest.raises(Boom):
        try:
            with fault("fdatasync", sticky=True):
                plugin.save_checkpoint({"x": 1}, tmp_path / "bad.ckpt")
                wait_for_saves_of_path(tmp_path / "bad.ckpt")
            raise Boom
        finally:
            plugin.teardown()
    assert "bad.ckpt" in caplog.text


def test_an_error_that_wait_all_raised_is_not_raised_again(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO()
    with fault("fdatasync", sticky=True):
        plugin.save_checkpoint({"x": 1}, tmp_path / "bad.ckpt")
        with pytest.raises(stillframe.SaveError):
            stillframe.wait_all()
    plugin.save_checkpoint({"x": 1}, tmp_path / "good.ckpt")
    plugin.teardown()


def test_the_last_good_checkpoint_outlives_a_disk_that_fails(lit, tmp_path):
    good, bad = tmp_path / "good.ckpt", tmp_path / "bad.ckpt"

    def rotate(trainer):
        wait_for_saves_of_path(good)
        with fault("fdatasync", sticky=True):
            trainer.save_checkpoint(bad)
            trainer.strategy.remove_checkpoint(good)
            wait_for_saves_of_path(good, follow_link=False)

    with pytest.raises(stillframe.SaveError):
        fit(lit, tmp_path, {2: save_well(good), 3: rotate})
    assert load(good)["global_step"] == 2
    assert not bad.exists()


def test_rotation_keeps_the_last_good_file_if_new_files_cannot_be_made(lit, tmp_path):
    """With on_error="warn", ModelCheckpoint goes on and removes the previous file."""
    directory = tmp_path / "c"
    for step in (4, 6, 8):
        (directory / f"step={step}.ckpt").mkdir(parents=True)
    callback = every_steps(lit, directory, 2, enable_version_counter=False)
    plugin = lit.AsyncCheckpointIO(on_error="warn")
    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[callback])
    with pytest.warns(UserWarning, match="directory"):
        run.fit(lit.Model(), loader())
    assert load(directory / "step=2.ckpt")["global_step"] == 2


def test_rotation_keeps_the_last_good_file_after_refused_saves(lit, tmp_path):
    good, slow_one, refused, newer = (tmp_path / f"{name}.ckpt" for name in ("a", "b", "c", "d"))

    def rotate(trainer):
        stillframe.wait_all()
        with held("fdatasync"):
            trainer.save_checkpoint(slow_one)
            with pytest.warns(UserWarning, match="max_in_flight"):
                trainer.save_checkpoint(refused)
            trainer.strategy.remove_checkpoint(good)
        stillframe.wait_all()
        assert good.exists()
        trainer.save_checkpoint(newer)
        trainer.strategy.remove_checkpoint(good)

    plugin = lit.AsyncCheckpointIO(max_in_flight=1, when_busy="raise", on_error="warn")
    fit(lit, tmp_path, {2: save_well(good), 3: rotate}, plugin)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["b.ckpt", "d.ckpt"]


def test_every_failed_save_is_warned_of_at_the_end(pkg, tmp_path):
    plugin = pkg.AsyncCheckpointIO(on_error="warn")
    with fault("rename", sticky=True), pytest.warns(UserWarning) as caught:
        with held("fdatasync"):  # neither save has failed when the other one is made
            for name in ("a", "b"):
                plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / f"{name}.ckpt")
        plugin.teardown()
    messages = [str(each.message) for each in caught]
    assert len(messages) == 2 and "a.ckpt" in messages[0] and "b.ckpt" in messages[1]
    stillframe.save({}, tmp_path / "good.pt")  # a later remove needs a successful save before it
