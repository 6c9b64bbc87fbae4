"""A mail server on the loopback that answers as a test tells it to (RFC 5321, without TLS)."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage


class MailServer(socketserver.ThreadingTCPServer):
    """Attributes: `answers` are codes behind DATA in turn, 0: none, -1: a reset; then 250."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.answers: list[int] = []
        self.refused: set[str] = set()  # addresses
        self.taken: list[EmailMessage] = []
        self.hang = threading.Event()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Session(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self._say(220)
        while line := self.rfile.readline().decode().strip():
            word = line.upper()
            if word == "DATA":
                self._say(354)
                if not self._take():
                    return
            elif word.startswith("RCPT"):
                self._say(550 if line[9:-1] in self.server.refused else 250)
            else:
                self._say(221 if word == "QUIT" else 250)

    def _take(self) -> bool:
        """Take a message; return whether the session goes on."""
        content = b""
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            content += line[1:] if line.startswith(b"..") else line
        code = self.server.answers.pop(0) if self.server.answers else 250
        if code in (0, -1):
            self.server.hang.wait(30 if code == 0 else 0)
            return False
        if code < 300:
            self.server.taken.append(message_from_bytes(content, policy=policy.default))  # type: ignore[arg-type]
        self._say(code)
        return True

    def _say(self, code: int) -> None:
        self.wfile.write(f"{code} so\r\n".encode())


@contextmanager
def mail_server() -> Iterator[MailServer]:
    """Yield a server that runs."""
    with MailServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.hang.set()
        server.shutdown()
        thread.join()
