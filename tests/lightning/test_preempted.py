"""`deadline=` of the plugin: saves after a signal that ends the training."""

import os
import signal

import pytest
import stillframe
from fix_lightning import SLURM, at, every_steps, load, loader, trainer
from stillframe.testing import slow


@pytest.fixture(autouse=True)
def _handlers():
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def terminated(lit, tmp_path, plugin, callbacks, *, slow_s):
    """Train until SIGTERM, which comes in the third step."""
    from lightning.pytorch.utilities import exceptions
    from pytorch_lightning.utilities import exceptions as others

    def terminate(run):
        os.kill(os.getpid(), signal.SIGTERM)

    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[*callbacks, at(lit, {3: terminate})])
    with (
        slow("fdatasync", slow_s),
        pytest.raises((exceptions.SIGTERMException, others.SIGTERMException)),
    ):
        run.fit(lit.Model(), loader())
    return run


def on_exception(lit, directory):
    package = "lightning.pytorch" if lit.name == "lightning" else "pytorch_lightning"
    module = __import__(f"{package}.callbacks", fromlist=["OnExceptionCheckpoint"])
    return module.OnExceptionCheckpoint(directory)


def test_saves_and_the_checkpoint_of_the_exception_become_durable(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO(deadline=30)
    callbacks = [every_steps(lit, tmp_path / "c", 1), on_exception(lit, tmp_path / "d")]
    terminated(lit, tmp_path, plugin, callbacks, slow_s=0.1)
    assert load(tmp_path / "c" / "step=3.ckpt")["global_step"] == 3
    assert load(tmp_path / "d" / "on_exception.ckpt")["global_step"] == 3


def test_checkpoint_that_takes_too_long_is_given_up(lit, tmp_path, caplog):
    def save(run):
        run.save_checkpoint(tmp_path / "on_exception.ckpt")
        stillframe.wait_all()

    plugin = lit.AsyncCheckpointIO(deadline=0.5)
    callbacks = [at(lit, {2: save}), on_exception(lit, tmp_path)]
    terminated(lit, tmp_path, plugin, callbacks, slow_s=2)
    assert load(tmp_path / "on_exception.ckpt")["global_step"] == 2
    (line,) = [each.message for each in caplog.records if "given up" in each.message]
    assert "on_exception.ckpt is given up, and the old file stays" in line


def test_job_is_requeued_though_its_checkpoint_was_given_up(lit, tmp_path, monkeypatch, caplog):
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.pytorch.trainer.connectors import signal_connector

    if lit.name != "lightning":
        pytest.skip("the other package has an environment of its own")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    requeued = []
    monkeypatch.setattr(signal_connector, "call", lambda command: requeued.append(command) or 0)

    def signalled(run):
        with slow("fdatasync", 2):
            os.kill(os.getpid(), signal.SIGUSR2)

    run = lit.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        max_steps=6,
        limit_val_batches=0,
        plugins=[
            lit.AsyncCheckpointIO(deadline=0.5),
            SLURMEnvironment(requeue_signal=signal.SIGUSR2),
        ],
        callbacks=[at(lit, {3: signalled}), every_steps(lit, tmp_path / "c", 5)],
    )
    run.fit(lit.Model(), loader())
    assert len(requeued) == 1
    assert not (tmp_path / "hpc_ckpt_1.ckpt").exists()
    assert "hpc_ckpt_1.ckpt is given up" in caplog.text
    assert load(tmp_path / "c" / "step=5.ckpt")["global_step"] == 5


def test_preemption_block_around_a_fit_saves_and_ends_with_status_143(lit, tmp_path):
    """Lightning calls the handler of the block after its own."""
    plugin = lit.AsyncCheckpointIO()
    with pytest.raises(SystemExit) as end, stillframe.preemption(deadline=30) as p:
        run = trainer(
            lit,
            tmp_path,
            plugin=plugin,
            callbacks=[
                every_steps(lit, tmp_path / "c", 1),
                at(lit, {3: lambda run: os.kill(os.getpid(), signal.SIGTERM)}),
            ],
        )
        run.fit(lit.Model(), loader())
    assert p.requested and end.value.code == 143
    assert load(tmp_path / "c" / "step=3.ckpt")["global_step"] == 3


@pytest.mark.parametrize(("deadline", "error"), [("30", TypeError), (0, ValueError)])
def test_unusable_deadline_is_refused(lit, deadline, error):
    with pytest.raises(error, match="deadline"):
        lit.AsyncCheckpointIO(deadline=deadline)
