"""A mail server on this machine that takes every mail: as much of SMTP (RFC 5321) as a client without TLS needs."""

from __future__ import annotations

import email
import email.policy
import socketserver
import threading
from email.message import EmailMessage


class MailServer:
    """``received``: the mails."""

    def __init__(self) -> None:
        self.received: list[EmailMessage] = []
        received = self.received

        class Handler(socketserver.StreamRequestHandler):
            timeout = 30.0

            def handle(self) -> None:
                self.say("220 here")
                while line := self.rfile.readline():
                    verb = line[:4].upper().strip()
                    if verb == b"DATA":
                        self.say("354 go on")
                        self.take()
                    self.say({b"QUIT": "221 bye", b"EHLO": "250 here"}.get(verb, "250 taken"))
                    if verb == b"QUIT":
                        return

            def take(self) -> None:
                lines = []
                while (line := self.rfile.readline()) not in (b".\r\n", b""):
                    lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
                mail = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
                assert isinstance(mail, EmailMessage)
                received.append(mail)

            def say(self, line: str) -> None:
                self.wfile.write(f"{line}\r\n".encode())

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=lambda: self.server.serve_forever(0.01), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
