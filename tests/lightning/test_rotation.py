"""Links, removes and logger calls that follow saves, tested on the plugin's parts."""

import os
import threading
from concurrent.futures import CancelledError

import pytest
import stillframe
from stillframe import _core
from stillframe._base.paths import CheckpointPath
from stillframe._lightning import rotation
from stillframe._lightning.rotation import Rotation
from stillframe._lightning.work import FailedHandle, Work, is_save_failure
from stillframe._lightning.wrapped import WrappedIO
from stillframe._save import ordered
from stillframe._save.engine import is_closed
from stillframe._save.handle import SaveHandle


class PublicationStub:
    """A fake call of loggers for the checkpoint `file`; it adds the file's name to `calls`.

    Args:
        due: The save has ended, so the loggers may be called.
        error: What the call raises.
    """

    def __init__(self, file, calls, due=True, error=None):
        self.target, self.calls, self.is_due, self.error = file, calls, due, error

    def due(self):
        return self.is_due

    def call_once_if_saved(self):
        self.calls.append(os.path.basename(self.target))
        if self.error is not None:
            raise self.error


def refuse(what, error, **how):
    raise error


@pytest.fixture
def files():
    return Rotation(lambda file: None, durable=True, failed=refuse)


@pytest.fixture
def work():
    work = Work(lambda file: None, durable=True)
    yield work
    work.newest_returns_early = False
    # otherwise wait_all of a later test would raise the errors that are left
    work.pop_errors_as_one()


@pytest.fixture
def file(tmp_path):
    """Return `file(name)`, which makes a file and returns its path."""

    def made(name):
        (tmp_path / name).write_text(name)
        return CheckpointPath.of(tmp_path / name)

    return made


def test_target_of_a_link_is_removed_after_the_link(files, file, tmp_path):
    old, link = file("old.ckpt"), CheckpointPath.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    files.wait()
    assert os.path.exists(link)
    assert not files.will_exist(old, os.path.exists)  # it will be removed
    files.remove(link)
    files.wait()
    assert os.listdir(tmp_path) == []


def test_former_target_is_removed_when_a_file_replaces_the_link(files, file, tmp_path):
    old, link = file("old.ckpt"), CheckpointPath.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    files.make_room(link)
    stillframe.async_save({"n": 1}, link).result()
    files.release()
    files.wait()
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_delayed_remove_of_a_name_runs_before_the_next_save_to_it(files, file, tmp_path):
    old, link = file("old.ckpt"), CheckpointPath.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    files.make_room(old)
    assert not files.to_remove
    files.wait()
    file("old.ckpt")
    files.finish()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "old.ckpt"]


def test_remove_delayed_for_a_link_that_moved_runs_at_the_end(files, file, tmp_path):
    old, newer = file("old.ckpt"), file("newer.ckpt")
    link = CheckpointPath.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.wait()
    os.unlink(link)
    os.symlink(newer, link)  # another program makes a link
    files.remove(old)
    files.remove(newer)
    assert os.path.exists(old)
    files.finish()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"]


def test_target_of_a_link_stays_at_the_end(files, file, tmp_path):
    old, link = file("old.ckpt"), CheckpointPath.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    files.finish()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "old.ckpt"]


def test_wrapped_remove_is_delayed_while_a_link_points_to_the_file(lit, file, tmp_path):
    inner = WrappedIO(lit.TorchCheckpointIO(), lit.TorchCheckpointIO)
    files = Rotation(lambda file: inner, durable=True, failed=refuse)
    old, newer, link = (
        file("old.ckpt"),
        file("newer.ckpt"),
        CheckpointPath.of(tmp_path / "last.ckpt"),
    )
    files.link(old, link)
    files.remove(newer)
    files.remove(old)
    files.finish()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "old.ckpt"]


def test_remove_after_a_run_takes_a_former_link_target(files, file, tmp_path):
    one, other, link = (
        file("one.ckpt"),
        file("other.ckpt"),
        CheckpointPath.of(tmp_path / "last.ckpt"),
    )
    for source in (one, other, one):
        files.link(source, link)
    files.finish()
    files.remove(one)
    files.release(all_of_them=True)
    files.wait()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "other.ckpt"]


def test_directory_is_removed_with_its_content_after_its_link(files, tmp_path):
    for name in ("old.ckpt", "newer.ckpt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    old, newer, link = (
        CheckpointPath.of(tmp_path / f"{name}.ckpt") for name in ("old", "newer", "last")
    )
    files.link(old, link)
    files.remove(old)
    files.link(newer, link)
    files.finish()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "newer.ckpt"]


def test_link_does_not_count_as_a_successful_save(files, file, tmp_path):
    older, newer = file("older.ckpt"), file("newer.ckpt")
    files.link(
        CheckpointPath.of(tmp_path / "never.ckpt"), CheckpointPath.of(tmp_path / "last.ckpt")
    )
    files.remove(older)
    files.finish()
    assert not os.path.exists(older)  # no save failed
    rotation.append_failed_save_entry(tmp_path / "never.ckpt")
    files.link(newer, CheckpointPath.of(tmp_path / "last.ckpt"))
    other = file("other.ckpt")
    files.remove(other)
    files.finish()
    assert os.path.exists(other)  # a save failed
    stillframe.save({}, tmp_path / "good.pt")


def test_save_to_an_invalid_path_drops_the_next_remove(files, file, tmp_path):
    rotation.append_failed_save_entry(3)
    old = file("old.ckpt")
    files.remove(old)
    files.wait()
    assert os.path.exists(old)
    stillframe.save({}, tmp_path / "good.pt")


def test_finish_waits_for_a_link_being_made(files, file, tmp_path, monkeypatch):
    waited = threading.Event()
    make_link, wait_for_saves_of_key = rotation.make_link, ordered.wait_for_saves_of_key

    def make(*names, **options):
        waited.wait(60)
        return make_link(*names, **options)

    def wait(key):
        waited.set()
        wait_for_saves_of_key(key)

    monkeypatch.setattr(rotation, "make_link", make)
    monkeypatch.setattr(ordered, "wait_for_saves_of_key", wait)
    files.link(file("new.ckpt"), CheckpointPath.of(tmp_path / "last.ckpt"))
    files.finish()
    has_waited = waited.is_set()
    waited.set()
    assert has_waited and os.path.exists(tmp_path / "last.ckpt")


def test_link_is_synced_as_files_are(file, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        rotation, "make_link", lambda *names, durable: bool(asked.append(durable)) or True
    )
    for durable in (True, False):
        files = Rotation(lambda file: None, durable=durable, failed=refuse)
        files.link(file("a.ckpt"), CheckpointPath.of(tmp_path / "last.ckpt"))
        files.finish()
    assert asked == [True, False]


def test_loggers_are_called_in_order_before_the_file_is_removed(files, file):
    calls = []
    first, second = (PublicationStub(file(name), calls, due=False) for name in "ab")
    files.publications += [first, second]
    files.remove(first.target)
    second.is_due = True
    files.notify()
    assert calls == [] and os.path.exists(first.target)
    first.is_due = True
    files.notify()
    files.wait()
    assert calls == ["a", "b"]
    assert not os.path.exists(first.target) and os.path.exists(second.target)


def test_failed_logger_call_no_longer_delays_the_remove(files, file):
    calls = []
    files.publications.append(PublicationStub(file("a"), calls, error=RuntimeError("no network")))
    with pytest.raises(RuntimeError, match="no network"):
        files.notify()
    assert not files.publications
    files.remove(file("a"))
    files.wait()
    assert not files.to_remove


def test_drain_calls_every_logger_and_keeps_each_error(work, file):
    calls, errors = [], [RuntimeError("first"), None, RuntimeError("last")]
    work.rotation.publications += [
        PublicationStub(file(name), calls, error=error)
        for name, error in zip("abc", errors, strict=True)
    ]
    work.drain(close=True)
    assert calls == ["a", "b", "c"]
    assert [work.pop_next_error() for _ in range(3)] == [errors[0], errors[2], None]


def test_finish_removes_a_file_after_its_logger_call(files, file, tmp_path):
    seen = []

    class CheckingPublication(PublicationStub):
        def call_once_if_saved(self):
            files.wait()
            seen.append(os.path.exists(self.target))

    files.publications.append(CheckingPublication(file("a"), [], due=False))
    files.remove(file("a"))
    files.finish()
    assert seen == [True] and os.listdir(tmp_path) == []


def test_keyboard_interrupt_in_a_logger_is_not_caught(files, file):
    files.publications.append(PublicationStub(file("a"), [], error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        files.finish()


def test_wait_includes_entries_added_meanwhile(files, file, monkeypatch):
    """A signal handler may add entries during the wait."""
    waited, wait_for_saves_of_key = [], ordered.wait_for_saves_of_key

    def wait(key):
        waited.append(key)
        if len(waited) == 1:
            files.remove(file("b"))
        wait_for_saves_of_key(key)

    monkeypatch.setattr(ordered, "wait_for_saves_of_key", wait)
    files.remove(file("a"))
    files.wait()
    assert [os.path.basename(each) for each in waited] == [b"a", b"b"]
    assert not files.under_way()


def test_interrupted_wait_can_be_repeated(files, file, monkeypatch):
    waited = []

    def wait(key):
        waited.append(key)
        if len(waited) == 1:
            raise KeyboardInterrupt

    files.remove(file("a"))
    with monkeypatch.context() as patch:
        patch.setattr(ordered, "wait_for_saves_of_key", wait)
        with pytest.raises(KeyboardInterrupt):
            files.wait()
        assert files.under_way()
        files.wait()
    assert len(waited) == 2 and not files.under_way()


def test_link_is_made_after_a_remove_of_its_name(files, file, tmp_path):
    link, newer = file("last.ckpt"), file("newer.ckpt")
    files.publications.append(PublicationStub(link, [], due=False))
    files.remove(link)
    assert files.to_remove
    files.link(newer, link)
    files.finish()
    assert os.readlink(link) == "newer.ckpt"


# ---- whose error, whose engine ----


def test_first_engine_is_kept_and_a_second_one_is_closed(work):
    first, second = stillframe.Engine(), stillframe.Engine()
    assert work.use(first) is first
    assert work.use(second) is first
    assert is_closed(second) and not is_closed(first)
    work.drain(close=True)
    assert is_closed(first)


class Writing(SaveHandle):
    """A save that is not written before a wait; `at_wait()` runs in that wait."""

    def __init__(self, error=None, at_wait=lambda: None):
        super().__init__("written")
        self.ends_with, self.at_wait = error, at_wait

    def _wait_until_ended(self, deadline):
        if not self._outcome.settled:
            self.at_wait()
            self._outcome.settle(None, self.ends_with)


def test_each_error_is_raised_once_oldest_first(work):
    earlier, of_link, own = OSError("earlier"), OSError("of a link"), OSError("own")
    work.saves += [FailedHandle("a", earlier), FailedHandle("b", CancelledError())]
    work.add_error_without_save("last.ckpt", of_link)
    work.add(FailedHandle("c", own), early=True)
    assert work.pop_next_error() is earlier
    assert isinstance(work.pop_next_error(), CancelledError)
    assert work.pop_next_error() is of_link
    assert work.pop_next_error() is None
    assert work.saves == [work.newest]  # a later call reports its error


def test_error_of_a_save_that_the_call_waited_for_comes_first(work):
    earlier, own = OSError("earlier"), OSError("own")
    work.add(FailedHandle("a", earlier), early=True)
    work.add(FailedHandle("b", own), early=False)
    assert work.pop_errors_as_one() is own
    assert own.__notes__ == ["Another checkpoint failed as well: earlier"]
    assert work.saves == [] and work.pop_next_error() is None


def test_error_that_all_ranks_raise_replaces_that_of_the_newest_save(work):
    work.add(Writing(OSError("own")), early=True)
    work.wait_and_drop_newest_error()
    assert work.saves == []
    work.wait_and_drop_newest_error()  # another call took the save meanwhile


def test_error_that_wait_all_raises_is_not_raised_again(work):
    work.add(FailedHandle("a", stillframe.StillframeError("earlier")), early=True)
    work.add(FailedHandle("b", stillframe.StillframeError("later")), early=True)
    for message in ("earlier", "later"):
        with pytest.raises(stillframe.StillframeError, match=message):
            stillframe.wait_all()
    work.drain(close=True)
    assert work.pop_next_error() is None and work.saves == []


def test_under_way_is_true_for_saves_engine_and_links(work, file):
    assert not work.under_way()
    work.engine = stillframe.Engine()
    assert work.under_way()
    work.drain(close=True)
    work.add_error_without_save("a", OSError("full"))
    assert work.under_way()
    work.pop_errors_as_one()
    work.rotation.remove(file("a"))
    assert work.under_way()
    work.drain(close=True)
    work.rotation.publications.append(PublicationStub(file("a"), [], due=False))
    assert work.under_way()
    work.drain(close=True)
    work.rotation.to_remove[file("a")] = None
    assert work.under_way()
    work.drain(close=True)
    assert not work.under_way()


def test_an_interrupted_drain_keeps_the_error_that_it_waited_for(work):
    error, ends = OSError("full"), [KeyboardInterrupt(), None]

    def interrupt():
        if (end := ends.pop(0)) is not None:
            raise end

    work.add(Writing(error, interrupt), early=True)
    with pytest.raises(KeyboardInterrupt):
        work.drain(close=True)
    work.drain(close=True)
    assert work.pop_next_error() is error


def test_drain_waits_for_a_save_that_a_handler_made_meanwhile(work):
    error = OSError("full")
    second = Writing(error)
    first = Writing(at_wait=lambda: work.saves.append(second))
    work.add(first, early=True)
    work.drain(close=True)
    assert second.done()
    assert work.pop_next_error() is error and work.saves == []


def test_drain_drops_saves_without_an_error(work, tmp_path):
    work.add(stillframe.async_save({"n": 1}, tmp_path / "a.pt"), early=True)
    work.drain(close=True)
    assert work.saves == []


def test_the_engine_is_closed_when_a_logger_fails(work, file):
    work.use(engine := stillframe.Engine())
    error = RuntimeError("no network")
    work.rotation.publications.append(PublicationStub(file("a"), [], error=error))
    work.drain(close=True)
    assert work.pop_next_error() is error
    assert is_closed(engine)


def test_next_save_does_not_wait_for_one_that_is_still_written(work):
    handle = Writing(at_wait=lambda: pytest.fail("waited"))
    work.saves.append(handle)
    assert work.pop_next_error() is None
    assert work.saves == [handle]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (stillframe.BusyError("busy"), True),
        (OSError(28, "full"), True),
        (TypeError("no path"), False),
        (AttributeError("cannot be pickled"), False),
    ],
)
def test_wrong_argument_is_not_a_failed_save(error, failure):
    assert is_save_failure(error) is failure


def test_wrong_argument_is_raised_even_with_on_error_warn(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO(on_error="warn")
    with pytest.raises((AttributeError, TypeError)):
        plugin.save_checkpoint({"x": lambda: None}, tmp_path / "a.ckpt")
    plugin.teardown()


def test_exists_asks_the_remote_file_system_unless_the_log_has_the_name(files):
    asked, in_log = (
        CheckpointPath.of("memory://nowhere/a.ckpt"),
        CheckpointPath.of("memory://nowhere/b.ckpt"),
    )
    assert asked.remote and in_log.remote
    assert files.will_exist(asked, lambda path: True)
    assert not files.will_exist(asked, lambda path: False)
    name = in_log.key()
    entry = ordered.submit(name, _core.WORK_SAVE, lambda after_good: True)
    assert entry is not None
    assert files.will_exist(in_log, lambda path: True)
    ordered.wait_for_saves_of_key(name)
