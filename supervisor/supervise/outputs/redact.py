"""Keeps secrets out of what is written for others to read.

A value is secret when the name of its variable or option says so, or when it is a URL that carries
a password. Names are kept and listed, so that a reader sees what was taken out. Secrets that were
found once are then removed from every other text too: a token in the environment also shows up in
command lines and logs. It is a net, not a proof: a secret under an innocent name passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

REDACTED = "<redacted>"

_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD$|WEBHOOK|URL|URI|DSN|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE"
    r"|SIGNATURE|ACCESS|BEARER|LICENSE",
    re.IGNORECASE,
)
_HARMLESS = frozenset({"PWD", "OLDPWD", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS"})
_LOGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<login>[^/\s:@]*:[^/\s@]+)@", re.IGNORECASE
)
_OPTION = re.compile(r"--?(?P<name>[A-Za-z0-9_.-]+)=(?P<value>.+)", re.DOTALL)
_SHORTEST = 8  # a shorter value would be found everywhere by chance


class Redactor:
    """Removes secrets and remembers which names it emptied.

    Attributes:
        names: of the variables and options whose values were replaced, in order of appearance.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._values: set[str] = set()

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return `variables` sorted by name, with secret values replaced."""
        return {name: self._variable(name, variables[name]) for name in sorted(variables)}

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line with the values of secret options replaced."""
        clean: list[str] = []
        secret_next: str | None = None
        for word in words:
            option = _OPTION.fullmatch(word)
            if secret_next is not None and not word.startswith("-"):
                clean.append(self._taken(secret_next, word))
            elif option and self._is_secret(option["name"]):
                value = self._taken(option["name"], option["value"])
                clean.append(word[: option.start("value")] + value)
            else:
                clean.append(self.text(word))
            bare = word.startswith("-") and not option and self._is_secret(word)
            secret_next = word.lstrip("-") if bare else None
        return clean

    def text(self, text: str) -> str:
        """Return `text` without logins in URLs and without any secret seen so far."""
        text = _LOGIN.sub(lambda match: f"{match['scheme']}{REDACTED}@", text)
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return text

    def _variable(self, name: str, value: str) -> str:
        if value and self._is_secret(name):
            return self._taken(name, value)
        login = _LOGIN.search(value)
        if login:
            self._taken(name, login["login"])
        return self.text(value)

    def _taken(self, name: str, value: str) -> str:
        if name not in self.names:
            self.names.append(name)
        if len(value) >= _SHORTEST:
            self._values.add(value)
        return REDACTED

    @staticmethod
    def _is_secret(name: str) -> bool:
        return name not in _HARMLESS and _NAME.search(name) is not None
