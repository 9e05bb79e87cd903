"""CPUOffloadCallback: whatever writes the checkpoint, it writes the state of the call."""

import collections
import dataclasses
import gc
import importlib
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
import stillframe
import torch
from fix_lightning import assert_same, at, copied, every_steps, load, loader, trainer

KEYS = ("state_dict", "optimizer_states", "lr_schedulers")
Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture
def offload(pkg):
    """The callback's class in each of the two packages."""
    return importlib.import_module(f"stillframe.{pkg.name}").CPUOffloadCallback


@pytest.fixture
def strategies(pkg):
    name = "lightning.pytorch" if pkg.name == "lightning" else pkg.name
    return importlib.import_module(f"{name}.strategies")


@pytest.fixture
def small_pool(monkeypatch):
    """A default engine of one block of 1 MiB."""
    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=1 << 20) as engine:
        monkeypatch.setattr(sys.modules["stillframe.snapshot"], "default_engine", lambda: engine)
        yield engine


@pytest.fixture(autouse=True)
def nothing_stays_leased():
    yield
    gc.collect()
    assert stillframe.default_engine().stats()["leased_bytes"] == 0


def lightning_async(pkg):
    name = "lightning.pytorch" if pkg.name == "lightning" else pkg.name
    return importlib.import_module(f"{name}.plugins.io").AsyncCheckpointIO


def recorder(pkg, seen):
    """Keeps a copy of what a checkpoint is when the callbacks get it; stands before ours."""

    class Recorder(pkg.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            seen.append(copied({key: checkpoint[key] for key in KEYS}))

    return Recorder()


def of(rank=0, strategy=None):
    """As much of a Trainer as the callback looks at."""
    return SimpleNamespace(global_rank=rank, strategy=strategy, optimizers=[])


def made(cls):
    """An instance that was not initialised, for what cannot be constructed here."""
    return object.__new__(cls)


def save(callback, checkpoint, rank=0):
    callback.on_save_checkpoint(of(rank), None, checkpoint)
    return checkpoint


# ---- construction ----


def test_the_arguments_are_attributes(offload):
    callback = offload()
    assert callback.offload_keys == list(KEYS)
    assert callback.log_skipped is False
    callback = offload(["a"], True)
    assert (callback.offload_keys, callback.log_skipped) == (["a"], True)


@pytest.mark.parametrize("keys", ["state_dict", [1], ["a", None], {"a"}, ("a",), 7])
def test_keys_that_are_no_list_of_strings_are_refused(offload, keys):
    with pytest.raises(TypeError, match="list of strings"):
        offload(offload_keys=keys)


# ---- strategies ----


@pytest.mark.parametrize(
    ("name", "enabled"),
    [
        ("DDPStrategy", True),
        ("SingleDeviceStrategy", True),
        ("FSDPStrategy", False),
        ("ModelParallelStrategy", False),
        ("DeepSpeedStrategy", False),
        ("XLAStrategy", False),
        ("SingleDeviceXLAStrategy", False),
    ],
)
@pytest.mark.parametrize("subclass", [False, True])
def test_every_strategy_has_its_rule(offload, strategies, caplog, name, enabled, subclass):
    cls = getattr(strategies, name)
    if subclass:
        cls = type("SomebodysOwn", (cls,), {})
    callback = offload()
    with caplog.at_level(logging.DEBUG, "stillframe"):
        callback.setup(of(strategy=made(cls)), None, "fit")
    assert callback.is_enabled is enabled
    assert callback.state_dict()["is_enabled"] is enabled
    assert cls.__name__ in caplog.text
    if not enabled:
        reason = name.removesuffix("Strategy").removeprefix("SingleDevice")
        assert f"disabled for {cls.__name__}: {reason}" in caplog.text


def test_data_parallel_is_known_by_its_name(offload):
    callback = offload()
    callback.setup(of(strategy=type("DataParallelStrategy", (), {})()), None, "fit")
    assert callback.is_enabled


def test_an_unknown_strategy_disables_the_callback(offload, caplog):
    callback = offload()
    callback.setup(of(strategy=SimpleNamespace()), None, "fit")
    assert not callback.is_enabled
    assert "unknown" in caplog.text
    tensor = torch.ones(3)
    checkpoint = save(callback, {"state_dict": {"x": tensor}})
    assert checkpoint["state_dict"]["x"] is tensor
    assert callback.state_dict()["checkpoint_count"] == 0


def test_other_ranks_do_nothing(offload):
    callback, tensor = offload(), torch.ones(3)
    assert save(callback, {"state_dict": {"x": tensor}}, rank=1)["state_dict"]["x"] is tensor
    assert callback.state_dict()["checkpoint_count"] == 0


# ---- what a save does ----


def test_only_the_keys_asked_for_are_copied(offload, caplog):
    inner = {"x": torch.ones(3)}
    checkpoint = {"state_dict": inner, "callbacks": {"y": inner["x"]}, "epoch": 3}
    with caplog.at_level(logging.DEBUG, "stillframe"):
        save(offload(["state_dict", "missing"]), checkpoint)
    assert checkpoint["state_dict"] is not inner
    assert checkpoint["state_dict"]["x"] is not inner["x"]
    assert checkpoint["state_dict"]["x"].equal(inner["x"])
    assert checkpoint["callbacks"]["y"] is inner["x"]
    missing = [each for each in caplog.records if "missing" in each.getMessage()]
    assert [each.levelno for each in missing] == [logging.DEBUG]


def test_ties_are_kept_across_keys_and_containers_keep_their_types(offload):
    tensor = torch.nn.Parameter(torch.ones(4, 4))
    module = torch.nn.BatchNorm1d(2)

    @dataclasses.dataclass
    class Extra:
        value: int

    extra = Extra(1)
    checkpoint = {
        "state_dict": module.state_dict(),
        "optimizer_states": [
            {"p": tensor, "t": tensor.data.t(), "pair": Pair(tensor, 1), "extra": extra},
            collections.defaultdict(list, a=[tensor]),
        ],
        "lr_schedulers": [collections.OrderedDict(last=tensor)],
    }
    metadata = checkpoint["state_dict"]._metadata
    save(offload(), checkpoint)
    first, second = checkpoint["optimizer_states"]
    assert checkpoint["state_dict"]._metadata == metadata
    assert isinstance(first["p"], torch.nn.Parameter)
    assert first["p"] is not tensor
    assert first["pair"] == Pair(first["p"], 1)
    assert type(first["pair"]) is Pair
    assert first["t"].untyped_storage()._cdata == first["p"].untyped_storage()._cdata
    assert type(second) is collections.defaultdict
    assert second["a"][0] is first["p"]
    assert checkpoint["lr_schedulers"][0]["last"] is first["p"]
    assert first["extra"] is extra


def test_a_save_logs_one_line_and_the_rest_at_debug(offload, caplog):
    checkpoint = {"state_dict": {"x": torch.ones(3), "y": torch.ones(2)}}
    with caplog.at_level(logging.DEBUG, "stillframe"):
        save(offload(), checkpoint)
    loud = [each.getMessage() for each in caplog.records if each.levelno > logging.DEBUG]
    assert len(loud) == 1
    assert "checkpoint 1: 2 tensors, 20 B" in loud[0]


class Custom:
    """Neither a container nor a plain value."""


@pytest.mark.parametrize(("log_skipped", "level"), [(False, logging.DEBUG), (True, logging.INFO)])
def test_custom_objects_are_named(offload, caplog, log_skipped, level):
    plain = [1, 2.0, None, "text", True, (0.9, 0.999), torch.float32]
    checkpoint = {"state_dict": {"plain": plain, "own": [Custom() for _ in range(25)]}}
    with caplog.at_level(logging.DEBUG, "stillframe"):
        save(offload(log_skipped=log_skipped), checkpoint)
    lines = [each for each in caplog.records if "custom" in each.getMessage()]
    assert [each.levelno for each in lines] == [level]
    text = lines[0].getMessage()
    assert "25 custom objects" in text
    shown = [place for place in range(25) if f"Custom at 'state_dict.own.{place}'" in text]
    assert shown == (list(range(25)) if log_skipped else [*range(10), *range(15, 25)])


class Unwilling(torch.Tensor):
    def __reduce_ex__(self, protocol):
        raise ValueError("not me")


def test_a_key_that_cannot_be_copied_stays_and_is_named(offload, caplog):
    unwilling = {"x": torch.ones(2).as_subclass(Unwilling)}
    tensor = torch.ones(3)
    checkpoint = {"state_dict": {"x": tensor}, "optimizer_states": unwilling}
    callback = offload()
    save(callback, checkpoint)
    assert checkpoint["optimizer_states"] is unwilling
    assert checkpoint["state_dict"]["x"] is not tensor
    assert checkpoint["state_dict"]["x"].equal(tensor)
    assert "'optimizer_states' stays as it is" in caplog.text
    assert "not me" in caplog.text
    assert callback.state_dict()["checkpoint_count"] == 1


def test_a_pool_too_small_means_ordinary_memory_and_a_line(offload, small_pool, caplog):
    tensor = torch.randn(1000, 300)
    checkpoint = save(offload(), {"state_dict": {"x": tensor, "view": tensor[5:]}})
    new = checkpoint["state_dict"]
    tensor_before = tensor.clone()
    tensor.zero_()
    assert new["x"].equal(tensor_before)
    assert new["view"].untyped_storage()._cdata == new["x"].untyped_storage()._cdata
    assert "ordinary memory" in caplog.text
    assert small_pool.stats()["leased_bytes"] == 0


def test_checkpoints_that_nobody_drops_never_block(offload, small_pool):
    callback = offload()
    kept = [
        save(callback, {"state_dict": {"x": torch.full((50_000,), float(n))}}) for n in range(6)
    ]
    for number, checkpoint in enumerate(kept):
        assert checkpoint["state_dict"]["x"].eq(number).all()


# ---- real runs ----


def writer(pkg, kind, kept):
    """A CheckpointIO of each kind; `kept` gets what a user's own keeps for later."""
    if kind == "sync":
        return pkg.TorchCheckpointIO()
    if kind == "async":
        return lightning_async(pkg)()
    if kind == "ours":
        return pkg.AsyncCheckpointIO()

    class Later(pkg.TorchCheckpointIO):
        """Keeps the dictionary for a thread that begins when training is over."""

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            kept.append((checkpoint, path))

    return Later()


def write_later(kept):
    def write():
        while kept:
            checkpoint, path = kept.pop(0)
            torch.save(checkpoint, path)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kind", ["sync", "async", "ours", "later"])
def test_the_file_holds_the_state_of_the_save(pkg, offload, tmp_path, kind):
    seen, kept = [], []
    callback = offload()
    run = trainer(
        pkg,
        tmp_path,
        plugin=writer(pkg, kind, kept),
        callbacks=[recorder(pkg, seen), callback, every_steps(pkg, tmp_path, 2, save_top_k=-1)],
        max_steps=8,
    )
    run.fit(pkg.Model(), loader())
    if kind == "later":
        assert len(kept) == 4
        assert stillframe.default_engine().stats()["leased_bytes"] > 0
        write_later(kept)
    for number, expected in enumerate(seen):
        found = load(tmp_path / f"step={2 * number + 2}.ckpt")
        assert_same({key: found[key] for key in KEYS}, expected)
    state = callback.state_dict()
    assert state["checkpoint_count"] == 4
    assert (state["total_time_saved"] == 0) == (kind == "ours")
    assert state["total_memory_freed"] == 0


def test_a_writer_slower_than_training_sees_no_byte_of_a_later_step(lit, tmp_path):
    """Each file is written when the run is three saves further, by Lightning's own thread."""
    from stillframe.lightning import CPUOffloadCallback

    seen, go = [], threading.Semaphore(0)

    class Slow(lit.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            assert go.acquire(timeout=60)
            super().save_checkpoint(checkpoint, path, storage_options)

    class Releases(lit.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step > 3:
                go.release()

        def on_train_end(self, trainer, module):
            go.release(20)

    run = trainer(
        lit,
        tmp_path,
        plugin=lightning_async(lit)(Slow()),
        callbacks=[
            recorder(lit, seen),
            CPUOffloadCallback(),
            Releases(),
            every_steps(lit, tmp_path, 1, save_top_k=-1),
        ],
        max_steps=10,
    )
    run.fit(lit.Model(), loader(nr_samples=64))
    assert len(seen) == 10
    for number, expected in enumerate(seen):
        found = load(tmp_path / f"step={number + 1}.ckpt")
        assert_same({key: found[key] for key in KEYS}, expected)


def test_training_itself_is_not_changed(pkg, offload, tmp_path):
    losses = []
    for callbacks in ([], [offload()]):
        model = pkg.Model()
        before = [id(each) for each in model.parameters()]
        trainer(
            pkg, tmp_path, callbacks=[*callbacks, every_steps(pkg, tmp_path, 2)], max_steps=6
        ).fit(model, loader())
        assert [id(each) for each in model.parameters()] == before
        losses.append(model.losses)
    assert losses[0] == losses[1]


def test_its_state_comes_back_with_a_resumed_run(pkg, offload, tmp_path):
    callbacks = [offload(), every_steps(pkg, tmp_path, 2, save_top_k=-1)]
    trainer(pkg, tmp_path, callbacks=callbacks, max_steps=4).fit(pkg.Model(), loader())
    resumed = offload()
    callbacks = [resumed, every_steps(pkg, tmp_path, 2, save_top_k=-1)]
    trainer(pkg, tmp_path, callbacks=callbacks, max_steps=6).fit(
        pkg.Model(), loader(), ckpt_path=tmp_path / "step=4.ckpt"
    )
    # The checkpoint of step 4 was made when one had been counted before it.
    assert resumed.state_dict()["checkpoint_count"] == 3
    assert resumed.state_dict()["total_time_saved"] > 0


def test_the_state_goes_round(offload, strategies):
    callback = offload()
    save(callback, {"state_dict": {"x": torch.ones(3)}})
    callback.setup(of(strategy=made(strategies.FSDPStrategy)), None, "fit")
    state = callback.state_dict()
    assert list(state) == [
        "checkpoint_count",
        "total_time_saved",
        "total_memory_freed",
        "is_enabled",
    ]
    other = offload()
    other.load_state_dict(state)
    assert other.state_dict() == state
    # A strategy that was looked at is believed more than an old checkpoint.
    decided = offload()
    decided.setup(of(strategy=made(strategies.DDPStrategy)), None, "fit")
    decided.load_state_dict(state)
    assert decided.is_enabled


def test_an_exception_in_mid_run_leaves_nothing_leased(pkg, offload, tmp_path, caplog):
    def fail(trainer):
        raise RuntimeError("in mid-run")

    callback = offload()
    run = trainer(
        pkg,
        tmp_path,
        plugin=lightning_async(pkg)(),
        callbacks=[callback, every_steps(pkg, tmp_path, 1), at(pkg, {5: fail})],
    )
    with (
        caplog.at_level(logging.INFO, "stillframe"),
        pytest.raises(RuntimeError, match="in mid-run"),
    ):
        run.fit(pkg.Model(), loader())
    assert callback.state_dict()["checkpoint_count"] == 4
    assert "RuntimeError ended the run; 4 checkpoints" in caplog.text
    # nothing_stays_leased looks at the rest


def test_the_start_of_training_tells_what_to_expect(pkg, offload, tmp_path, caplog):
    callback = offload()
    with caplog.at_level(logging.INFO, "stillframe"):
        trainer(pkg, tmp_path, callbacks=[callback], max_steps=1).fit(pkg.Model(), loader())
    parameters = 300 * 300 + 300 + 2 * 300 + 300 + 1
    model = 4 * (parameters + 2 * 300) + 8  # BatchNorm's statistics and counter
    checkpoint = model + 2 * 4 * parameters + 4 * 6  # AdamW: two moments, a counter each
    assert f"{parameters:,} parameters, {parameters:,} of them trained" in caplog.text
    assert f"model {model / 1000:.3g} kB, checkpoint about {checkpoint / 1e6:.3g} MB" in caplog.text


def test_sizes_are_of_the_real_dtypes_and_the_real_optimizer(offload, caplog):
    module = torch.nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)
    fake = of()
    callback = offload()
    for make, size in (
        (lambda p: torch.optim.SGD(p, lr=0.1), "2 MB"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "4 MB"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "8 MB"),
        (lambda p: torch.optim.LBFGS(p), "2 MB and the state of LBFGS"),
    ):
        fake.optimizers = [make(module.parameters())]
        caplog.clear()
        with caplog.at_level(logging.INFO, "stillframe"):
            callback.on_train_start(fake, module)
        assert f"model 2 MB, checkpoint about {size}" in caplog.text
