"""A small S3 server on loopback for `remote.py`. It counts the bytes of objects and keeps none.

The kernel discards the bytes (MSG_TRUNC), so the server takes little processor time. It knows the
requests with which a client uploads an object, whole or in parts, and waits `latency_s` before it
answers one. It checks no signature.
"""

from __future__ import annotations

import itertools
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_DISCARD = 1 << 20  # the most bytes to discard with one call
_UNUSED = bytearray(_DISCARD)  # recv_into needs a buffer, but with MSG_TRUNC writes nothing to it
_XML = '<?xml version="1.0" encoding="UTF-8"?>'


class Server:
    """The server, on threads of the process that makes it.

    It keeps only lengths: of each object, and of the parts so far of each upload under way.

    Attributes:
        latency_s: How long each request waits before it is handled, in seconds.
    """

    def __init__(self) -> None:
        self.latency_s = 0.0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._parts: dict[str, int] = {}
        self._objects: dict[str, int] = {}
        self._requests = 0
        handler = type("Handler", (_Handler,), {"store": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def set_latency(self, seconds: float) -> None:
        self.latency_s = seconds

    def take(self, key: str) -> dict[str, int]:
        """Forget an object; return its length, and the number of requests since the last call.

        Raises:
            KeyError: There is no such object.
        """
        with self._lock:
            requests, self._requests = self._requests, 0
            return {"nbytes": self._objects.pop(key), "requests": requests}

    # ---- for the handlers ----

    def begin(self) -> str:
        """Return the id of a new upload."""
        return f"upload{next(self._numbers)}"

    def count(self) -> None:
        """Count one request."""
        with self._lock:
            self._requests += 1

    def add(self, key: str, upload: str | None, nbytes: int) -> None:
        """Note the length of a part of `upload`, or, if that is None, of a whole object."""
        with self._lock:
            if upload is None:
                self._objects[key] = nbytes
            else:
                self._parts[upload] = self._parts.get(upload, 0) + nbytes

    def complete(self, key: str, upload: str) -> None:
        """End an upload: its parts become the object `key`."""
        with self._lock:
            self._objects[key] = self._parts.pop(upload)

    def abort(self, upload: str) -> None:
        with self._lock:
            self._parts.pop(upload, None)

    def length(self, key: str) -> int | None:
        """Return the length of an object in bytes, or None if there is no such object."""
        with self._lock:
            return self._objects.get(key)

    def remove(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)


class _Handler(BaseHTTPRequestHandler):
    """The handler of one connection's requests; `store` is the server, set in a subclass."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing; the base class prints a line for each request."""

    def parse_request(self) -> bool:
        """Count the request, wait for the latency, and set `key` and `query` for the methods below.

        The base class calls it first for each request. It returns whether the request is valid.
        """
        good = super().parse_request()
        if good:
            self.store.count()
            time.sleep(self.store.latency_s)
            url = urlsplit(self.path)
            self.key = url.path.lstrip("/").partition("/")[2]  # without the bucket
            query = parse_qs(url.query, keep_blank_values=True)
            self.query = {name: values[0] for name, values in query.items()}
        return good

    def do_PUT(self) -> None:
        nbytes = self._discard_body()  # of a part, if there is an uploadId
        self.store.add(self.key, self.query.get("uploadId"), nbytes)
        self._answer(200, headers={"ETag": f'"{nbytes:032x}"'})

    def do_POST(self) -> None:
        body = self._read_body()
        if "uploads" in self.query:
            inside = f"<UploadId>{self.store.begin()}</UploadId>"
            self._answer_xml("InitiateMultipartUploadResult", inside)
        elif "uploadId" in self.query:
            self.store.complete(self.key, self.query["uploadId"])
            self._answer_xml("CompleteMultipartUploadResult", f"<ETag>{'0' * 32}</ETag>")
        else:  # a request to delete several objects
            for key in re.findall(r"<Key>([^<]*)</Key>", body.decode()):
                self.store.remove(key)
            self._answer_xml("DeleteResult", "")

    def do_DELETE(self) -> None:
        if "uploadId" in self.query:
            self.store.abort(self.query["uploadId"])
        else:
            self.store.remove(self.key)
        self._answer(204)

    def do_HEAD(self) -> None:
        nbytes = self.store.length(self.key) if self.key else 0  # no key: the bucket, which exists
        if nbytes is None:
            self._answer(404)
            return
        date = self.date_time_string(0)
        self._answer(200, length=nbytes, headers={"ETag": '"0"', "Last-Modified": date})

    def do_GET(self) -> None:
        if self.key:
            self._answer(404)
        else:  # an empty listing
            inside = "<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
            self._answer_xml("ListBucketResult", inside)

    # ---- bodies ----

    def _discard_body(self) -> int:
        """Read and discard the body; return how many of its bytes belong to the object.

        In a body that is encoded as aws-chunked, the other bytes belong to the encoding.
        """
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            nbytes = int(self.headers["X-Amz-Decoded-Content-Length"])
        else:
            nbytes = int(self.headers.get("Content-Length", 0))
        if "Content-Length" not in self.headers:
            self._discard_chunks()
        else:
            self._discard(int(self.headers["Content-Length"]))
        return nbytes

    def _discard(self, left: int) -> None:
        """Discard the next `left` bytes of the connection."""
        if left:  # the file object may have read some of the body together with the headers
            left -= len(self.rfile.read1(min(left, _DISCARD)))  # type: ignore[attr-defined]
        while left:
            length = self.connection.recv_into(_UNUSED, min(left, _DISCARD), socket.MSG_TRUNC)
            if length == 0:
                raise ConnectionResetError
            left -= length

    def _discard_chunks(self) -> None:
        """Discard a body with Transfer-Encoding: chunked, and the trailers after it."""
        while size := int(self.rfile.readline().partition(b";")[0], 16):  # the last chunk has 0
            self._discard(size)
            self.rfile.readline()  # the line end after the chunk
        while self.rfile.readline().strip():  # trailers end with an empty line
            pass

    def _read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    # ---- answers ----

    def _answer_xml(self, name: str, inside: str) -> None:
        body = f"{_XML}<{name}><Bucket>bkt</Bucket><Key>{self.key}</Key>{inside}</{name}>"
        self._answer(200, body.encode(), headers={"Content-Type": "application/xml"})

    def _answer(
        self,
        status: int,
        body: bytes = b"",
        length: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
