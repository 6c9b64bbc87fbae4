"""Serves metrics over HTTP on a thread of its own, to few clients, for a short time each.

At most `MAX_OPEN` connections are open for `OPEN_S` each, and `PER_SECOND` are taken: a client that
is slow, hostile or many costs the run nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.registry import Collector

MAX_OPEN, OPEN_S, PER_SECOND = 8, 5.0, 10  # project defaults; a scrape takes milliseconds


class Endpoint(ThreadingHTTPServer):
    """The server; `serve_forever` is its thread's work, and `collector` is called on any thread.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """

    daemon_threads = True
    request_queue_size = MAX_OPEN

    def __init__(self, host: str, port: int, collector: Collector) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(collector)
        self._since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without a look-up of the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread, unless there are too many."""
        with self._lock:
            is_full = len(self._since) >= MAX_OPEN
            if not is_full:
                self._since[request] = time.monotonic()
        if is_full:
            self.shutdown_request(request)
        else:
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # at the limit of threads
                self.shutdown_request(request)
        time.sleep(1 / PER_SECOND)

    def close_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._since.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        """End connections that are open for too long."""
        until = time.monotonic() - OPEN_S
        with self._lock:
            late = [request for request, since in self._since.items() if since < until]
        for request in late:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""


class _Handler(MetricsHandler):
    server: Endpoint
    timeout = OPEN_S

    def do_GET(self) -> None:  # noqa: N802 - its name in the standard library
        self.registry = self.server.registry
        if self.path.partition("?")[0].rstrip("/") == "/metrics":
            super().do_GET()
        else:
            self.send_error(404, "the metrics are at /metrics")
