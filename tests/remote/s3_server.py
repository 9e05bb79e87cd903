"""moto's S3 in a process of its own: `s3_server.py` prints its port, and ends with its input.

It answers one request at a time, because moto loses a part that two requests write at the same
time. Paths below `/_control/` are for the tests.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import create_backend_app
from moto.s3 import models, responses
from werkzeug.serving import WSGIRequestHandler, make_server

# AWS refuses smaller parts; the tests need several parts of small states.
models.S3_UPLOAD_PART_MIN_SIZE = 0

REGION = "us-east-1"

# The age in hours of each upload that a test has left. The others have just begun.
ages_h: dict[str, float] = {}


def control(name: str, given: Any = None) -> Any:
    """Do what a test asks for; return the answer."""
    backend = models.s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    if name == "reset":
        models.s3_backends[DEFAULT_ACCOUNT_ID].reset()
        models.s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket("bkt", REGION)
        return None
    bucket = backend.buckets["bkt"]
    if name == "objects":
        return {key: bucket.keys[key].value.hex() for key in sorted(bucket.keys)}
    if name == "uploads":
        return sorted(each.key_name for each in bucket.multiparts.values())
    if name == "leave":
        left = models.FakeMultipart(given["key"], {}, DEFAULT_ACCOUNT_ID, REGION)
        left.id = f"{uuid.uuid4().hex}&?/+ "  # AWS does not say what is in an id
        bucket.multiparts[left.id] = left
        ages_h[left.id] = given["age_h"]
        return None
    if name == "fill":
        for key, data in given.items():
            backend.put_object("bkt", key, bytes.fromhex(data))
        return None
    raise KeyError(name)


def with_control(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if not path.startswith("/_control/"):
            return app(environ, start_response)
        given = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        body = json.dumps(control(path.removeprefix("/_control/"), given)).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    return answer


_list_uploads = responses.S3Response.list_multipart_uploads


def list_uploads(self: Any) -> Any:
    """Answer as moto does, but with the time at which each upload began: moto says 2010."""
    status, headers, body = _list_uploads(self)
    ids = iter([*re.findall("<UploadId>(.*?)</UploadId>", body)])

    def begun(_match: re.Match[str]) -> str:
        age_h = ages_h.get(html.unescape(next(ids)), 0.0)
        time = datetime.now(UTC) - timedelta(hours=age_h)
        return f"<Initiated>{time:%Y-%m-%dT%H:%M:%S.000Z}</Initiated>"

    return status, headers, re.sub("<Initiated>.*?</Initiated>", begun, body)


responses.S3Response.list_multipart_uploads = list_uploads


class Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Write nothing: pytest would show it in front of the test's own output."""


def end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    server = make_server(
        "127.0.0.1", 0, with_control(create_backend_app("s3")), request_handler=Quiet
    )
    control("reset")
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    print(server.server_port, flush=True)
    server.serve_forever()
