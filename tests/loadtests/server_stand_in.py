# SPDX-License-Identifier: Apache-2.0
"""A server that streams completions as vLLM does, and misbehaves on request."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GAP_S = 0.005


@dataclass
class StandIn:
    """A running server.

    Attributes:
        faults: of requests in turn: `good`, `status`, `error`, `cut`, `short`, `hang`, `burst` or `refuse`.
        bodies: of all requests.
        key: that requests need; empty where they need none.
        health: the status of GET /health.
        busiest: the most requests that were in flight at once.
    """

    faults: tuple[str, ...] = ("good",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0
    url: str = ""
    key: str = ""
    health: int = 200
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, body: dict[str, Any]) -> str:
        with self.lock:
            self.bodies.append(body)
            self.times.append(time.monotonic())
            self.busy += 1
            self.busiest = max(self.busy, self.busiest)
            return self.faults[(len(self.bodies) - 1) % len(self.faults)]


def handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Small packets are not held back until the last one is acknowledged; asyncio does the same.
        disable_nagle_algorithm = True
        held = b""

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if stand_in.key and self.headers["Authorization"] != f"Bearer {stand_in.key}":
                self.answer(401, {"error": "Unauthorized"})
            elif self.path == "/health":
                self.answer(stand_in.health, "")
            elif self.path in ("/version", "/metrics"):
                self.answer(404, "")
            else:
                self.answer(200, {"data": [{"id": "stand-in", "max_model_len": 4096}]})

        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if stand_in.key and self.headers["Authorization"] != f"Bearer {stand_in.key}":
                self.answer(401, {"error": "Unauthorized"})
                return
            fault = stand_in.take(body)
            try:
                if fault == "refuse":
                    self.close_connection = True
                elif fault == "status":
                    self.answer(503, {"error": "overloaded"})
                else:
                    self.stream(body, fault)
            except OSError:
                self.close_connection = True
            finally:
                with stand_in.lock:
                    stand_in.busy -= 1

        def event(self, data: str, held: bool = False) -> None:
            """Send, with all that was held back before."""
            chunk = f"data: {data}\n\n".encode()
            self.held += b"%x\r\n%s\r\n" % (len(chunk), chunk)
            if not held:
                self.wfile.write(self.held)
                self.held = b""

        def stream(self, body: dict[str, Any], fault: str) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            count, prompt = body["max_tokens"], len(body["prompt"])
            count -= fault == "short"
            for number in range(1, count + 1):
                time.sleep(60 if fault == "hang" and number == 2 else GAP_S)
                if number == 2 and fault == "cut":
                    self.close_connection = True
                    return
                if number == 2 and fault == "error":
                    self.event(json.dumps({"error": {"message": "boom"}}))
                    break
                usage = {"completion_tokens": number, "prompt_tokens": prompt}
                self.event(json.dumps({"choices": [{"text": "x"}], "usage": usage}), held=fault == "burst")
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

    return Handler


@contextmanager
def serving(*faults: str) -> Iterator[StandIn]:
    """A server on a port of its own."""
    stand_in = StandIn(faults or ("good",))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stand_in))
    server.daemon_threads = True
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
