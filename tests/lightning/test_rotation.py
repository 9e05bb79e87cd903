"""Links, removes and logger calls that follow saves, tested on the plugin's parts."""

import os
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import stillframe
from stillframe import _core
from stillframe._base.paths import Place
from stillframe._lightning import links, pending, rotation
from stillframe._lightning.rotation import Rotation
from stillframe._lightning.wrapped import Inner
from stillframe._save import ordered
from stillframe._save.engine import is_closed
from stillframe._save.handle import SkippedSave


class Telling:
    """A publication that waits for a save."""

    def __init__(self, place, calls, due=True, error=None):
        self.place, self.calls, self.is_due, self.error = place, calls, due, error

    def due(self):
        return self.is_due

    def deliver(self):
        self.calls.append(os.path.basename(self.place))
        if self.error is not None:
            raise self.error


@pytest.fixture
def files():
    return Rotation(lambda place: None, durable=True)


@pytest.fixture
def place(tmp_path):
    """Return `place(name)`, which makes a file and returns its path."""

    def made(name):
        (tmp_path / name).write_text(name)
        return Place.of(tmp_path / name)

    return made


def test_target_of_a_link_is_removed_after_the_link(files, place, tmp_path):
    old, link = place("old.ckpt"), Place.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    files.wait()
    assert os.path.exists(link)
    assert not files.will_exist(old, os.path.exists)  # it is going to go
    files.remove(link)
    files.wait()
    assert os.listdir(tmp_path) == []


def test_former_target_is_removed_when_a_file_replaces_the_link(files, place, tmp_path):
    old, link = place("old.ckpt"), Place.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    files.make_room(link)
    stillframe.async_save({"n": 1}, link).result()
    files.release()
    files.wait()
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_delayed_remove_of_a_name_runs_before_the_next_save_to_it(files, place, tmp_path):
    old, link = place("old.ckpt"), Place.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    files.make_room(old)
    assert not files.held
    files.wait()
    place("old.ckpt")
    assert files.finish() is None
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "old.ckpt"]


def test_remove_delayed_for_a_link_that_moved_runs_at_the_end(files, place, tmp_path):
    old, newer = place("old.ckpt"), place("newer.ckpt")
    link = Place.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.wait()
    os.unlink(link)
    os.symlink(newer, link)  # by somebody else
    files.remove(old)
    files.remove(newer)
    assert os.path.exists(old)
    assert files.finish() is None
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"]


def test_target_of_a_link_stays_at_the_end(files, place, tmp_path):
    old, link = place("old.ckpt"), Place.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(old)
    assert files.finish() is None
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "old.ckpt"]


def test_wrapped_remove_is_delayed_while_a_link_points_to_the_file(lit, place, tmp_path):
    inner = Inner(lit.TorchCheckpointIO(), lit.TorchCheckpointIO)
    files = Rotation(lambda place: inner, durable=True)
    old, newer, link = place("old.ckpt"), place("newer.ckpt"), Place.of(tmp_path / "last.ckpt")
    files.link(old, link)
    files.remove(newer)
    files.remove(old)
    assert files.finish() is None
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "old.ckpt"]


def test_remove_after_a_run_takes_a_former_link_target(files, place, tmp_path):
    one, other, link = place("one.ckpt"), place("other.ckpt"), Place.of(tmp_path / "last.ckpt")
    for source in (one, other, one):
        files.link(source, link)
    assert files.finish() is None
    files.remove(one)
    files.release(all_of_them=True)
    files.wait()
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "other.ckpt"]


def test_directory_is_removed_with_its_content_after_its_link(files, tmp_path):
    for name in ("old.ckpt", "newer.ckpt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    old, newer, link = (Place.of(tmp_path / f"{name}.ckpt") for name in ("old", "newer", "last"))
    files.link(old, link)
    files.remove(old)
    files.link(newer, link)
    assert files.finish() is None
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "newer.ckpt"]


def test_link_does_not_count_as_a_successful_save(files, place, tmp_path):
    older, newer = place("older.ckpt"), place("newer.ckpt")
    files.link(Place.of(tmp_path / "never.ckpt"), Place.of(tmp_path / "last.ckpt"))
    files.remove(older)
    assert files.finish() is None
    assert not os.path.exists(older)  # no save failed
    rotation.note_unmade(tmp_path / "never.ckpt")
    files.link(newer, Place.of(tmp_path / "last.ckpt"))
    other = place("other.ckpt")
    files.remove(other)
    assert files.finish() is None
    assert os.path.exists(other)  # one did
    stillframe.save({}, tmp_path / "good.pt")


def test_save_to_an_invalid_path_drops_the_next_remove(files, place, tmp_path):
    rotation.note_unmade(3)
    old = place("old.ckpt")
    files.remove(old)
    files.wait()
    assert os.path.exists(old)
    stillframe.save({}, tmp_path / "good.pt")


def test_finish_waits_for_a_link_being_made(files, place, tmp_path, monkeypatch):
    waited = threading.Event()
    make_link, wait_for_key = links.make_link, ordered.wait_for_key

    def make(*names, **options):
        waited.wait(60)
        return make_link(*names, **options)

    def wait(key):
        waited.set()
        wait_for_key(key)

    monkeypatch.setattr(links, "make_link", make)
    monkeypatch.setattr(ordered, "wait_for_key", wait)
    files.link(place("new.ckpt"), Place.of(tmp_path / "last.ckpt"))
    assert files.finish() is None
    has_waited = waited.is_set()
    waited.set()
    assert has_waited and os.path.exists(tmp_path / "last.ckpt")


def test_link_is_synced_as_files_are(place, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        links, "make_link", lambda *names, durable: bool(asked.append(durable)) or True
    )
    for durable in (True, False):
        files = Rotation(lambda place: None, durable=durable)
        files.link(place("a.ckpt"), Place.of(tmp_path / "last.ckpt"))
        files.finish()
    assert asked == [True, False]


def test_loggers_are_called_in_order_before_the_file_is_removed(files, place):
    calls = []
    first, second = (Telling(place(name), calls, due=False) for name in "ab")
    files.publications += [first, second]
    files.remove(first.place)
    second.is_due = True
    files.notify()
    assert calls == [] and os.path.exists(first.place)
    first.is_due = True
    files.notify()
    files.wait()
    assert calls == ["a", "b"]
    assert not os.path.exists(first.place) and os.path.exists(second.place)


def test_failed_logger_call_no_longer_delays_the_remove(files, place):
    calls = []
    files.publications.append(Telling(place("a"), calls, error=RuntimeError("no network")))
    with pytest.raises(RuntimeError, match="no network"):
        files.notify()
    assert not files.publications
    files.remove(place("a"))
    files.wait()
    assert not files.held


def test_finish_makes_every_call_and_returns_the_first_error(files, place):
    calls, errors = [], [RuntimeError("first"), None, RuntimeError("last")]
    files.publications += [
        Telling(place(name), calls, error=error) for name, error in zip("abc", errors, strict=True)
    ]
    assert files.finish() is errors[0]
    assert calls == ["a", "b", "c"]


def test_finish_removes_a_file_after_its_logger_call(files, place, tmp_path):
    seen = []

    class Looking(Telling):
        def deliver(self):
            files.wait()
            seen.append(os.path.exists(self.place))

    files.publications.append(Looking(place("a"), [], due=False))
    files.remove(place("a"))
    assert files.finish() is None
    assert seen == [True] and os.listdir(tmp_path) == []


def test_keyboard_interrupt_in_a_logger_is_not_caught(files, place):
    files.publications.append(Telling(place("a"), [], error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        files.finish()


def test_wait_includes_entries_added_meanwhile(files, place, monkeypatch):
    """A signal handler may add them in the middle of the wait."""
    waited, wait_for_key = [], ordered.wait_for_key

    def wait(key):
        waited.append(key)
        if len(waited) == 1:
            files.remove(place("b"))
        wait_for_key(key)

    monkeypatch.setattr(ordered, "wait_for_key", wait)
    files.remove(place("a"))
    files.wait()
    assert [os.path.basename(each) for each in waited] == [b"a", b"b"]
    assert not files.under_way()


def test_interrupted_wait_can_be_repeated(files, place, monkeypatch):
    waited = []

    def wait(key):
        waited.append(key)
        if len(waited) == 1:
            raise KeyboardInterrupt

    files.remove(place("a"))
    with monkeypatch.context() as patch:
        patch.setattr(ordered, "wait_for_key", wait)
        with pytest.raises(KeyboardInterrupt):
            files.wait()
        assert files.under_way()
        files.wait()
    assert len(waited) == 2 and not files.under_way()


def test_link_is_made_after_a_remove_of_its_name(files, place, tmp_path):
    link, newer = place("last.ckpt"), place("newer.ckpt")
    files.publications.append(Telling(link, [], due=False))
    files.remove(link)
    assert files.held
    files.link(newer, link)
    assert files.finish() is None
    assert os.readlink(link) == "newer.ckpt"


# ---- whose error, whose engine ----


@pytest.fixture
def work(files):
    return pending.Work(files)


def test_engine_made_by_a_signal_handler_is_kept_and_the_second_closed(work):
    first, second = stillframe.Engine(), stillframe.Engine()
    assert work.use(first) is first
    assert work.use(second) is first
    assert is_closed(second) and not is_closed(first)
    assert work.drain(close=True) is None
    assert is_closed(first)


def test_save_is_taken_off_the_list_once(work, tmp_path):
    handle = SkippedSave("a")
    work.pending.append(handle)
    assert work.discard(handle)
    assert not work.discard(handle)


def over(error=None, cancelled=None):
    """Return a save that has ended with the given outcome."""

    def exception():
        if cancelled is not None:
            raise cancelled
        return error

    outcome = SimpleNamespace(is_collected=lambda: False)
    return SimpleNamespace(done=lambda: True, exception=exception, _outcome=outcome)


def test_errors_of_earlier_saves_links_and_cancellations_are_collected(work):
    earlier, own, cancelled = OSError("earlier"), OSError("own"), CancelledError()
    of_link = OSError("of a link")
    work.pending += [over(earlier), over(cancelled=cancelled), over(own)]
    work.rotation.errors.append(of_link)
    newest = work.pending[-1]
    work.collect_ended(but=newest)
    assert work.errors == [earlier, cancelled, of_link]
    assert work.pending == [newest]
    work.newest = newest
    work.forget_newest()  # it was raised
    assert work.pending == []
    assert work.take_error() is earlier
    assert len(earlier.__notes__) == 2 and work.next_error() is None


def test_under_way_is_true_for_saves_engine_and_links(work, place):
    assert not work.under_way()
    work.engine = stillframe.Engine()
    assert work.under_way()
    work.drain(close=True)
    work.pending.append(SkippedSave("a"))
    assert work.under_way()
    work.drain(close=True)
    work.rotation.remove(place("a"))
    assert work.under_way()
    work.drain(close=True)
    work.rotation.publications.append(Telling(place("a"), [], due=False))
    assert work.under_way()
    work.drain(close=True)
    work.rotation.held[place("a")] = None
    assert work.under_way()
    work.drain(close=True)
    assert not work.under_way()


def test_interrupted_drain_keeps_the_errors_that_it_collected(work):
    error, ends = OSError("full"), [KeyboardInterrupt(), None]

    def exception():
        if (end := ends.pop(0)) is not None:
            raise end
        return error

    handle = over()
    handle.exception = exception
    work.pending.append(handle)
    with pytest.raises(KeyboardInterrupt):
        work.drain(close=True)
    assert work.drain(close=True) is None
    assert work.errors == [error]


def test_drain_includes_saves_made_meanwhile(work):
    """A signal handler may make one in the middle of the wait."""
    error = OSError("full")
    first, second = over(), over(error)

    def exception():
        work.pending.append(second)

    first.exception = exception
    work.pending.append(first)
    assert work.drain(close=True) is None
    assert work.errors == [error] and work.pending == []


def test_engine_is_closed_even_if_a_logger_raises(work, place):
    work.use(engine := stillframe.Engine())
    error = RuntimeError("no network")
    work.rotation.publications.append(Telling(place("a"), [], error=error))
    assert work.drain(close=True) is error
    assert is_closed(engine)


def test_next_save_does_not_wait_for_one_being_written(work):
    handle = over()
    handle.done = lambda: False
    handle.exception = lambda: pytest.fail("waited")
    work.pending.append(handle)
    work.collect_ended()
    assert work.pending == [handle]


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
    assert pending.is_failure(error) is failure


def test_wrong_argument_is_raised_even_with_on_error_warn(lit, tmp_path):
    plugin = lit.AsyncCheckpointIO(on_error="warn")
    with pytest.raises((AttributeError, TypeError)):
        plugin.save_checkpoint({"x": lambda: None}, tmp_path / "a.ckpt")
    plugin.teardown()


def test_exists_asks_the_remote_file_system_unless_the_log_has_the_name(files):
    asked, in_log = Place.of("memory://nowhere/a.ckpt"), Place.of("memory://nowhere/b.ckpt")
    assert asked.remote and in_log.remote
    assert files.will_exist(asked, lambda path: True)
    assert not files.will_exist(asked, lambda path: False)
    name = in_log.key()
    entry = ordered.submit(name, _core.WORK_SAVE, lambda after_good: True)
    assert entry is not None
    assert files.will_exist(in_log, lambda path: True)
    ordered.wait_for_key(name)
