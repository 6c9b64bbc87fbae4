"""Keeps secrets out of what is written for others to read.

What is secret is told by names and by forms: the value of a variable, option, header or query
parameter whose name says so, the login in a URL, and tokens that are known by their first letters.
The values found in the environment and in the command are then removed from every other text too: a
token in the environment also shows up in exceptions and logs. Names stay, so that a reader sees
that something was taken out.

It is a net, not a proof: a secret under an innocent name, or one that the job reads from a file,
passes unless its form gives it away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .events import Event, Finished, Notice
from .interfaces import Message, Step
from .payload import Payload
from .policy import ChannelKey

REDACTED = "<redacted>"

# Of a variable, option, header or parameter: its value is a secret wherever it stands.
_STRONG = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|PASSCODE|(?:^|[^A-Z])PASS$|^[A-Z]{0,8}PASS$|PWD$|(?:^|[^A-Z])PW$|WEBHOOK"
    r"|DSN$|CREDENTIAL|CREDS$|AUTH|COOKIE|SIGNATURE|(?:^|[^A-Z])SIG$|BEARER|PRIVATE|(?:^|[_-])PAT$",
    re.IGNORECASE,
)
# ReadCursor out of a name before that: what language models have in plenty and is no secret.
_INNOCENT = re.compile(
    r"TOKENI[SZ]\w*|TOKENS|(?:EOS|BOS|PAD|UNK|MASK|SEP|CLS|SPECIAL|PER|EACH|FIRST|LAST|NEXT|STOP"
    r"|IMAGE|NEW)[_-]?TOKEN|TOKEN[_-]?(?:IDS?|DROP\w*|LEN\w*|TYPE\w*|MIX\w*|SHIFT)(?![A-Z])"
    r"|(?<!API)(?<!API[_-])(?<!ACCESS[_-])KEYS|KEY[_-]?(?:VALUE|PADDING|DIM|SIZE|LEN|HEAD|FRAME"
    r"|POINT|WORD|BIAS|PROJ|BOARD|MAP|ERROR)\w*|MONKEY|ASKPASS|AUTHORS?(?!I)|^(?:OLD)?PWD$",
    re.IGNORECASE,
)
# Of a variable: what it holds may be one. It is not shown, and not looked for in other texts.
_WEAK = re.compile(r"(?<!C)URL|URI|DSN|ACCESS|SESSION|LICENSE|PASS", re.IGNORECASE)
_HARMLESS = frozenset({"XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS"})

_LONG_URL = re.compile(r"[a-z][a-z0-9+.-]*+://[^/\s]+/\S{8,}", re.IGNORECASE)
_LOGIN = re.compile(
    r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://([^/\s:@'\"]*:[^/\s@'\"]+|[^/\s:@'\"]+)@", re.IGNORECASE
)
_QUERY = re.compile(
    r"(?:[?&;]|%3F|%26)(?P<name>(?>(?:(?!%3D|%26)[\w.%-])+))"
    r"(?:=|%3D)((?:(?!%3F|%26)[^&;#\s'\"<>])+)",
    re.IGNORECASE,
)
_BIDIRECTIONAL = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # of Unicode
_URL = re.compile(r"(?:(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+:/|\burl:\s?)/[^\s'\"<>]*", re.IGNORECASE)
_URL_PART = re.compile(r"(?<=[/=:#])([\w~%+-]{16,})(?![\w.])")  # no name of a file
_RUN = re.compile(r"[A-Za-z0-9]{16,}")
_HEADER = re.compile(
    r"\b(?:(?:proxy-)?authorization|(?:set-)?cookie|(?:x-)?(?:api|auth)[\w-]{0,20}(?:key|token))"
    r"['\"]?\s*[:=]\s*['\"]?(?:(?:basic|bearer|token|digest)\s+)?([^\s'\",;]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\bbearer\s+([\w.~+/=-]{8,})", re.IGNORECASE)
# An option and its value, as a shell or a Python list has them.
_OPTION = re.compile(
    r"(?<![\w-])--?(?P<name>[A-Za-z][\w.-]*+)(?:=|\s+|['\"],\s*['\"])(?!-)([^\s'\"]+)"
)
_ASSIGNED = re.compile(
    r"(?<![\w.?&-])(?P<name>[A-Za-z_][\w.-]*+)=(\"[^\"]*\"|'[^']*'|[^\s,;&'\")\]}]+)"
)
_TOLD = re.compile(
    r"\b(?P<name>\w{0,40}(?:password|passwd|passphrase|secret|api[_-]?key|token|credential))"
    r"['\"]?\s*:\s*['\"]?([^\s'\",;}\]]{6,})",
    re.IGNORECASE,
)
_SHAPED = re.compile(
    r"\b(gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}"
    r"|(?<=hooks\.slack\.com/services/)\S+|(?<=/api/webhooks/)\S+|(?<=/webhook/)\S+"
    r"|(?<=/webhookb2/)\S+|(?<=/bot)\d{6,12}:[\w-]{20,})"
)
# One of these is in every text that one of the patterns above matches.
_SUSPECT = re.compile(
    r"[=?@]|%3D|:[\s'\"/\w]|['\"]:|-|bearer|(?:gh[pousr]|pat|hf)_|xox|AKIA|eyJ|hooks", re.IGNORECASE
)
_WORD = re.compile(r"[+~]{0,2}(?:--?)?(?P<name>[A-Za-z_][\w./-]*+)=(?P<value>.+)", re.DOTALL)
_HEADER_WORD = re.compile(r"(?P<name>[A-Za-z][\w-]*+):\s*(?P<value>.+)", re.DOTALL)
_SCRIPT = re.compile(r"-[a-z]*c")  # what follows is a text: `sh -c`, `bash -lc`, `python -c`
_NUMBER = re.compile(r"[\d.eE+-]{1,11}")
# `--text-key caption` is not of a door: not looked for elsewhere.
_COLUMN = re.compile(r"(?<!api)(?<!api[_-])(?<!access[_-])key", re.IGNORECASE)
_PLAIN = re.compile(r"[a-z_./ -]{1,19}")
_SHORTEST = 6  # a shorter value would be found everywhere by chance
_REMEMBERED = 4096  # texts whose clean form is kept: a status says the same every second


def is_secret(name: str) -> bool:
    """Whether the name of a variable or option says that its value is a secret."""
    return name not in _HARMLESS and _STRONG.search(_INNOCENT.sub("", name)) is not None


def channel_variables(notify: Mapping[str, Mapping[str, ChannelKey]]) -> frozenset[str]:
    """Return the variables that a policy's `notify` names: `url_env`, `secret_env` and such."""
    return frozenset(
        str(variable)
        for keys in notify.values()
        for key, variable in keys.items()
        if key.endswith("_env") and variable
    )


def spreadsheet_cell(name: str) -> str:
    """Return a name that the job chose as a cell that no spreadsheet takes for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


class Redactor:
    """Removes secrets and remembers which names it emptied.

    Args:
        environ, argv: of the job; the secrets in them are removed from every text.
        also: variables that are secret whatever they are called.

    Attributes:
        names: of the variables and options whose values were replaced, in order of appearance.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        argv: Sequence[str] = (),
        also: Collection[str] = (),
    ) -> None:
        self.names: list[str] = []
        self._also = frozenset(also)
        self._values: frozenset[str] = frozenset()
        self._known: re.Pattern[str] | None = None
        self._clean: dict[str, str] = {}
        self.environment(environ or {})
        self.command(argv)
        self.names.clear()

    def fresh(self) -> Redactor:
        """Return one that knows the same secrets, and has emptied nothing yet."""
        redactor = Redactor(also=self._also)
        redactor._learn(self._values)
        return redactor

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return `variables` sorted by name, with secret values replaced."""
        for name, value in variables.items():
            if name in self._also:
                self._learn((value, *value.split()))
            elif is_secret(name) or (_is_weak(name) and _LONG_URL.fullmatch(value)):
                self._learn((value,))
            self._learn(_scan(value)[1])
        return {name: self._variable(name, variables[name]) for name in sorted(variables)}

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line with the values of secret options, headers and variables replaced.

        `--token X`, `--token=X`, `-H 'Authorization: X'`, `WANDB_API_KEY=X`, `logger.api_key=X`,
        and what stands in a text: logins and query parameters of URLs, the words of `sh -c`.
        """
        parted = list(_parts(words))
        for word, name, secret in parted:
            self._learn(_worth(name, secret) if name else _scan(word)[1])
        clean = []
        for word, name, _ in parted:
            self._note(name)
            clean.append(word + REDACTED if name else self.text(word))
        return clean

    def text(self, text: str) -> str:
        """Return `text` without secrets, known or by their looks, and without what reorders it."""
        clean = self._clean.get(text)
        if clean is None:
            clean = text if self._known is None else self._known.sub(REDACTED, text)
            clean = self._clipped(clean) if clean.endswith("…") else clean
            clean = _BIDIRECTIONAL.sub("", _scan(clean)[0])
            if len(self._clean) >= _REMEMBERED:
                self._clean.clear()
            if len(text) <= _REMEMBERED:
                self._clean[text] = clean
        return clean

    def tree(self, value: Any) -> Any:
        """Return a JSON-like value with every text in it cleaned, keys of mappings too."""
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, (int, float)):
            return value
        if isinstance(value, Mapping):
            return {self.tree(key): self.tree(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(item) for item in value]
        return value

    def event(self, event: Event) -> Event:
        """Return an event with what the job, or an exception, said in it cleaned."""
        if isinstance(event, Notice):
            return replace(
                event, message=self.text(event.message), data=Payload(self.tree(event.data))
            )
        if isinstance(event, Finished):
            error = None if event.error is None else self.text(event.error)
            return replace(event, error=error, result=Payload(self.tree(event.result)))
        return event

    def message(self, message: Message) -> Message:
        """Return what people are told, cleaned."""
        return replace(
            message,
            title=self.text(message.title),
            news=self.text(message.news),
            verdict=self.text(message.verdict),
            why=self.text(message.why),
            next=message.next.mapped(lambda s: Step(self.text(s.text), self.text(s.command))),
            job=self.text(message.job),
            facts=tuple((self.text(name), self.text(value)) for name, value in message.facts),
            card=tuple((name, self.text(value)) for name, value in message.card),
        )

    def _variable(self, name: str, value: str) -> str:
        if value and (name in self._also or is_secret(name) or _is_weak(name)):
            self._note(name)
            return REDACTED
        clean = self.text(value)
        if clean != value:
            self._note(name)
        return clean

    def _note(self, name: str) -> None:
        if name and name not in self.names:
            self.names.append(name)

    def _learn(self, values: Iterable[str]) -> None:
        new = {v for v in values if len(v) >= _SHORTEST and not _NUMBER.fullmatch(v)}
        new -= {REDACTED}
        if not new <= self._values:
            self._values |= new
            longest = sorted(self._values, key=lambda value: (-len(value), value))
            self._known = re.compile("|".join(map(re.escape, longest)))
            self._clean.clear()

    def _clipped(self, text: str) -> str:
        """Remove the beginning of a secret whose rest was cut off."""
        body = text.rstrip("…")
        for value in self._values:
            for size in range(min(len(value) - 1, len(body)), _SHORTEST - 1, -1):
                if body.endswith(value[:size]):
                    return f"{body[:-size]}{REDACTED}…"
        return text


def _is_weak(name: str) -> bool:
    return name not in _HARMLESS and _WEAK.search(_INNOCENT.sub("", name)) is not None


def _worth(name: str, value: str) -> tuple[str, ...]:
    """Return what of a secret value is to be looked for elsewhere."""
    if not is_secret(_COLUMN.sub("", name)) and _PLAIN.fullmatch(value):
        return ()
    scheme, _, credential = value.partition(" ")  # Authorization: Bearer X
    has_scheme = scheme.lower() in ("bearer", "basic", "token", "digest")
    return (value, credential) if has_scheme else (value,)


def _parts(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (what stays of a word, name of its secret, secret); no name: nothing is taken out."""
    pending, previous_word = "", ""
    for word in words:
        match = _WORD.fullmatch(word) or _HEADER_WORD.fullmatch(word)
        script = _SCRIPT.fullmatch(previous_word) is not None
        if pending and not word.startswith("-"):
            yield "", pending, word
        elif match and not script and is_secret(match["name"]):
            yield word[: match.start("value")], match["name"], match["value"]
        else:
            yield word, "", ""
        bare = word.startswith("-") and "=" not in word and is_secret(word)
        pending, previous_word = word.lstrip("-") if bare else "", word


def _scan(text: str) -> tuple[str, list[str]]:
    """Return `text` without what looks like a secret, and what that was."""
    secrets: list[str] = []
    if not _SUSPECT.search(text):
        return text, secrets

    def take(match: re.Match[str]) -> str:
        """Replace the last group; where there is one called `name`, only if that says so."""
        name = match.groupdict().get("name")
        if name is not None and not is_secret(name):
            return match[0]
        group = match.re.groups
        secret, offset = match[group].strip("'\""), match.start(group) - match.start()
        _, colon, password = secret.partition(":")
        is_login = match.re is _LOGIN
        if not is_login or colon or not _PLAIN.fullmatch(secret):  # `git@` is nobody's secret
            secrets.extend([secret, password] if is_login and colon else [secret])
        return match[0][:offset] + REDACTED + match[0][offset + len(match[group]) :]

    def take_token(match: re.Match[str]) -> str:
        if not any(map(_is_mixed, _RUN.findall(match[1]))):
            return match[0]
        secrets.append(match[1])
        return REDACTED

    for pattern in (_LOGIN, _SHAPED, _HEADER, _BEARER, _QUERY, _OPTION, _ASSIGNED, _TOLD):
        text = pattern.sub(take, text)
    return _URL.sub(lambda url: _URL_PART.sub(take_token, url[0]), text), secrets


def _is_mixed(run: str) -> bool:
    """Whether letters and digits are mixed as in a token, and in no word or hexadecimal number."""
    digits = sum(map(str.isdecimal, run))
    return digits > 1 and run != run.lower() and run != run.upper()
