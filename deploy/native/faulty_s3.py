"""A proxy in front of an S3 server that does to requests what networks and busy stores do: a fake with a name."""

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_CHUNK = 2**16
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


class Fault(Enum):
    """What happens to one request."""

    SLOW_DOWN = "503 SlowDown; the server never hears of it"
    ERROR = "500 InternalError; the server never hears of it"
    CONFLICT = "409 ConditionalRequestConflict; the server never hears of it"
    EXPIRED = "400 ExpiredToken; the server never hears of it"
    LOST_ANSWER = "the server does it, the connection closes without an answer"
    LOST_REQUEST = "the connection is reset before the server hears of it"
    TRUNCATED = "half of the answer's body, then the connection closes"
    SHORTENED = "half of the answer's body, and nothing that says so"
    RESET_MIDWAY = "half of the answer's body, then the connection is reset"


_REFUSALS = {
    Fault.SLOW_DOWN: (503, "SlowDown", "Please reduce your request rate."),
    Fault.ERROR: (500, "InternalError", "We encountered an internal error. Please try again."),
    Fault.CONFLICT: (409, "ConditionalRequestConflict", "A conflicting conditional operation is in progress."),
    Fault.EXPIRED: (400, "ExpiredToken", "The provided token has expired."),
}


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it came in."""

    method: str
    path: str  # with the query
    headers: Mapping[str, str]
    fault: Fault | None

    @property
    def access_key(self) -> str:
        """Whose signature it carries."""
        return self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]


@dataclass
class _Plan:
    fault: Fault
    method: str | None
    containing: str
    times: int


@dataclass
class FaultyS3:
    """Forwards to `upstream`; `url` is what clients use. A context manager; everything may be changed while it runs."""

    upstream: str
    latency_s: float = 0.0  # before each answer
    ignores_conditions: bool = False  # drop If-Match and If-None-Match of writes, as old gateways do
    storm: float = 0.0  # share of requests that get a 503
    seed: int = 0
    observe: Callable[[SeenRequest, bytes, int], None] | None = None  # request, its body, the status it got
    requests: list[SeenRequest] = field(default_factory=list)
    _plans: list[_Plan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def plan(self, fault: Fault, *, method: str | None = None, containing: str = "", times: int = 1) -> None:
        """Have the next `times` requests fail whose method and path (with query) are so."""
        with self._lock:
            self._plans.append(_Plan(fault, method, containing, times))

    def seen(self, method: str | None = None, containing: str = "") -> list[SeenRequest]:
        """Requests so far."""
        with self._lock:
            return [r for r in self.requests if method in (None, r.method) and containing in unquote(r.path)]

    def note(self, request: SeenRequest) -> SeenRequest:
        """Decide what happens to a request, and remember it."""
        with self._lock:
            request = replace(request, fault=self._fault_of(request))
            self.requests.append(request)
        return request

    def _fault_of(self, request: SeenRequest) -> Fault | None:
        for plan in self._plans:
            if plan.times and plan.method in (None, request.method) and plan.containing in unquote(request.path):
                plan.times -= 1
                return plan.fault
        return Fault.SLOW_DOWN if self.storm and self._random.random() < self.storm else None

    def __enter__(self) -> "FaultyS3":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: FaultyS3) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True  # else header and body go out 40 ms apart

    def _handle(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = proxy.note(SeenRequest(self.command, self.path, dict(self.headers.items()), None))
        if proxy.latency_s:
            time.sleep(proxy.latency_s)
        if request.fault is Fault.LOST_REQUEST:
            self._reset()
        elif request.fault in _REFUSALS:
            self._refuse(*_REFUSALS[request.fault])
        else:
            self._forward(request, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _forward(self, request: SeenRequest, body: bytes) -> None:
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in ("expect", "connection")
        }
        if self.server.proxy.ignores_conditions and self.command in ("PUT", "POST"):
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        with self._answer(headers, body) as answer:
            if answer is not None and self.server.proxy.observe is not None:
                self.server.proxy.observe(request, body, answer.status)
            if answer is None:
                self._reset()
            elif request.fault is Fault.LOST_ANSWER:
                answer.read()
                self.close_connection = True
            else:
                self._pass_on(answer, request.fault)

    @contextlib.contextmanager
    def _answer(self, headers: Mapping[str, str], body: bytes) -> Iterator[http.client.HTTPResponse | None]:
        """The server's; None when it cannot be reached."""
        upstream = urlsplit(self.server.proxy.upstream)
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        try:
            try:
                connection.request(self.command, self.path, body or None, dict(headers))
                answer = connection.getresponse()
            except OSError:
                yield None
                return
            yield answer
        finally:
            connection.close()

    def _pass_on(self, answer: http.client.HTTPResponse, fault: Fault | None) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = answer.getheader("Content-Length")
        data = b"" if length is not None else answer.read()
        left = int(length or 0) if fault is None else int(length or 0) // 2
        shown = left if fault is Fault.SHORTENED else int(length or len(data))
        self.send_header("Content-Length", str(shown))
        self.end_headers()
        self.wfile.write(data)
        while self.command != "HEAD" and left and (data := answer.read(min(_CHUNK, left))):
            self.wfile.write(data)
            left -= len(data)
        if fault is Fault.TRUNCATED:
            self.close_connection = True
        elif fault is Fault.RESET_MIDWAY:
            self._reset()

    def _reset(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.connection.close()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""
