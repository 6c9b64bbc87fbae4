"""E-mail, by SMTP (RFC 5321). All messages on one incident are one thread.

The Message-ID is the same for each try, so that a receiver that keeps one copy of each does so. The
first message on an incident is what the later ones refer to, and gives them their subject.

Source: RFC 5322, 3.6.4 (Message-ID, References), RFC 3207 (STARTTLS).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from typing import TYPE_CHECKING, Literal

from ..core.model.formats import printable
from ..core.model.interfaces import OPENED, Message, NotifyError, Severity
from ._channel_settings import (
    TIMEOUT_S,
    ChannelSettings,
    Sender,
    clip_text,
    message_footer,
    message_sentences,
    required_variable,
)

if TYPE_CHECKING:
    import smtplib

MAX_SUBJECT = 200
KEPT = 256  # subjects of incidents
Tls = Literal["starttls", "tls", "none"]


@dataclass(frozen=True, kw_only=True)
class Email(ChannelSettings):
    """E-mail, one thread per incident.

    Attributes:
        host, port: of the mail server.
        sender: the address that messages come from. to: addresses that they go to.
        tls: `starttls` upgrades the connection, `tls` begins with it (port 465), `none` is for a
            server that needs none, and takes no password.
        user: to log in with; None: no login.
        password_env: the environment variable that holds the password.
    """

    host: str
    sender: str
    to: tuple[str, ...]
    port: int = 587
    tls: Tls = "starttls"
    user: str | None = None
    password_env: str | None = None

    def open(self, env: Mapping[str, str]) -> Sender:
        """Return the sender. Raises UnsetError."""
        password = "" if self.password_env is None else required_variable(env, self.password_env)
        return EmailSender(self, password)

    def find_errors(self) -> list[tuple[str, str]]:
        problems = super().find_errors()
        for key, addresses in (("sender", (self.sender,)), ("to", tuple(self.to))):
            wrong = [
                address
                for address in addresses
                if "@" not in address or printable(address) != address or " " in address
            ]
            if wrong or not addresses:
                problems.append((key, f"must be an e-mail address, not {(wrong or [''])[0]!r}"))
        if not 0 < self.port < 65536:
            problems.append(("port", f"must be between 1 and 65535, not {self.port}"))
        if (self.user is None) != (self.password_env is None):
            problems.append(("user", "belongs together with password_env"))
        elif self.user is not None and self.tls == "none":
            problems.append(("tls", "must not be none where a password is sent"))
        return problems


class EmailSender:
    """Sends by one server, with a connection of its own for each message."""

    name = "email"
    group_s = 10.0
    gap_s = 0.0
    per_hour: int | None = 20

    def __init__(self, settings: Email, password: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.min_sev: Severity = settings.min_sev
        self._settings = settings
        self._password = password
        self._timeout_s = timeout_s
        self._subjects: dict[str, str] = {}  # incident -> subject of its thread

    def send(self, message: Message, *, key: str) -> str:
        """Deliver. Raises NotifyError."""
        subject = title = clip_text(printable(f"[{message.severity}] {message.title}"), MAX_SUBJECT)
        if message.incident is not None:
            first_subject = self._subjects.setdefault(message.incident, title)
            subject = title if first_subject == title else f"Re: {first_subject}"
            while len(self._subjects) > KEPT:
                del self._subjects[next(iter(self._subjects))]
        letter = build_email(message, key, subject)
        letter["From"], letter["To"] = self._settings.sender, ", ".join(self._settings.to)
        outcome = self._deliver(letter)
        if isinstance(
            outcome, NotifyError
        ):  # outside of the `except`: an error may hold an address
            raise outcome
        refused = f", {outcome} refused" if outcome else ""
        return f"delivered to {len(self._settings.to) - outcome} of its addresses{refused}"

    def _deliver(self, letter: EmailMessage) -> NotifyError | int:
        """Return how many of several addresses were refused: the others have the message."""
        import smtplib  # as late as httpx: most runs send nothing
        import ssl

        try:
            with self._connected() as server:
                return len(server.send_message(letter))
        except smtplib.SMTPRecipientsRefused as error:
            return _refusal(error.recipients.values())
        except smtplib.SMTPResponseException as error:
            return _refusal([(error.smtp_code, b"")])
        except TimeoutError:
            return NotifyError(f"no answer within {self._timeout_s:g} s", retry_after_s=0.0)
        except ssl.SSLCertVerificationError:
            return NotifyError("the certificate of the mail server is not valid", retry_after_s=0.0)
        except smtplib.SMTPNotSupportedError:
            return NotifyError("the mail server offers no STARTTLS or login", retry_after_s=None)
        except (smtplib.SMTPException, OSError) as error:
            return NotifyError(f"no connection ({type(error).__name__})", retry_after_s=0.0)

    def _connected(self) -> smtplib.SMTP:
        import smtplib
        import ssl

        settings, timeout = self._settings, self._timeout_s
        secure = ssl.create_default_context()
        if settings.tls == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                settings.host, settings.port, timeout=timeout, context=secure
            )
        else:
            server = smtplib.SMTP(settings.host, settings.port, timeout=timeout)
        try:
            if settings.tls == "starttls":
                server.starttls(context=secure)
            if settings.user is not None:
                server.login(settings.user, self._password)
        except BaseException:
            server.close()
            raise
        return server


def build_email(message: Message, key: str, subject: str) -> EmailMessage:
    """Return the e-mail without its addresses. `key`: of the message."""
    letter = EmailMessage()
    letter["Subject"] = subject
    letter["Date"] = formatdate()
    thread = _id(f"{message.run}|{message.incident}")
    letter["Message-ID"] = thread if message.kind == OPENED else _id(f"{message.run}|{key}")
    if message.incident is not None and message.kind != OPENED:
        letter["References"] = letter["In-Reply-To"] = thread
    letter["Auto-Submitted"] = "auto-generated"  # RFC 3834: no out-of-office answers
    lines = [printable(message.title), ""]
    lines += [f"{head:7}{printable(text)}" for head, text in message_sentences(message)]
    lines += [f"{printable(name)}: {printable(text)}" for name, text in message.facts]
    text = "\n".join([*lines, "", " · ".join(map(printable, message_footer(message))), ""])
    letter.set_content(text.encode("utf-8", "backslashreplace").decode())
    return letter


def _id(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
    return f"<{digest}@supervise.invalid>"


def _refusal(answers: object) -> NotifyError:
    """Return the failure for the answers of a server; RFC 5321, 4.2.1: 4yz may be tried again."""
    codes = sorted({int(code) for code, _ in answers})  # type: ignore[attr-defined]
    passing = all(400 <= code < 500 for code in codes)
    text = f"{', '.join(map(str, codes))} from the mail server"
    return NotifyError(text, retry_after_s=0.0 if passing else None)
