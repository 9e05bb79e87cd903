"""Stores that fail, answer half, or are down; and errors without credentials."""

import errno
import logging
import os
import traceback
from functools import partial

import pytest
from fix_processes import run_python
from fix_store import KEY, SECRET
from stillframe._remote import obstore_client, redact, store, stores

DATA = os.urandom(300_000)


def pieces():
    for start in range(0, len(DATA), 50_000):
        yield DATA[start : start + 50_000]


@pytest.fixture
def opened(server, small_parts):
    server.put("a.pt", b"old")
    opened, key = stores.open_store("s3://bkt/a.pt", server.options)
    assert key == "a.pt"
    return opened


@pytest.mark.parametrize(
    "fault",
    [
        lambda server: server.fail(500, times=3, match="partNumber"),
        lambda server: server.fail(503, times=3, match="POST .*uploads"),
        lambda server: server.fail(500, times=2, match="POST .*uploadId"),
        lambda server: server.cut_request(10_000, times=3, match="partNumber"),
        lambda server: server.lose_answer(times=3, match="partNumber"),
        lambda server: server.lose_answer(times=1, match="POST .*uploads"),
    ],
    ids=["parts 500", "begin 503", "end 500", "parts cut", "parts lost", "begin lost"],
)
def test_requests_of_an_upload_are_tried_again(server, opened, fault):
    fault(server)
    opened.put("a.pt", pieces())
    assert server.objects() == {"a.pt": DATA}
    assert len(server.requests) > 7


def test_request_without_an_answer_is_tried_again(server, monkeypatch, small_parts):
    monkeypatch.setattr(obstore_client, "REQUEST_S", 1)
    opened, key = stores.open_store("s3://bkt/a.pt")
    with server.held("partNumber=2", times=1):
        opened.put(key, pieces())
    assert server.objects() == {"a.pt": DATA}
    with server.held("GET", times=1):
        assert bytes(opened.get(key, 0, len(DATA))) == DATA


def test_slow_store_is_logged(server, opened, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        opened.put("a.pt", pieces())
        assert caplog.text == ""
        monkeypatch.setattr(store, "SLOW_S", 0)
        opened.put("a.pt", pieces())
    assert "s3://bkt/a.pt: the store acknowledged no part for 0 s" in caplog.text


def test_small_upload_is_tried_again(server, opened):
    server.fail(500, times=2, match="PUT")
    opened.put("a.pt", [b"new"], nbytes=3)
    assert server.objects() == {"a.pt": b"new"}


@pytest.mark.parametrize("knows_it", [True, False])
def test_upload_whose_last_answer_was_lost_is_complete(server, opened, caplog, knows_it):
    """Some stores do not know the upload any more when the client asks again."""
    end = "POST .*uploadId"
    if knows_it:
        server.cut_answer(10, times=1, match=end)
    else:
        server.lose_answer(times=1, match=end)
        server.fail(404, times=1, match=end)
    with caplog.at_level(logging.INFO):
        opened.put("a.pt", pieces())
    assert server.objects() == {"a.pt": DATA}
    assert "s3://bkt/a.pt is there" in caplog.text


@pytest.mark.parametrize(
    ("match", "part"),
    [("partNumber=3", True), ("POST .*uploadId", False), ("POST .*uploads", False), ("PUT", True)],
)
def test_store_that_stays_down_fails_the_upload(server, opened, match, part):
    server.fail(503, match=match)
    with pytest.raises(OSError, match=r"503.*SlowDown.*after 3 retries") as raised:
        opened.put("a.pt", pieces())
    assert raised.value.filename == "s3://bkt/a.pt"
    assert ("(part " in raised.value.strerror) is part
    assert server.objects() == {"a.pt": b"old"}
    assert server.unfinished_uploads() == []


def test_failed_upload_is_an_error_although_the_object_exists(server, opened):
    """A failed end of an upload is a failure, though the object exists."""
    server.fail(404, match="POST .*uploadId")
    with pytest.raises(FileNotFoundError, match="the upload failed"):
        opened.put("a.pt", pieces())
    assert server.objects() == {"a.pt": b"old"}


def test_store_that_refuses_connections_fails_every_call(server, opened):
    server.refusing = True
    for call in (
        partial(opened.put, "a.pt", pieces()),
        partial(opened.get, "a.pt", 0, 3),
        partial(opened.find, "a.pt"),
        partial(opened.delete, ["a.pt"]),
        lambda: [*opened.list("")],
    ):
        with pytest.raises(OSError, match=r"s3://bkt/") as raised:
            call()
        assert raised.value.errno == errno.EIO
    server.refusing = False
    assert server.objects() == {"a.pt": b"old"}


def test_exception_of_the_pieces_is_raised_though_the_abort_fails(server, opened):
    error = RuntimeError("ours")

    def failing():
        yield DATA
        server.fail(503)
        raise error

    with pytest.raises(RuntimeError) as raised:
        opened.put("a.pt", failing())
    assert raised.value is error
    assert server.objects() == {"a.pt": b"old"}


def test_truncated_answer_is_read_again(server, opened):
    server.put("big", DATA)
    server.cut_answer(1000, times=2, match="GET")
    assert bytes(opened.get("big", 0, len(DATA))) == DATA
    server.cut_answer(1000, match="GET")
    with pytest.raises(OSError, match="reading bytes 0 to 300000 failed"):
        opened.get("big", 0, len(DATA))


def test_short_answer_is_an_error(server, opened):
    with pytest.raises(OSError, match="reading bytes 1 to 9: the store sent 2 bytes"):
        opened.get("a.pt", 1, 9)


def test_missing_bucket_is_named(server):
    opened, key = stores.open_store("s3://nobody/a.pt")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        opened.put(key, [b"abc"])


def test_denied_access_is_a_permission_error(server, opened):
    server.fail(403)
    for call in (
        partial(opened.put, "a.pt", pieces()),
        partial(opened.get, "a.pt", 0, 3),
        lambda: [*opened.list("")],
    ):
        with pytest.raises(PermissionError, match=r"AccessDenied.*s3://bkt/") as raised:
            call()
        assert raised.value.errno == errno.EACCES


def test_process_can_exit_during_an_upload(server):
    """The upload's thread and those of the client end with the process, without an abort."""
    program = """
import atexit, sys, threading
from stillframe._remote import store, stores
store.PART_BYTES = 1 << 16
opened, key = stores.open_store("s3://bkt/a.pt")
atexit.register(lambda: print(opened.find("old").nbytes, flush=True))
started = threading.Event()
def pieces():
    for number in range(100):
        yield bytearray(1 << 15)
        if number == 4:
            started.set()
threading.Thread(target=opened.put, args=(key, pieces()), daemon=True).start()
started.wait()
"""
    server.put("old", b"abc")
    with server.held("partNumber"):
        done = run_python("-c", program, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert set(server.objects()) == {"old"}


# ---- credentials ----

HERE = "BlobEndpoint=http://127.0.0.1:1/a;AccountName=a"  # no server listens at this port
SECRETS = ("sec/ret+Word", "tokenOfASession", KEY, SECRET)


def with_everything(error):
    """Return every text that somebody may print of an error."""
    error.__traceback__ = error.__traceback__.tb_next  # the test's own frame has the options
    lines = traceback.TracebackException.from_exception(error, capture_locals=True).format()
    return "".join((str(error), repr(error), repr(error.args), *lines))


def assert_no_secret(text):
    for secret in SECRETS:
        assert secret not in text


def test_errors_have_no_credentials(server, caplog, monkeypatch):
    """The store's answer quotes the request with its headers."""

    def quote(request):
        headers = "".join(f"{name}:{value}\n" for name, value in request.headers.items())
        return (
            f"<Error><Code>SignatureDoesNotMatch</Code><Message>Your key {KEY} is wrong</Message>"
            f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>{headers}</StringToSign></Error>"
        )

    monkeypatch.setenv("AWS_SESSION_TOKEN", "tokenOfASession")
    server.fail(403, answer=quote)
    options = {"secret": "sec/ret+Word", "endpoint_url": server.endpoint}
    texts = []
    with caplog.at_level(logging.DEBUG):
        opened, key = stores.open_store("s3://bkt/a.pt", options)
        for call in (
            partial(opened.put, key, pieces()),
            partial(opened.put, key, [b"abc"], 3),
            partial(opened.get, key, 0, 3),
            partial(opened.find, key),
            partial(opened.delete, [key]),
            lambda: [*opened.list("")],
        ):
            try:
                call()
            except OSError as error:
                texts.append(with_everything(error))
    assert len(texts) == 6
    assert_no_secret("".join((*texts, caplog.text, repr(opened), str(opened))))
    assert "SignatureDoesNotMatch" in texts[0]
    assert server.requests[0].headers["x-amz-security-token"] == "tokenOfASession"


def test_error_has_no_credentials_of_a_profile(server, monkeypatch, tmp_path):
    lines = (
        "[mine]",
        "aws_access_key_id = keyOfAFile",
        "aws_secret_access_key = x",
        f"endpoint_url = {server.endpoint}",
    )
    (tmp_path / "credentials").write_text("\n".join(lines))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    server.fail(
        403,
        answer=lambda request: f"<Error><Message>{request.headers['authorization']}</Message>",
    )
    opened, key = stores.open_store("s3://bkt/a.pt", {"profile": "mine"})
    with pytest.raises(PermissionError) as raised:
        opened.get(key, 0, 3)
    assert "keyOfAFile" in server.requests[0].headers["authorization"]
    assert "keyOfAFile" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://me:sec/ret+Word@bkt/a.pt", {}),
        ("ftp://me:sec/ret+Word@127.0.0.1:1/a.pt", {}),
        ("nonsense://me:sec/ret+Word@host/a.pt?sig=tokenOfASession", {}),
        ("s3://bkt/a.pt", {"nonsense": "sec/ret+Word"}),
        ("s3://bkt/a.pt", {"secret": "sec/ret+Word", "endpoint_url": 7}),
        ("s3://bkt/a.pt", {"key": "sec/ret+Word", "endpoint_url": "http://sec/ret+Word"}),
        ("gs://bkt/a.pt", {"token": "sec/ret+Word"}),
        ("gs://bkt/a.pt", {"token": {"private_key": "sec/ret+Word", "type": "service_account"}}),
        ("az://box/a.pt", {"account_key": "sec/ret+Word"}),
        ("az://box/a.pt", {"connection_string": f"AccountName=a;AccountKey=sec/ret+Word;{HERE}"}),
        ("az://box/a.pt", {"connection_string": f"{HERE};SharedAccessSignature=sig=sec/ret+Word"}),
        ("memory://a.pt", {"secret": "sec/ret+Word"}),
    ],
)
def test_errors_of_opening_have_no_credentials(url, options, monkeypatch):
    monkeypatch.setattr(obstore_client, "RETRIES", 0)
    with pytest.raises((OSError, ValueError)) as raised:
        opened, key = stores.open_store(url, options)
        assert_no_secret(repr(opened))
        opened.get(key, 0, 3)
    lines = traceback.format_exception(raised.value)
    assert_no_secret("".join((str(raised.value), repr(raised.value), *lines[1:])))


@pytest.mark.parametrize(
    ("text", "secrets", "left"),
    [
        ("it failed\n\nDebug source:\nabcd", (), "it failed"),
        ("no https://me:pw@host/a", (), "no https://***@host/a"),
        ("no https://host/a?sv=1&sig=x%3D now", (), "no https://host/a?*** now"),
        ("Authorization: Bearer abc", (), "*** ***"),
        ("token a+b/c= or a%2Bb%2Fc%3D", ("a+b/c=",), "token *** or ***"),
        ("X-Amz-Signature=abc&x", (), "***"),
        ("one\n  two", (), "one two"),
        ("x" * 1000, (), "x" * 400 + "..."),
        (
            "Generic S3 error: Error performing PUT https://h:9/b/a?partNumber=3 in 5ms, after 2"
            " retries, max_retries: 2, retry_timeout: 180s  - Server returned non-2xx status code:"
            " 503 Slow Down: <?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Wait"
            "</Message><Quote>abc</Quote></Error>",
            (),
            "503 Slow Down: SlowDown: Wait (PUT, h:9, after 2 retries)",
        ),
        (
            "Error performing GET http://h/b in 1s - 403 Forbidden: <Error><Other>abc</Other>",
            (),
            "403 Forbidden (GET, h)",
        ),
    ],
)
def test_text_of_an_error_is_short_and_has_no_credentials(text, secrets, left):
    assert redact.redact(text, secrets) == left
