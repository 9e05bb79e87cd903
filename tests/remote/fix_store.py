"""An S3 server on loopback behind a proxy that delays, fails and cuts requests on demand.

    product ──▶ proxy (threads of this process) ──▶ moto (s3_server.py, a process)

Every test has an empty bucket "bkt". `server.requests` lists what the product asked for.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fix_waits import eventually
from stillframe._remote import obstore_client, store, stores
from stillframe._save.core_save import CoreSave

KEY, SECRET = "AKIATESTKEYOFTESTS", "secret/OfTheTests+Only123"
READ = 64 << 10  # bytes of a body that the proxy reads at once
LISTENING, TIME_WAIT = "0A", "06"  # states in /proc/net/tcp


@dataclass
class Request:
    """A request that has reached the proxy.

    Attributes:
        line: The method, the path and the query: "PUT /bkt/a?partNumber=1&uploadId=...".
        status: The status of the answer; 0 if there was none.
    """

    line: str
    headers: dict[str, str]
    nbytes: int = 0
    status: int = 0


@dataclass
class Fault:
    """A fault that happens to requests whose line matches a regular expression.

    Attributes:
        left: How many more requests it happens to.
        apply: Called with the request before it goes to moto; returns the status to answer with in
            moto's place, or None.
    """

    pattern: str
    left: float
    apply: Callable[[Request], int | None] = lambda request: None
    cut_request: int | None = None
    cut_answer: int | None = None
    answer: Callable[[Request], str] | None = None


class Cut(Exception):
    """The connection is closed now."""


class Hold:
    """Requests that are stopped until a block ends."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._stopped = 0
        self._over = False

    def stop(self, _request: Request) -> None:
        with self._change:
            self._stopped += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._over)

    def wait_for(self, count: int = 1) -> None:
        """Wait until so many requests are stopped."""
        with self._change:
            assert self._change.wait_for(lambda: self._stopped >= count, timeout=60)

    def release(self) -> None:
        with self._change:
            self._over = True
            self._change.notify_all()


class Server:
    """The server, as the product sees it.

    Attributes:
        endpoint: The proxy's address.
        options: `storage_options` for it, with fsspec's names.
        requests: All requests of this test, in the order of their arrival.
        refusing: Close every connection before a request is read.
    """

    def __init__(self, moto: int) -> None:
        self._moto = moto
        self._proxy = _Proxy(("127.0.0.1", 0), _Handler)
        self._proxy.server = self
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._holds: list[Hold] = []
        self.refusing = False
        self.requests: list[Request] = []
        self.endpoint = f"http://127.0.0.1:{self._proxy.server_port}"
        self.options = {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}
        self._thread = threading.Thread(target=self._proxy.serve_forever, daemon=True)
        self._thread.start()

    # ---- what is in the bucket ----

    def url(self, key: str) -> str:
        return f"s3://bkt/{key}"

    def objects(self) -> dict[str, bytes]:
        """Return the bytes of each object."""
        return {key: bytes.fromhex(data) for key, data in self._control("objects").items()}

    def unfinished_uploads(self) -> list[str]:
        """Return the key of each upload that was neither completed nor aborted."""
        found: list[str] = self._control("uploads")
        return found

    def leave_upload(self, key: str, age_h: float) -> None:
        """Leave an unfinished upload that began some hours ago."""
        self._control("leave", {"key": key, "age_h": age_h})

    def put(self, key: str, data: bytes) -> None:
        """Make an object, past the proxy."""
        self.fill({key: data})

    def fill(self, objects: dict[str, bytes]) -> None:
        """Make many objects at once."""
        self._control("fill", {key: data.hex() for key, data in objects.items()})

    # ---- faults, until the test ends ----

    def delay(self, seconds: float, *, match: str = "", times: float = math.inf) -> None:
        """Delay requests before they go on."""
        self._add(Fault(match, times, lambda request: time.sleep(seconds)))

    def fail(
        self,
        status: int = 503,
        *,
        times: float = math.inf,
        match: str = "",
        answer: Callable[[Request], str] | None = None,
    ) -> None:
        """Answer requests with an error; `answer` makes the body of that."""
        self._add(Fault(match, times, lambda request: status, answer=answer))

    def cut_request(self, after: int, *, times: float = math.inf, match: str = "") -> None:
        """Close the connection when so many bytes of a request's body have come."""
        self._add(Fault(match, times, cut_request=after))

    def cut_answer(self, after: int, *, times: float = math.inf, match: str = "") -> None:
        """Close the connection when so many bytes of an answer's body have gone."""
        self._add(Fault(match, times, cut_answer=after))

    def lose_answer(self, *, times: float = math.inf, match: str = "") -> None:
        """Close the connection when moto has done what a request asks for."""
        self._add(Fault(match, times, cut_answer=-1))

    @contextlib.contextmanager
    def held(self, match: str = "", *, times: float = math.inf) -> Iterator[Hold]:
        """Stop matching requests until the block ends."""
        hold = Hold()
        fault = Fault(match, times, hold.stop)
        self._holds.append(hold)
        self._add(fault)
        try:
            yield hold
        finally:
            with self._lock:
                self._faults.remove(fault)
            hold.release()

    def lines(self, match: str = "") -> list[str]:
        """Return the lines of the requests that match."""
        return [each.line for each in self.requests if re.search(match, each.line)]

    # ---- for the proxy and the fixture ----

    def reset(self) -> None:
        with self._lock:
            self._faults.clear()
            self.refusing = False
        for hold in self._holds:
            hold.release()
        self._holds.clear()
        self._disconnect()
        self._control("reset")
        self.requests.clear()

    def _disconnect(self) -> None:
        """Close all connections, so that none is closed in a later test that counts descriptors."""
        port = f"0100007F:{self._proxy.server_port:04X}"

        def are_closed() -> bool:
            self._proxy.disconnect()  # a client that tries again may have made another one
            lines = Path("/proc/net/tcp").read_text().splitlines()
            states = [line.split()[3] for line in lines if port in line]
            return {*states} <= {LISTENING, TIME_WAIT}

        assert eventually(are_closed)

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.left > 0 and re.search(fault.pattern, request.line):
                    fault.left -= 1
                    return fault
        return None

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        moto = http.client.HTTPConnection("127.0.0.1", self._moto)
        try:
            moto.request(method, path, body, headers)
            answer = moto.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            moto.close()

    def _add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def _control(self, name: str, given: Any = None) -> Any:
        body = json.dumps(given).encode()
        status, _, data = self.forward("POST", f"/_control/{name}", body, {})
        assert status == 200, (name, status, data)
        return json.loads(data)


class _Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    server: Server

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open: set[socket.socket] = set()

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        try:
            super().finish_request(request, client_address)
        finally:
            self.open.discard(request)

    def disconnect(self) -> None:
        for each in tuple(self.open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no error, since tests cut connections and kill clients on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Proxy

    def handle_one_request(self) -> None:
        if self.server.server.refusing:
            self._reset()
            return
        try:
            super().handle_one_request()
        except Cut:
            self._reset()

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each request."""

    def _answer(self) -> None:
        server = self.server.server
        if server.refusing:  # said while this connection waited for its next request
            raise Cut
        request = Request(f"{self.command} {self.path}", dict(self.headers.items()))
        fault = server.fault_for(request)
        body = self._body(request, None if fault is None else fault.cut_request)
        if (status := None if fault is None else fault.apply(request)) is not None:
            code = {403: "AccessDenied", 404: "NoSuchUpload", 503: "SlowDown"}.get(status, "Error")
            request.status = status
            text = f"<Error><Code>{code}</Code><Message>The test said so</Message></Error>"
            if fault is not None and fault.answer is not None:
                text = fault.answer(request)
            self._send(status, [("Content-Type", "application/xml")], text.encode(), None)
            return
        status, headers, data = server.forward(
            self.command, self.path, body, {**request.headers, "Connection": "close"}
        )
        request.status = status
        self._send(status, headers, data, None if fault is None else fault.cut_answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _body(self, request: Request, cut: int | None) -> bytes:
        left = int(self.headers.get("Content-Length") or 0)
        parts = []
        while left:
            if cut is not None and request.nbytes >= cut:
                raise Cut
            part = self.rfile.read(min(left, READ if cut is None else min(READ, cut)))
            if not part:
                raise Cut
            parts.append(part)
            request.nbytes += len(part)
            left -= len(part)
        if cut is not None:
            raise Cut
        return b"".join(parts)

    def _send(
        self, status: int, headers: list[tuple[str, str]], data: bytes, cut: int | None
    ) -> None:
        if cut == -1:
            raise Cut
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut is not None and cut < len(data):
            self.wfile.write(data[:cut])
            self.wfile.flush()
            raise Cut
        self.wfile.write(data)

    def _reset(self) -> None:
        """Close the connection at once."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """Start moto and the proxy, once for all tests."""
    program = Path(__file__).with_name("s3_server.py")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        server = Server(int(process.stdout.readline()))
        yield server
        server.close()
        process.stdin.close()
        process.wait()


@pytest.fixture
def server(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return the server with an empty bucket "bkt" and without faults.

    The environment has its address and credentials, so that URLs work without options. A store that
    stays down fails soon.
    """
    s3_server.reset()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(obstore_client, "RETRIES", 3)
    monkeypatch.setattr(obstore_client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(obstore_client, "LONGEST_PAUSE_S", 0.01)
    stores._kept.clear()
    yield s3_server
    wait_for_cleaning()
    stores._kept.clear()
    s3_server.reset()


def wait_for_cleaning() -> None:
    """Wait until unfinished uploads have been aborted."""
    for thread in threading.enumerate():
        if thread.name == "sf-clean":
            thread.join()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Upload in small parts; return their size."""
    monkeypatch.setattr(store, "PART_BYTES", 64 << 10)
    monkeypatch.setattr(obstore_client, "ONE_REQUEST_BYTES", 1 << 10)
    return store.PART_BYTES


def submit_after_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each call submit its save only after another thread has cancelled the save."""
    cancelled = threading.Event()
    cancel, launch = CoreSave.cancel, CoreSave.launch

    def cancelling(save: CoreSave) -> bool:
        try:
            return cancel(save)
        finally:
            cancelled.set()

    def launching(save: CoreSave) -> None:
        assert cancelled.wait(60)
        launch(save)

    monkeypatch.setattr(CoreSave, "cancel", cancelling)
    monkeypatch.setattr(CoreSave, "launch", launching)
