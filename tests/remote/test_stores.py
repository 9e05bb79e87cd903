"""Uploads, reads, lists and deletes through every client."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import stillframe
from fix_store import wait_for_cleaning
from fix_waits import eventually
from stillframe._remote import obstore_client, store, stores, unfinished

MIB = 1 << 20


@pytest.fixture(params=["s3", "memory", "local"])
def run(request, small_parts, tmp_path):
    """Return the URL of a directory in a store of each client. fsspec's local files can be renamed,
    and its memory cannot."""
    if request.param == "s3":
        request.getfixturevalue("server")
        return "s3://bkt/run"
    if request.param == "local":
        return f"local://{tmp_path}/run"
    opened, _ = stores.open_store("memory://bkt/run")
    opened.delete([each.key for each in opened.list("")])
    return "memory://bkt/run"


def keys_in(run):
    """Return the keys of all objects in the directory, temporary ones too."""
    opened, base = stores.open_store(run)
    if opened.client == "fsspec":
        opened._fs.invalidate_cache()
        return [each.partition("/run/")[2] for each in opened._fs.find(opened._path(base))]
    return [each.key.removeprefix(f"{base}/") for each in opened.list(base)]


def pieces_of(data, size=50_000):
    for start in range(0, len(data), size):
        yield memoryview(data)[start : start + size]


def content(opened, key):
    return bytes(opened.get(key, 0, opened.find(key).nbytes))


def is_exported(piece):
    """Return whether anybody refers to the memory of a bytearray."""
    try:
        piece.append(0)
    except BufferError:
        return True
    piece.pop()
    return False


# ---- every client ----


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 300_001])
@pytest.mark.parametrize("told", [True, False])
def test_object_has_the_bytes_of_the_pieces(run, nbytes, told):
    opened, key = stores.open_store(f"{run}/a.pt")
    data = os.urandom(nbytes)
    opened.put(key, pieces_of(data), nbytes if told else None)
    assert opened.find(key).nbytes == nbytes
    assert content(opened, key) == data
    assert opened.client == ("obstore" if run.startswith("s3") else "fsspec")


def test_read_of_a_range_returns_exactly_its_bytes(run):
    opened, key = stores.open_store(f"{run}/a.pt")
    opened.put(key, [b"0123456789"])
    assert bytes(opened.get(key, 3, 7)) == b"3456"
    assert bytes(opened.get(key, 7, 7)) == b""
    for start, end in ((5, 11), (10, 12), (20, 30)):
        with pytest.raises(OSError, match=f"reading bytes {start} to {end}"):
            opened.get(key, start, end)


@pytest.mark.parametrize("error", [RuntimeError("ours"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("before", [0, 1, 200_000])
@pytest.mark.parametrize("told", [True, False])
def test_exception_of_the_pieces_leaves_the_old_object(run, error, before, told):
    opened, key = stores.open_store(f"{run}/a.pt")
    opened.put(key, [b"old"])

    def pieces():
        yield from pieces_of(bytes(before))
        raise error

    with pytest.raises(type(error)) as raised:
        opened.put(key, pieces(), before if told else None)
    assert raised.value is error
    assert content(opened, key) == b"old"
    assert keys_in(run) == ["a.pt"]


def test_pieces_are_closed_when_the_upload_ends(run):
    opened, key = stores.open_store(f"{run}/a.pt")
    closed = []

    def pieces():
        try:
            yield b"a"
            yield "no buffer"
            yield b"b"
        finally:
            closed.append(True)

    with pytest.raises(OSError, match="the upload failed"):
        opened.put(key, pieces())
    assert closed
    with pytest.raises(FileNotFoundError):
        opened.find(key)


def test_list_returns_the_objects_below_a_directory_only(run):
    opened, base = stores.open_store(run)
    before = time.time() - 3600
    for name in ("step1/a b[1].pt", "step1/deep/ü.pt", "step10/d.pt", "step1.pt"):
        opened.put(f"{base}/{name}", [b"abc"])
    below = [f"{base}/step1/a b[1].pt", f"{base}/step1/deep/ü.pt"]
    for prefix in (f"{base}/step1", f"{base}/step1/"):
        found = sorted(opened.list(prefix))
        assert [(each.key, each.nbytes) for each in found] == [(key, 3) for key in below]
        assert all(before < each.modified_s < before + 7200 for each in found)
    assert len(keys_in(run)) == 4
    for prefix in ("step", "step1.pt", "never"):
        assert [*opened.list(f"{base}/{prefix}")] == []


def test_temporary_objects_are_not_listed(run):
    opened, base = stores.open_store(run)

    def pieces():
        yield b"new"
        assert [each.key for each in opened.list(base)] == [f"{base}/a.pt"]
        assert bytes(opened.get(f"{base}/a.pt", 0, 3)) == b"old"

    opened.put(f"{base}/a.pt", [b"old"])
    opened.put(f"{base}/a.pt", pieces())
    assert content(opened, f"{base}/a.pt") == b"new"


@pytest.mark.parametrize("age_h", [25, 23])
def test_temporary_of_a_killed_process_is_removed_after_a_day(tmp_path, age_h, caplog):
    left = tmp_path / "run" / f"a.pt.{'0' * 32}.stillframe-tmp"
    left.parent.mkdir()
    others = [tmp_path / "run" / "old.pt", tmp_path / "elsewhere.stillframe-tmp"]
    for each in (left, *others):
        each.write_bytes(b"x")
        then = time.time() - age_h * 3600
        os.utime(each, (then, then))
    opened, key = stores.open_store(f"file://{tmp_path}/run/b.pt")
    with caplog.at_level("INFO", "stillframe"):
        opened.put(key, [b"bytes"])
    assert left.exists() == (age_h == 23)
    assert (str(left) in caplog.text) == (age_h == 25)
    assert all(each.exists() for each in others)


def test_directory_is_cleaned_once_for_each_suffix(run, monkeypatch):
    opened, base = stores.open_store(run)
    cleaned = []
    monkeypatch.setattr(opened, "_remove_stale_uploads", cleaned.append)
    names = ("a.pt", "b.pt", "other/c.pt", "d.ckpt", "other/e.pt")
    for name in names:
        opened.put(f"{base}/{name}", [b"bytes"])
    assert cleaned == [f"{base}/{name}" for name in ("a.pt", "other/c.pt", "d.ckpt")]


def test_upload_of_a_killed_process_is_aborted_after_a_day(server, caplog):
    server.leave_upload("kills/killed.pt", 25)
    server.leave_upload("kills/%20 ü&.pt", 25)
    others = {"kills/young.pt": 23, "kills/backup.tar": 99, "kills/other/a.pt": 99, "a.pt": 99}
    for key, age_h in others.items():
        server.leave_upload(key, age_h)
    opened, key = stores.open_store(server.url("kills/b.pt"))
    with caplog.at_level("INFO", "stillframe"):
        opened.put(key, [b"bytes"])
        wait_for_cleaning()
    assert server.unfinished_uploads() == sorted(others)
    assert "aborted an upload to s3://bkt/kills/killed.pt" in caplog.text


def test_uploads_beside_an_object_in_the_bucket_itself_are_aborted(server):
    for key in ("old.pt", "run/old.pt"):
        server.leave_upload(key, 25)
    opened, key = stores.open_store(server.url("b.pt"))
    opened.put(key, [b"bytes"])
    wait_for_cleaning()
    assert server.unfinished_uploads() == ["run/old.pt"]


@pytest.mark.parametrize("names", ["fsspec", "obstore", "environment"])
def test_uploads_are_aborted_with_the_given_credentials(server, names, monkeypatch):
    options = server.options | {"token": "a token"}
    if names == "obstore":
        options = {"AWS_ACCESS_KEY_ID": options["key"], "secret_access_key": options["secret"]}
        options |= {"aws_endpoint": server.endpoint, "region": "eu-north-1"}
    if names == "environment":
        options = {}
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        monkeypatch.setenv("AWS_ENDPOINT", server.endpoint)  # botocore does not know this name
    else:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name)
    server.leave_upload("run/old.pt", 25)
    opened, key = stores.open_store(server.url("run/b.pt"), options)
    opened.put(key, [b"bytes"])
    wait_for_cleaning()
    assert server.unfinished_uploads() == []
    (listing,) = [each for each in server.requests if re.search("GET.*uploads", each.line)]
    assert listing.line.startswith("GET /bkt?")
    assert "run%2F" in listing.line  # only this directory
    headers = {name.lower(): value for name, value in listing.headers.items()}
    if names == "fsspec":
        assert headers["x-amz-security-token"] == "a token"


def test_upload_succeeds_without_botocore(server, monkeypatch, tmp_path):
    server.leave_upload("run/old.pt", 25)
    (tmp_path / "botocore.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    opened, key = stores.open_store(server.url("run/b.pt"))
    opened.put(key, [b"bytes"])
    wait_for_cleaning()
    assert server.objects() == {"run/b.pt": b"bytes"}
    assert server.unfinished_uploads() == ["run/old.pt"]


def test_store_that_does_not_list_uploads_takes_an_upload(server, caplog):
    server.fail(403, match="GET.*uploads")
    opened, key = stores.open_store(server.url("run/b.pt"))
    opened.put(key, [b"bytes"])
    wait_for_cleaning()
    assert len(server.lines("GET.*uploads")) == 1
    assert server.objects() == {"run/b.pt": b"bytes"}
    assert not caplog.records


def test_new_directories_are_cleaned_once_an_hour(server, monkeypatch):
    opened, _ = stores.open_store(server.url("run/b.pt"))
    for hour in (0, 0.9, 1.1, 2):
        clock = SimpleNamespace(monotonic=lambda hour=hour: 1e6 + hour * 3600)
        monkeypatch.setattr(obstore_client, "time", clock)
        opened.put(f"run/{hour}/b.pt", [b"bytes"])
        wait_for_cleaning()
    assert [line.rpartition("prefix=")[2] for line in server.lines("GET.*uploads")] == [
        "run%2F0%2F&delimiter=%2F",
        "run%2F1.1%2F&delimiter=%2F",
    ]


def test_no_process_is_started_without_botocore(server, monkeypatch):
    started = []
    opened, key = stores.open_store(server.url("run/b.pt"))
    monkeypatch.setattr(unfinished.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(unfinished.subprocess, "run", lambda *args, **options: started.append(args))
    opened.put(key, [b"bytes"])
    wait_for_cleaning()
    assert started == []


def test_frozen_program_is_not_started_again(server, monkeypatch):
    server.leave_upload("run/old.pt", 25)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    opened, key = stores.open_store(server.url("run/b.pt"))
    opened.put(key, [b"bytes"])
    wait_for_cleaning()
    assert server.unfinished_uploads() == ["run/old.pt"]


def test_cleaning_imports_nothing_into_the_training(server):
    server.leave_upload("run/old.pt", 25)
    program = f"""
import sys, threading, stillframe
stillframe.save({{"step": 1}}, "{server.url("run/b.pt")}")
for each in threading.enumerate():
    if each.name == "sf-clean":
        each.join()
assert "botocore" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert server.unfinished_uploads() == []


def test_store_that_cannot_list_takes_an_upload(tmp_path, monkeypatch):
    opened, key = stores.open_store(f"file://{tmp_path}/a.pt")

    def fail(path, **options):
        raise PermissionError(path)

    monkeypatch.setattr(opened._fs, "ls", fail)
    opened.put(key, [b"bytes"])
    assert (tmp_path / "a.pt").read_bytes() == b"bytes"


def test_upload_whose_pieces_read_from_the_store_does_not_hang(run):
    opened, key = stores.open_store(f"{run}/a.pt")
    opened.put(key, [b"old"])

    def pieces():
        yield b"new"
        yield content(opened, key)

    upload = threading.Thread(target=opened.put, args=(key, pieces()))
    upload.start()
    upload.join()
    assert content(opened, key) == b"newold"


def test_panic_in_a_client_raises_an_error(run, monkeypatch):
    class PanicException(BaseException):
        """The name of the exception that PyO3 makes of a panic."""

    def panic(*_):
        raise PanicException("called on a None value")

    opened, key = stores.open_store(f"{run}/a.pt")
    monkeypatch.setattr(opened, "_find", panic)
    with pytest.raises(OSError, match="looking it up failed: called on a None"):
        opened.find(key)


def test_whole_bucket_is_listed(server):
    opened, _ = stores.open_store("s3://bkt")
    server.fill({"a.pt": b"a", "b/c.pt": b"c"})
    assert [each.key for each in opened.list("")] == ["a.pt", "b/c.pt"]


def test_delete_of_a_missing_object_is_no_error(run):
    opened, key = stores.open_store(f"{run}/a.pt")
    opened.put(key, [b"abc"])
    opened.put(f"{key}.b", [b"abc"])
    opened.delete([f"{key}.never", key, key])
    assert keys_in(run) == ["a.pt.b"]
    opened.delete([])


def test_missing_object_is_named(run):
    opened, key = stores.open_store(f"{run}/a.pt")
    for call in (
        lambda: opened.find(key).nbytes,
        lambda: opened.get(key, 0, 1),
    ):
        with pytest.raises(FileNotFoundError) as raised:
            call()
        assert raised.value.errno == errno.ENOENT
        assert raised.value.filename == f"{run}/a.pt"


def test_directory_does_not_count_as_an_object(run):
    opened, key = stores.open_store(f"{run}/a.pt")
    opened.put(f"{key}/b.pt", [b"abc"])
    with pytest.raises(FileNotFoundError):
        opened.find(key)


def test_threads_may_use_one_store_at_the_same_time(run):
    opened, base = stores.open_store(run)
    errors = []

    def work(number):
        data = bytes([number]) * 150_000
        try:
            for each in range(3):
                opened.put(f"{base}/{number}-{each}", pieces_of(data))
                assert content(opened, f"{base}/{number}-{each}") == data
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert len(keys_in(run)) == 12


# ---- obstore ----


def test_pieces_are_released_when_the_store_has_acknowledged_them(server, small_parts):
    opened, key = stores.open_store("s3://bkt/a.pt")
    pieces = [bytearray(small_parts) for _ in range(4)]
    upload = threading.Thread(target=opened.put, args=(key, iter(pieces)))
    with server.held("partNumber=2") as hold:
        upload.start()
        hold.wait_for(1)
        others = [pieces[index] for index in (0, 2, 3)]
        assert eventually(lambda: not any(map(is_exported, others)))
        assert is_exported(pieces[1])
        assert server.objects() == {}
    upload.join()
    assert not is_exported(pieces[1])
    assert server.objects() == {"a.pt": bytes(4 * small_parts)}


def test_few_pieces_are_held_at_a_time(server, small_parts):
    opened, key = stores.open_store("s3://bkt/a.pt")
    pieces, held = [], []

    def made():
        for _ in range(40):
            pieces.append(bytearray(small_parts // 2))
            yield pieces[-1]
            held.append(sum(map(is_exported, pieces)))

    server.delay(0.005, match="partNumber")
    opened.put(key, made())
    parts = obstore_client.PARTS_AT_A_TIME + 1
    assert 2 < max(held) <= 2 * parts
    assert not any(map(is_exported, pieces))


def test_large_object_has_larger_parts():
    assert store.part_bytes(None) == store.part_bytes(0) == store.part_bytes(5 << 30) == 16 * MIB
    for nbytes in (160 << 30, 1 << 40, 5 << 40):
        part = store.part_bytes(nbytes)
        assert part % MIB == 0
        assert part * 9_000 < nbytes <= part * 9_500


def test_timeout_of_a_request_grows_with_its_length(server):
    opened, _ = stores.open_store("s3://bkt/a.pt")
    small, large = opened._client(MIB), opened._client(64 * MIB)
    assert small is opened._client()
    assert large is not small
    assert (small.client_options["timeout"], large.client_options["timeout"]) == ("2m", "8m")


def test_small_object_takes_one_request(server):
    opened, key = stores.open_store("s3://bkt/a.pt")
    opened.put(key, iter([b"ab", b"c"]), nbytes=3)
    assert server.lines("^(PUT|POST)") == ["PUT /bkt/a.pt"]
    assert server.objects() == {"a.pt": b"abc"}


def test_replaced_object_is_noticed(server):
    opened, key = stores.open_store("s3://bkt/a.pt")
    server.put(key, b"first")
    found = opened.find(key)
    assert bytes(opened.get(key, 0, 5, found.version)) == b"first"
    server.put(key, b"other")
    with pytest.raises(OSError, match="was replaced") as raised:
        opened.get(key, 0, 5, found.version)
    assert raised.value.errno == errno.ESTALE


def test_many_objects_are_deleted_and_listed(server):
    opened, _ = stores.open_store("s3://bkt")
    keys = [f"run/{number:04}" for number in range(1100)]
    server.fill(dict.fromkeys(keys, b"x"))
    assert [each.key for each in opened.list("run")] == keys
    opened.delete(keys)
    assert [*opened.list("run")] == []


def test_ctrl_c_ends_a_read(server):
    opened, key = stores.open_store("s3://bkt/a.pt")
    server.put(key, b"abc")
    main = threading.get_ident()
    with server.held("GET") as hold:

        def interrupt():
            hold.wait_for(1)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            opened.get(key, 0, 3)
            thread.join()
        thread.join()
    assert eventually(lambda: "sf-store" not in {each.name for each in threading.enumerate()})


def in_a_fork(check):
    """Return the status of a forked child that calls `check`."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raises_fork_error(*calls):
    for call in calls:
        try:
            call()
        except stillframe.ForkError as error:
            assert "spawn" in str(error)
        else:
            return False
    return True


def test_forked_child_can_neither_use_nor_open_a_store_of_its_parents_client(server):
    opened, key = stores.open_store("s3://bkt/a.pt")
    server.put(key, b"abc")
    opened.find(key)
    status = in_a_fork(
        lambda: raises_fork_error(
            lambda: opened.find(key).nbytes,
            lambda: opened.put(key, [b"abc"]),
            lambda: next(opened.list("")),
            lambda: stores.open_store("s3://bkt/a.pt"),
        )
    )
    assert status == 0


def test_forked_child_opens_a_store_of_fsspec_again():
    opened, key = stores.open_store("memory://bkt/a.pt")
    opened.put(key, [b"abc"])

    def check():
        again, _ = stores.open_store("memory://bkt/a.pt")
        return raises_fork_error(lambda: opened.find(key).nbytes) and again.find(key).nbytes == 3

    assert in_a_fork(check) == 0


# ---- opening ----


def test_opened_store_is_used_again_while_its_options_are_unchanged(server, monkeypatch):
    opened, key = stores.open_store("s3://bkt/a/b.pt")
    assert key == "a/b.pt"
    assert stores.open_store("s3a://bkt/c.pt") == (opened, "c.pt")
    assert stores.open_store("s3://bkt/c.pt", {})[0] is opened
    assert stores.open_store("s3://other/c.pt")[0] is not opened
    assert stores.open_store("s3://bkt/c.pt", server.options)[0] is not opened
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert stores.open_store("s3://bkt/c.pt")[0] is not opened
    for number in range(20):
        stores.open_store(f"s3://bkt{number}/a.pt")
    assert len(stores._kept) == stores.STORES_KEPT


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3:///a.pt", "names no bucket"),
        ("s3://bkt/a//b.pt", "no empty component"),
        ("s3://bkt//a.pt", "no empty component"),
        ("s3://bkt/a/../b.pt", "or .."),
        ("s3://bkt/./b.pt", r"that is \."),
        ("s3://bkt/a.pt?versionId=1", "no query"),
        ("s3://key:secret@bkt/a.pt", "not in the URL"),
        ("nonsense://bkt/a.pt", "nonsense"),
        ("a.pt", "scheme"),
    ],
)
def test_url_that_names_no_object_is_refused(url, reason):
    with pytest.raises(ValueError, match=reason):
        stores.open_store(url)


def test_message_names_the_extra_when_no_client_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(stillframe.StillframeError, match=r"pip install 'stillframe\[remote\]'"):
        stores.open_store("s3://elsewhere/a.pt")


def test_message_names_what_a_scheme_of_fsspec_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(stillframe.StillframeError, match=r"sftp://host: .*paramiko"):
        stores.open_store("sftp://user:pass@host/a.pt")


@pytest.mark.parametrize("error", [ValueError, ImportError])
def test_error_without_a_text_is_raised_with_the_url(error, monkeypatch):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    expected = ValueError if error is ValueError else stillframe.StillframeError
    with pytest.raises(expected, match=r"^memory://bkt"):
        stores.open_store("memory://bkt/a.pt")
