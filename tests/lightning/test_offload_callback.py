"""CPUOffloadCallback alone: arguments, strategies, copies, state and log."""

import collections
import concurrent.futures
import dataclasses
import logging
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import stillframe
import torch
from fix_offload import (
    KEYS,
    leased,
    nothing_stays_leased,
    offload,
    part_of,
    save,
    small_pool,
    strategies,
    trainer_stub,
)
from stillframe.testing import slow

__all__ = ["nothing_stays_leased", "offload", "small_pool", "strategies"]  # fixtures

Pair = collections.namedtuple("Pair", "first second")


# ---- construction ----


def test_constructor_arguments_can_be_read_as_attributes(offload):
    callback = offload()
    assert callback.offload_keys == list(KEYS)
    assert offload([]).offload_keys == []
    assert callback.log_skipped is False
    callback = offload(["a"], True)
    assert (callback.offload_keys, callback.log_skipped) == (["a"], True)


@pytest.mark.parametrize("keys", ["state_dict", [1], ["a", None], {"a"}, ("a",), 7])
def test_keys_that_are_no_list_of_strings_are_refused(offload, keys):
    with pytest.raises(TypeError, match="list of strings"):
        offload(offload_keys=keys)


def test_flag_that_is_not_a_bool_is_refused(offload):
    with pytest.raises(TypeError, match="log_skipped has to be True or False, not 'no'"):
        offload(log_skipped="no")


# ---- strategies ----


def instance_of(cls):
    """Return a strategy, not initialised if this machine cannot construct it."""
    try:
        return cls("cpu") if "SingleDeviceStrategy" in str(cls.__mro__[:2]) else cls()
    except Exception:  # if a package is missing, each strategy raises another error
        return object.__new__(cls)


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
def test_every_strategy_is_supported_or_disabled_as_documented(
    offload, strategies, caplog, name, enabled, subclass
):
    cls = getattr(strategies, name)
    if subclass:
        cls = type("SomebodysOwn", (cls,), {})
    callback = offload()
    with caplog.at_level(logging.DEBUG, "stillframe"):
        callback.setup(trainer_stub(strategy=instance_of(cls)), None, "fit")
    assert callback.is_enabled is enabled
    assert callback.state_dict()["is_enabled"] is enabled
    assert cls.__name__ in caplog.text
    if not enabled:
        reason = name.removesuffix("Strategy").removeprefix("SingleDevice")
        assert f"disabled for {cls.__name__}: {reason}" in caplog.text


@pytest.mark.parametrize("subclass", [False, True])
def test_data_parallel_is_recognised_by_its_name(offload, subclass):
    cls = type("DataParallelStrategy", (), {})
    callback = offload()
    callback.setup(
        trainer_stub(strategy=(type("Own", (cls,), {}) if subclass else cls)()), None, "fit"
    )
    assert callback.is_enabled


def test_strategy_is_checked_again_at_every_setup(offload, strategies):
    callback = offload()
    assert callback.is_enabled
    for name, enabled in (("FSDPStrategy", False), ("DDPStrategy", True), ("XLAStrategy", False)):
        callback.setup(
            trainer_stub(strategy=object.__new__(getattr(strategies, name))), None, "validate"
        )
        assert callback.is_enabled is enabled


def test_only_rank_0_says_that_the_callback_is_disabled(offload, caplog):
    offload().setup(trainer_stub(rank=1, strategy=SimpleNamespace()), None, "fit")
    assert not caplog.records


def test_disabled_callback_changes_nothing(offload, strategies, caplog):
    callback, tensor = offload(), torch.ones(3)
    fake = trainer_stub(strategy=object.__new__(strategies.FSDPStrategy))
    callback.setup(fake, None, "fit")
    caplog.clear()
    with caplog.at_level(logging.INFO, "stillframe"):
        callback.on_train_start(fake, torch.nn.Linear(1, 1))
        checkpoint = save(callback, {"state_dict": {"x": tensor}}, strategy=fake.strategy)
        callback.on_train_end(fake, None)
    assert checkpoint["state_dict"]["x"] is tensor
    assert callback.state_dict() == {
        "checkpoint_count": 0,
        "total_time_saved": 0.0,
        "total_memory_freed": 0.0,
        "is_enabled": False,
    }
    assert not caplog.records


def test_a_strategy_of_the_other_package_is_unknown(pkg, offload, caplog):
    other = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}[pkg.name]
    ddp = part_of(SimpleNamespace(name=other), "strategies").DDPStrategy
    callback = offload()
    callback.setup(trainer_stub(strategy=object.__new__(ddp)), None, "fit")
    assert not callback.is_enabled
    assert part_of(pkg, "strategies").__name__ in caplog.text


def test_an_unknown_strategy_disables_the_callback(offload, caplog):
    callback = offload()
    callback.setup(trainer_stub(strategy=SimpleNamespace()), None, "fit")
    assert not callback.is_enabled
    assert "unknown" in caplog.text
    tensor = torch.ones(3)
    checkpoint = save(callback, {"state_dict": {"x": tensor}})
    assert checkpoint["state_dict"]["x"] is tensor
    assert callback.state_dict()["checkpoint_count"] == 0


def test_callback_copies_nothing_on_ranks_other_than_zero(offload):
    callback, tensor = offload(), torch.ones(3)
    assert save(callback, {"state_dict": {"x": tensor}}, rank=1)["state_dict"]["x"] is tensor
    assert callback.state_dict()["checkpoint_count"] == 0


# ---- what a save does ----


def test_only_the_requested_keys_are_copied(offload, caplog):
    inner = {"x": torch.ones(3)}
    checkpoint = {"state_dict": inner, "callbacks": {"y": inner["x"]}, "epoch": 3}
    with caplog.at_level(logging.DEBUG, "stillframe"):
        callback = offload(["state_dict", "missing"])
        save(callback, checkpoint)
    assert checkpoint["state_dict"] is not inner
    assert checkpoint["state_dict"]["x"] is not inner["x"]
    assert checkpoint["state_dict"]["x"].equal(inner["x"])
    assert checkpoint["callbacks"]["y"] is inner["x"]
    with caplog.at_level(logging.DEBUG, "stillframe"):
        save(callback, {"state_dict": {}})
    missing = [each for each in caplog.records if "'missing'" in each.getMessage()]
    assert [each.levelno for each in missing] == [logging.WARNING, logging.DEBUG]
    assert "The checkpoint has 'state_dict', 'callbacks', 'epoch'" in missing[0].getMessage()


def test_missing_optional_checkpoint_key_is_not_reported(offload, caplog):
    callback = offload(["extra", "lr_schedulers"])
    save(callback, {"extra": torch.ones(3)})
    save(callback, {"state_dict": {}})
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


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


def test_the_modules_own_tensors_are_untouched(offload):
    module = torch.nn.Linear(30, 30)
    before = [(id(each), each.data_ptr(), each.clone()) for each in module.parameters()]
    checkpoint = save(offload(), {"state_dict": module.state_dict()})
    for each in checkpoint["state_dict"].values():
        each.zero_()
    for each, (identity, address, value) in zip(module.parameters(), before, strict=True):
        assert (id(each), each.data_ptr()) == (identity, address)
        assert each.equal(value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64]
)
def test_callback_copies_every_dtype_byte_for_byte(offload, dtype):
    tensor = torch.randint(0, 100, (5, 7)).to(dtype)
    new = save(offload(), {"state_dict": {"x": tensor}})["state_dict"]["x"]
    assert (new.dtype, new.shape, new.stride()) == (dtype, tensor.shape, tensor.stride())
    assert new.untyped_storage().tolist() == tensor.untyped_storage().tolist()


def test_gpu_memory_is_logged_and_added_up(offload, monkeypatch, caplog):
    allocated = iter([5_000_000_000, 3_000_000_000, 3_000_000_000, 3_500_000_000])
    module = sys.modules["stillframe._lightning.offload"]
    monkeypatch.setattr(module, "_get_allocated_gpu_bytes", lambda: next(allocated))
    callback = offload()
    with caplog.at_level(logging.DEBUG, "stillframe"):
        for _ in range(2):
            save(callback, {"state_dict": {"x": torch.ones(3)}})
    assert "GPU memory before: 5 GB" in caplog.text
    assert "GPU memory after: 3 GB, freed: 2 GB; in all 1 checkpoints" in caplog.text
    assert "GPU memory after: 3.5 GB, freed: 0 B; in all 2 checkpoints" in caplog.text
    # Memory that other code allocated meanwhile counts neither as freed nor as taken.
    assert callback.state_dict()["total_memory_freed"] == 2.0


def test_device_tensors_are_dropped_before_freed_memory_is_counted(offload, monkeypatch):
    tensor, there = torch.ones(3), []
    own = weakref.ref(tensor)
    checkpoint = {"state_dict": {"x": tensor}}
    del tensor
    module = sys.modules["stillframe._lightning.offload"]
    monkeypatch.setattr(
        module, "_get_allocated_gpu_bytes", lambda: there.append(own() is not None) or 0
    )
    save(offload(), checkpoint)
    assert there == [True, False]


def test_totals_are_logged_at_the_end(offload, caplog):
    callback = offload()
    callback.load_state_dict(
        {"checkpoint_count": 4, "total_time_saved": 2.0, "total_memory_freed": 1.5}
    )
    with caplog.at_level(logging.DEBUG, "stillframe"):
        callback.on_train_end(trainer_stub(), None)
        callback.teardown(trainer_stub(), None, "fit")
        callback.on_exception(trainer_stub(), None, ValueError("x"))
        callback.on_exception(trainer_stub(rank=1), None, KeyError("y"))
    totals = "4 checkpoints, 2.000 s in offloading (0.500 s each), 1.50 GB of GPU memory freed"
    assert [each.getMessage().count(totals) for each in caplog.records] == [1, 1, 1]
    assert "ValueError ended the run" in caplog.text


def test_docstring_explains_the_totals(offload):
    text = " ".join(offload.__doc__.split())
    assert "total_time_saved seconds spent offloading" in text


def test_a_save_logs_one_line_and_the_rest_at_debug(offload, caplog):
    checkpoint = {"state_dict": {"x": torch.ones(3), "y": torch.ones(2)}}
    with caplog.at_level(logging.DEBUG, "stillframe"):
        save(offload(), checkpoint)
    loud = [each.getMessage() for each in caplog.records if each.levelno > logging.DEBUG]
    assert len(loud) == 1
    assert "checkpoint 1: 2 tensors, 20 B" in loud[0]


class Custom:
    """An object that is neither a container nor a plain value."""


@pytest.mark.parametrize(("log_skipped", "level"), [(False, logging.DEBUG), (True, logging.INFO)])
def test_custom_objects_in_a_checkpoint_are_named(offload, caplog, log_skipped, level):
    plain = [1, 2.0, None, "text", True, (0.9, 0.999), torch.float32]
    checkpoint = {"state_dict": {"plain": plain, "own": [Custom() for _ in range(25)]}}
    with caplog.at_level(logging.DEBUG, "stillframe"):
        save(offload(log_skipped=log_skipped), checkpoint)
    lines = [each for each in caplog.records if "custom" in each.getMessage()]
    assert [each.levelno for each in lines] == [level]
    text = lines[0].getMessage()
    assert "25 custom objects" in text
    shown = [number for number in range(25) if f"Custom at 'state_dict.own.{number}'" in text]
    assert shown == (list(range(25)) if log_skipped else [*range(10), *range(15, 25)])


class Unwilling(torch.Tensor):
    """An object that raises when it is reduced."""

    def __reduce_ex__(self, protocol):
        raise ValueError("not me")


class Unmade(torch.Tensor):
    """An object that can be reduced but not rebuilt."""

    def __reduce_ex__(self, protocol):
        return fail_to_make, (torch.ones(3),)


def fail_to_make(inner):
    raise ValueError("not me")


@pytest.mark.parametrize("kind", [Unwilling, Unmade])
def test_key_that_cannot_be_copied_stays_and_is_named(offload, caplog, kind):
    unwilling = {"x": torch.ones(2).as_subclass(kind)}
    tensor = torch.ones(3)
    checkpoint = {
        "state_dict": {"x": tensor},
        "optimizer_states": unwilling,
        "lr_schedulers": [tensor],
    }
    callback = offload()
    save(callback, checkpoint)
    assert checkpoint["optimizer_states"] is unwilling
    new = checkpoint["state_dict"]["x"]
    assert new is not tensor
    assert new.equal(tensor)
    assert checkpoint["lr_schedulers"][0] is new  # the other keys are still copied together
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "'optimizer_states' stays as it is" in lines[0]
    assert "ValueError: not me" in lines[0]
    assert callback.state_dict()["checkpoint_count"] == 1
    checkpoint.clear()
    del new
    assert leased() == 0  # the garbage collector was not needed


def test_checkpoint_stays_as_it_is_if_no_key_can_be_copied(offload, caplog):
    unwilling = {key: torch.ones(2).as_subclass(Unwilling) for key in KEYS}
    checkpoint = save(offload(), dict(unwilling))
    assert all(checkpoint[key] is unwilling[key] for key in KEYS)
    assert sum("stays as it is" in each.getMessage() for each in caplog.records) == 3


def test_pool_too_small_falls_back_to_ordinary_memory_with_a_log_line(offload, small_pool, caplog):
    tensor = torch.randn(1000, 300)
    checkpoint = save(offload(), {"state_dict": {"x": tensor, "view": tensor[5:]}})
    new = checkpoint["state_dict"]
    tensor_before = tensor.clone()
    tensor.zero_()
    assert new["x"].equal(tensor_before)
    assert new["view"].untyped_storage()._cdata == new["x"].untyped_storage()._cdata
    assert "ordinary memory" in caplog.text
    assert small_pool.stats()["leased_bytes"] == 0


def test_callback_does_not_wait_for_memory_held_by_a_future(offload, small_pool, caplog):
    """Only the training thread may be able to complete that future."""
    future = concurrent.futures.Future()
    held = stillframe.snapshot([torch.ones(5)], engine=small_pool)
    held.hold_until(future)
    held.release()
    tensor = torch.randn(5)
    assert save(offload(), {"state_dict": {"x": tensor}})["state_dict"]["x"].equal(tensor)
    assert "ordinary memory" in caplog.text
    assert small_pool.stats()["leased_bytes"] > 0
    future.set_result(None)
    assert small_pool.stats()["leased_bytes"] == 0


def test_callback_does_not_wait_for_a_save_that_fills_the_pool(
    offload, small_pool, tmp_path, caplog
):
    with slow("pwrite", 0.2):
        handle = stillframe.async_save(torch.ones(200_000), tmp_path / "x", engine=small_pool)
        tensor = torch.randn(5)
        assert save(offload(), {"state_dict": {"x": tensor}})["state_dict"]["x"].equal(tensor)
        assert not handle.done()
        handle.result()
    assert "ordinary memory" in caplog.text
    assert torch.load(tmp_path / "x").eq(1).all()


def test_checkpoints_may_be_dropped_by_another_thread(offload):
    """That holds for a writer that only keeps the dictionary."""
    dropped = []
    checkpoint = save(offload(), {"state_dict": {"x": torch.ones(100_000)}})
    assert leased() > 0

    def write(mine):
        mine.pop("state_dict")
        dropped.append(leased())

    thread = threading.Thread(target=write, args=(checkpoint,))
    thread.start()
    thread.join()
    assert dropped == [0]


def test_checkpoints_that_are_kept_never_block_a_save(offload, small_pool):
    callback = offload()
    kept = [
        save(callback, {"state_dict": {"x": torch.full((50_000,), float(n))}}) for n in range(6)
    ]
    for number, checkpoint in enumerate(kept):
        assert checkpoint["state_dict"]["x"].eq(number).all()


# ---- state and sizes ----


def test_callback_state_survives_a_round_trip(offload, strategies):
    callback = offload()
    save(callback, {"state_dict": {"x": torch.ones(3)}})
    callback.setup(trainer_stub(strategy=object.__new__(strategies.FSDPStrategy)), None, "fit")
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
    # A known strategy counts more than the type of the checkpoint's strategy.
    decided = offload()
    decided.setup(trainer_stub(strategy=object.__new__(strategies.DDPStrategy)), None, "fit")
    decided.load_state_dict(state)
    assert decided.is_enabled


def test_size_estimates_use_real_dtypes_and_optimizer(offload, caplog):
    module = torch.nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)
    fake = trainer_stub()
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


def test_frozen_parameters_count_but_have_no_state(offload, caplog):
    module = torch.nn.Sequential(
        torch.nn.Linear(1000, 1000, bias=False),
        torch.nn.Linear(1000, 1000, bias=False, dtype=torch.float64),
    )
    module[0].requires_grad_(False)
    fake = trainer_stub()
    fake.optimizers = [torch.optim.Adam(module.parameters())]
    with caplog.at_level(logging.INFO, "stillframe"):
        offload().on_train_start(fake, module)
    assert "2,000,000 parameters, 1,000,000 of them trained" in caplog.text
    assert "model 12 MB, checkpoint about 28 MB" in caplog.text


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, **options)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(sgd(), id="SGD"),
        pytest.param(sgd(momentum=0.9), id="SGD with momentum"),
        pytest.param(torch.optim.Adam, id="Adam"),
        pytest.param(lambda p: torch.optim.AdamW(p, amsgrad=True), id="AdamW with amsgrad"),
        *(
            pytest.param(getattr(torch.optim, name), id=name)
            for name in (
                *("NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "Adagrad", "ASGD"),
                *("RMSprop", "Muon"),
            )
        ),
        pytest.param(
            lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), id="RMSprop with both"
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_before_the_first_step_is_the_size_after_it(offload, caplog, make, dtype):
    module = torch.nn.Linear(600, 600, bias=False, dtype=dtype)
    fake = trainer_stub()
    fake.optimizers = [make(module.parameters())]
    lines = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "stillframe"):
            offload().on_train_start(fake, module)
        lines.append(caplog.records[0].getMessage())
        module(torch.ones(1, 600, dtype=dtype)).sum().backward()
        fake.optimizers[0].step()
    assert lines[0] == lines[1]


def test_no_state_size_is_estimated_for_an_unknown_optimizer(offload, caplog):
    class Own(torch.optim.Adam):
        def step(self, closure=None):
            return None

    module = torch.nn.Linear(3, 3)
    fake = trainer_stub()
    fake.optimizers = [Own([{"params": [each]} for each in module.parameters()])]
    with caplog.at_level(logging.INFO, "stillframe"):
        offload().on_train_start(fake, module)
    assert caplog.messages[0].endswith("and the state of Own")
