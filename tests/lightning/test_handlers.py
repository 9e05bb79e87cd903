"""A save inside any kind of signal handler is durable on return."""

import functools
import os
import signal
import time

import pytest
from fix_callers import save_and_compare, waits
from fix_lightning import SLURM, at, load, loader, trainer
from stillframe._lightning.work import Work
from stillframe.testing import slow


class ByMethod:
    def __init__(self, save):
        self.save = save

    def handle(self, signum, frame):
        self.save()


class ByCall(ByMethod):
    def __call__(self, signum, frame):
        self.save()


def plain(save):
    def handler(signum, frame):
        save()

    return handler


def resets_itself(save):
    def handler(signum, frame):
        signal.signal(signum, signal.SIG_IGN)
        del signum, frame
        save()

    return handler


def decorated(save):
    def handler(signum, frame):  # a plain handler, which no other mechanism recognises
        save()

    @functools.wraps(handler)
    def wrapper(*args, **kwargs):
        return handler(*args, **kwargs)

    return wrapper


def decorated_with_an_option(save):
    def handler(signum, frame):  # a plain handler, which no other mechanism recognises
        save()

    @functools.wraps(handler)
    def wrapper(*args, twice=False):
        return handler(*args)

    return wrapper


HANDLERS = {
    "a function": plain,
    "one that resets itself": resets_itself,
    "a decorated one": decorated,
    "one that is decorated with an option": decorated_with_an_option,
    "a method": lambda save: ByMethod(save).handle,
    "an object": ByCall,
    "a partial": lambda save: functools.partial(lambda save, signum, frame: save(), save),
    "a lambda": lambda save: lambda *_: save(),
}


@pytest.fixture
def sigusr2():
    handler = signal.getsignal(signal.SIGUSR2)
    yield signal.SIGUSR2
    signal.signal(signal.SIGUSR2, handler)


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_save_of_a_signal_handler_is_durable_on_return(lit, tmp_path, sigusr2, kind):
    seen = []
    by_handler, after = tmp_path / "handler.ckpt", tmp_path / "after.ckpt"

    class Signalled(lit.Callback):
        def on_train_start(self, trainer, module):
            save = functools.partial(save_and_compare, trainer, by_handler, seen)
            signal.signal(sigusr2, HANDLERS[kind](save))

        def on_train_batch_start(self, trainer, module, *args):
            if trainer.global_step == 2:
                os.kill(os.getpid(), sigusr2)
                time.sleep(0.01)
                save_and_compare(trainer, after, seen)

    trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[Signalled()]).fit(
        lit.Model(), loader()
    )
    assert seen == [True, False]
    assert load(by_handler)["global_step"] == 2


def test_handler_installed_during_an_epoch_saves_durably(lit, tmp_path, sigusr2):
    seen = []

    def observe(run):
        save = functools.partial(save_and_compare, run, tmp_path / "handler.ckpt", seen)
        signal.signal(sigusr2, plain(save))
        os.kill(os.getpid(), sigusr2)
        time.sleep(0.01)

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[at(lit, {2: observe})])
    run.fit(lit.Model(), loader())
    assert seen == [True]


def test_interrupted_save_stays_the_newest_after_a_handlers_save(
    lit, tmp_path, sigusr2, monkeypatch
):
    """After the handler, loggers must be called for the interrupted call's own save."""
    pop_next_error, plugin, newest = Work.pop_next_error, lit.AsyncCheckpointIO(), []

    def interrupted(self):
        if not newest:
            newest.append("is being saved")
            os.kill(os.getpid(), sigusr2)
            time.sleep(0.01)
        return pop_next_error(self)

    def observe(run):
        signal.signal(sigusr2, lambda *_: run.save_checkpoint(tmp_path / "handler.ckpt"))
        monkeypatch.setattr(Work, "pop_next_error", interrupted)
        run.save_checkpoint(tmp_path / "a.ckpt")
        newest.append(os.path.basename(plugin._checkpoints._work.newest.path))

    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[at(lit, {2: observe})])
    run.fit(lit.Model(), loader())
    assert (tmp_path / "handler.ckpt").exists()
    assert newest[1:] == ["a.ckpt"]


def test_hpc_checkpoint_is_durable_on_return_from_any_caller(lit, tmp_path):
    seen = []

    def observe(run):
        save_and_compare(run, tmp_path / "hpc_ckpt_3.ckpt", seen)

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[at(lit, {2: observe})])
    run.fit(lit.Model(), loader())
    assert seen == [True]


def test_decorator_shared_with_a_signal_handler_does_not_count_as_a_handler(lit, tmp_path, sigusr2):
    seen = []

    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    signal.signal(sigusr2, logged(lambda signum, frame: None))

    @logged
    def fit(extra):
        run = trainer(
            lit,
            tmp_path,
            plugin=lit.AsyncCheckpointIO(),
            callbacks=[at(lit, {2: lambda t: save_and_compare(t, tmp_path / "a.ckpt", seen)})],
        )
        run.fit(lit.Model(), loader())

    fit(1)
    assert seen == [False]


def test_slurms_requeue_finds_the_checkpoint_on_the_disk(lit, tmp_path, monkeypatch):
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.pytorch.trainer.connectors import signal_connector

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    requeued = []

    def requeue(command):
        requeued.append((command, [path.name for path in tmp_path.glob("hpc_ckpt*")]))
        return 0

    monkeypatch.setattr(signal_connector, "call", requeue)

    def preempt(trainer):
        with slow("fdatasync", 0.3):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.01)

    plugin = lit.AsyncCheckpointIO()
    run = lit.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        max_steps=4,
        plugins=[plugin, SLURMEnvironment(requeue_signal=signal.SIGUSR2)],
        callbacks=[at(lit, {2: preempt})],
    )
    run.fit(lit.Model(), loader())
    assert requeued == [(["scontrol", "requeue", "1"], ["hpc_ckpt_1.ckpt"])]
    assert load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 2


def test_removes_and_links_of_a_signal_handler_are_done_on_return(
    lit, tmp_path, sigusr2, monkeypatch
):
    waited = waits(monkeypatch)
    plugin = lit.AsyncCheckpointIO()
    seen, old, link = [], tmp_path / "old.ckpt", tmp_path / "last.ckpt"

    def observe(run):
        def handler(signum, frame):
            del waited[:]
            plugin._checkpoints.link(run, old, link)
            plugin.remove_checkpoint(tmp_path / "nothing.ckpt")
            seen.append((len(waited), link.exists()))

        signal.signal(sigusr2, handler)
        run.save_checkpoint(old)
        os.kill(os.getpid(), sigusr2)
        time.sleep(0.01)

    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[at(lit, {2: observe})])
    run.fit(lit.Model(), loader())
    assert seen == [(2, True)]
