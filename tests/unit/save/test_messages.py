"""Error messages say what happened, why, and what to do."""

from __future__ import annotations

import errno
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_processes import run_python
from stillframe._save import api
from stillframe._save.engine import is_closed
from stillframe.testing import fault, held, slow

STATE = {"w": torch.arange(1000.0)}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("cpu", "has to be a stillframe.Engine, not 'cpu'"),
        (stillframe.Engine, r"as in engine=Engine\(\): not the class"),
        (0, "has to be a stillframe.Engine, not 0"),
    ],
)
def test_engine_of_another_type_is_named(tmp_path, engine, words):
    for call in (stillframe.async_save, stillframe.save):
        with pytest.raises(TypeError, match=words):
            call(STATE, tmp_path / "a.pt", engine=engine)
    with pytest.raises(TypeError, match=words):
        stillframe.snapshot(STATE, engine=engine)


def test_failed_engine_mentions_shared_memory_only_if_it_uses_it():
    with fault("madvise", err=errno.EACCES), pytest.raises(OSError) as refused:
        stillframe.Engine(pool_bytes="64KiB", block_bytes="64KiB")
    assert refused.value.errno == errno.EACCES and "shared" not in str(refused.value)


def test_failed_mapping_is_not_reported_as_a_refused_thread():
    with fault("madvise", err=errno.EAGAIN), pytest.raises(MemoryError):
        stillframe.Engine(pool_bytes="64KiB", block_bytes="64KiB")


def test_swapped_arguments_are_detected():
    with pytest.raises(TypeError, match="not dict: the arguments seem to be swapped"):
        stillframe.async_save("a.pt", STATE)
    with pytest.raises(TypeError, match=r"a path has to be a str or os\.PathLike, not int$"):
        stillframe.async_save(STATE, 3)


def test_type_error_for_an_open_file_names_the_functions_of_torch(tmp_path):
    for call in (stillframe.save, stillframe.async_save, lambda _, file: stillframe.load(file)):
        with pytest.raises(TypeError, match=r"not BytesIO: .* torch\.save and torch\.load"):
            call(STATE, io.BytesIO())


def test_save_reports_an_unexpanded_tilde():
    with pytest.raises(stillframe.SaveError, match=r"'~' is not expanded: give os.path.expanduser"):
        stillframe.async_save(STATE, "~/a.pt")


def test_an_engine_whose_close_was_interrupted_is_closed(tmp_path):
    """Its core accepts nothing any more, so the next default engine is a new one."""

    class Interrupted:
        def close(self, timeout: float | None) -> None:
            raise KeyboardInterrupt

    with stillframe.Engine(pool_bytes="4MiB", block_bytes="1MiB") as engine:
        core, engine._core = engine._core, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        engine._core = core
        with pytest.raises(stillframe.StillframeError, match="was closed: make another one, or"):
            stillframe.save(STATE, tmp_path / "a.pt", engine=engine)


def test_busy_engine_names_its_saves(tmp_path):
    with (
        stillframe.Engine(pool_bytes=32 << 20, max_in_flight=1, when_busy="raise") as engine,
        held("fdatasync"),
    ):
        stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
        with pytest.raises(stillframe.BusyError, match=r"max_in_flight=1 allows \(.*a\.pt\). Wait"):
            stillframe.async_save(STATE, tmp_path / "b.pt", engine=engine)


def test_exhausted_pool_names_its_holders(tmp_path):
    with stillframe.Engine(pool_bytes="4MiB", block_bytes="1MiB") as engine:
        kept = stillframe.snapshot({"x": torch.zeros(1 << 20)}, engine=engine)
        words = "pool has 4 MiB in blocks of 1 MiB: snapshots hold 4 MiB of it, saves under way 0 B"
        with pytest.raises(stillframe.PoolExhaustedError, match="only snapshots could.*" + words):
            stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
        with pytest.raises(stillframe.PoolExhaustedError, match="a snapshot of 4 kB .*" + words):
            stillframe.snapshot(STATE, engine=engine)
        del kept


def test_pool_message_distinguishes_saves_and_snapshots(tmp_path):
    with stillframe.Engine(pool_bytes="4MiB", block_bytes="1MiB") as engine:
        kept = stillframe.snapshot({"x": torch.zeros(1 << 18)}, engine=engine)
        with slow("pwrite", 0.3):
            stillframe.async_save({"x": torch.zeros(1 << 18)}, tmp_path / "a.pt", engine=engine)
            with pytest.raises(stillframe.PoolExhaustedError, match="snapshots hold 1 MiB of it"):
                stillframe.snapshot({"x": torch.zeros(1 << 20)}, engine=engine)
        del kept


def in_child(function: object) -> str:
    """Run `function` in a forked child and return its error's text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os.write(writing, b"nothing")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_error_names_the_object_and_the_remedy(tmp_path):
    path = tmp_path / "a.pt"
    with stillframe.Engine(pool_bytes=32 << 20) as engine:
        handle = stillframe.async_save(STATE, path, engine=engine)
        snapshot = stillframe.snapshot(STATE, engine=engine)
        handle.result()
        message = "was made before fork() and belongs to the parent process. A forked child may use"
        message += " stillframe.default_engine()"
        for call, name in (
            (lambda: stillframe.save(STATE, path, engine=engine), "this Engine"),
            (engine.stats, "this Engine"),
            (engine.close, "this Engine"),
            (lambda: engine.warm_up(1), "this Engine"),
            (engine.trim, "this Engine"),
            (handle.result, f"the save of {path}"),
            (handle.done, f"the save of {path}"),
            (handle.cancel, f"the save of {path}"),
            (handle.progress, f"the save of {path}"),
            (handle.wait_staged, f"the save of {path}"),
            (lambda: handle.state, f"the save of {path}"),
            (snapshot.wait, "this Snapshot"),
            (snapshot.release, "this Snapshot"),
        ):
            assert in_child(call).startswith(f"ForkError: {name} {message}")
        assert in_child(lambda: f"{engine!r} {handle!r} {snapshot!r}") == "nothing"
        snapshot.release()
    assert in_child(lambda: stillframe.save(STATE, tmp_path / "child.pt")) == "nothing"


LATE = """
import stillframe
for call in (
    lambda: stillframe.save({}, "missing/a.pt"),
    lambda: stillframe.save({}, 3),
    lambda: stillframe.snapshot({}, engine=3),
    lambda: stillframe.exists("a"),
):
    try:
        call()
    except (TypeError, OSError):
        pass
    stillframe.configure(pool_bytes="64MiB")
assert stillframe.default_engine().stats()["pool_bytes"] == 64 << 20
try:
    stillframe.configure(pool_bytes="32MiB")
except stillframe.StillframeError as error:
    print(error)
"""


def test_refused_save_does_not_count_as_use_of_the_default_engine(tmp_path):
    done = run_python("-c", LATE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "comes too late: the default engine is in use. Call it before" in done.stdout
    assert "In use is <Engine pool 64 MiB in blocks of 16 MiB" in done.stdout


def test_default_engine_can_be_configured_again_after_its_close():
    default = api._DefaultEngineHolder()
    try:
        default.configure({"pool_bytes": "32MiB"})
        first = default.get()
        default.was_returned = True  # as if default_engine() had returned it
        with pytest.raises(stillframe.StillframeError, match="too late"):
            default.configure({"pool_bytes": "48MiB"})
        first.close()
        default.configure({"pool_bytes": "48MiB"})
        second = default.get()
        assert second.stats()["pool_bytes"] == 48 << 20
        # the second engine was not returned to any caller
        default.configure({"pool_bytes": "64MiB"})
        assert is_closed(second) and default.get().stats()["pool_bytes"] == 64 << 20
    finally:
        default.close()


def test_save_counts_as_use_of_the_default_engine(tmp_path):
    stillframe.save(STATE, tmp_path / "a.pt")
    with pytest.raises(stillframe.StillframeError, match="too late"):
        stillframe.configure(pool_bytes="32MiB")


def test_an_engine_shows_its_sizes_and_what_it_does():
    engine = stillframe.Engine(pool_bytes="1.5GiB", max_in_flight=3)
    assert repr(engine) == (
        "<Engine pool 1.5 GiB in blocks of 16 MiB, 0 B committed, 0 B in use;"
        " 0 of 3 saves in flight>"
    )
    engine.close()
    assert repr(engine) == "<Engine closed>"


def test_removed_working_directory_is_a_missing_parent(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(stillframe.SaveError, match=r"the parent directory \. is missing") as raised:
        stillframe.save(STATE, "a.pt")
    assert raised.value.phase == "open"


def test_pickling_an_object_of_the_process_raises_with_the_reason(tmp_path):
    handle = stillframe.async_save(STATE, tmp_path / "a.pt")
    with stillframe.Engine(pool_bytes="16MiB") as engine:
        for each in (handle, engine):
            with pytest.raises(TypeError, match="belongs to the process that made it: "):
                stillframe.save({"extra": each}, tmp_path / "b.pt")
    assert pickle.loads(pickle.dumps(handle.result())) == handle.result()


def test_every_call_reports_a_closed_engine_in_the_same_words(tmp_path):
    engine = stillframe.Engine()
    engine.close()
    for call in (
        lambda: stillframe.save(STATE, tmp_path / "a.pt", engine=engine),
        lambda: stillframe.snapshot(STATE, engine=engine),
        lambda: engine.warm_up(1),
        engine.trim,
    ):
        with pytest.raises(stillframe.StillframeError, match="the engine was closed: make another"):
            call()


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": [1, {"b": (2, lambda: 3)}], "t": torch.ones(3)}, "a.1.b.1"),
        ({"optim": {"state": {0: {"hook": lambda: 3}}}}, "optim.state.0.hook"),
        ([torch.ones(3), Holder([Holder(lambda: 3)])], "1.value.0.value"),
    ],
)
def test_unpicklable_object_is_found_in_the_tree(tmp_path, tree, path):
    with pytest.raises(Exception, match="pickle") as raised:
        stillframe.async_save(tree, tmp_path / "a.pt")
    assert raised.value.__notes__ == [f"stillframe: that is the function at {path!r} of the object"]
    with pytest.raises(Exception, match="pickle") as theirs:
        torch.save(tree, tmp_path / "b.pt")
    assert type(theirs.value) is type(raised.value)
    assert str(theirs.value) == str(raised.value)


def test_storages_do_not_hide_an_unpicklable_object(tmp_path):
    tree = {"storage": torch.ones(2).untyped_storage(), "lock": threading.Lock()}
    with pytest.raises(TypeError) as caught:
        stillframe.save(tree, tmp_path / "a.pt")
    assert caught.value.__notes__ == ["stillframe: that is the lock at 'lock' of the object"]


def test_pickling_error_is_unchanged_if_its_object_is_not_found(tmp_path):
    class Broken(dict[str, Any]):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("not to be pickled")

        def items(self) -> Any:
            raise ValueError("nor to be looked at")

    with pytest.raises(TypeError, match="not to be pickled"):
        stillframe.save({"a": Broken()}, tmp_path / "a.pt")


def test_an_object_that_cannot_be_pickled_as_a_whole_has_no_note(tmp_path):
    with pytest.raises((AttributeError, pickle.PicklingError)) as raised:
        stillframe.async_save(lambda: 3, tmp_path / "a.pt")
    assert not hasattr(raised.value, "__notes__")


def test_cycle_of_unpicklable_objects_ends(tmp_path):
    loop: list[object] = [lambda: 3]
    loop.insert(0, loop)
    with pytest.raises((AttributeError, pickle.PicklingError)) as raised:
        stillframe.async_save({"x": loop}, tmp_path / "a.pt")
    assert "at 'x.1' of" in raised.value.__notes__[0]


@pytest.mark.parametrize("timeout", ["1", [1], True])
def test_a_timeout_that_is_no_number_is_named(tmp_path, timeout):
    handle = stillframe.async_save(STATE, tmp_path / "a.pt")
    snapshot = stillframe.snapshot(STATE)
    for wait in (
        handle.result,
        handle.exception,
        handle.wait_staged,
        snapshot.wait,
        stillframe.wait_all,
    ):
        with pytest.raises(TypeError, match="timeout has to be a number of seconds, or None"):
            wait(timeout)
        with pytest.raises(ValueError, match="seconds, not nan"):
            wait(float("nan"))
    handle.result(60)


def test_a_callback_that_cannot_be_called_is_refused(tmp_path):
    handle = stillframe.async_save(STATE, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="a done callback has to be callable, not NoneType"):
        handle.add_done_callback(None)
    handle.result()


@pytest.mark.parametrize("option", ["overlap", "durable", "check_mutation"])
@pytest.mark.parametrize("value", [None, "no"])
def test_flag_that_is_not_a_bool_is_refused(tmp_path, option, value):
    with pytest.raises(TypeError, match=f"{option} has to be True or False, not {value!r}"):
        stillframe.async_save(STATE, tmp_path / "a.pt", **{option: value})
    assert not (tmp_path / "a.pt").exists()
    if option == "overlap":
        with pytest.raises(TypeError, match=f"overlap has to be True or False, not {value!r}"):
            stillframe.snapshot(STATE, overlap=value)


@pytest.mark.parametrize("option", ["verify", "shared"])
@pytest.mark.parametrize("value", [None, "no"])
def test_flag_of_a_load_that_is_not_a_bool_is_refused(option, value):
    with pytest.raises(TypeError, match=f"{option} has to be True or False, not {value!r}"):
        stillframe.load("a.pt", **{option: value})


def test_optimizer_instead_of_its_class_is_refused_in_one_line():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(TypeError) as caught:
        stillframe.register_optimizer(optimizer)
    assert str(caught.value) == (
        "expected a subclass of torch.optim.Optimizer, not an instance of SGD: give the class,"
        " register_optimizer(SGD)"
    )


def test_configure_names_an_unknown_option():
    with pytest.raises(
        TypeError, match=r"configure\(\) has no option 'bogus': an engine's are pool"
    ):
        stillframe.configure(bogus=1)


def test_load_reports_an_unexpanded_tilde():
    with pytest.raises(FileNotFoundError, match="'~' is not expanded"):
        stillframe.load("~/no/such/file")


@pytest.mark.parametrize("call", [stillframe.exists, stillframe.remove])
def test_remove_and_exists_report_an_unexpanded_tilde(call, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    call("~/no/such/file")
    (record,) = caplog.records
    assert record.getMessage() == (
        "stillframe: nothing is at ~/no/such/file"
        " ('~' is not expanded: give os.path.expanduser(path))"
    )
    caplog.clear()
    Path("~").mkdir()
    Path("~/file").touch()
    call("no/such/file")
    call("~/file")
    assert not caplog.records
