"""The address of the page, for links in messages: `supervise web` behind a name that readers reach.

A link never carries a token: who follows it has one, or is asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from ._channel_settings import Settings

_URL = re.compile(r"https?://[!-~]+")


@dataclass(frozen=True, kw_only=True)
class Page(Settings):
    """No channel: messages link to the page of `supervise web` at this address.

    Attributes:
        url: where the list of runs is, such as `https://gpu-07.example/runs/`; without a token.
    """

    url: str

    def open(self, env: Mapping[str, str]) -> str:
        """Return the address, with a slash at its end."""
        return self.url if self.url.endswith("/") else f"{self.url}/"

    def find_errors(self) -> list[tuple[str, str]]:
        """Return what is wrong with the keys."""
        parts = urlsplit(self.url) if _URL.fullmatch(self.url) else None
        if parts is None or not parts.hostname:
            return [("url", "must be an address such as https://gpu-07.example/runs/")]
        if parts.query or parts.fragment or parts.username or parts.password:
            return [("url", "holds more than an address; a link must not carry a token")]
        return []


def page_link(keys: Mapping[str, object], run: str, incident: str | None) -> str:
    """Return the address of a run, or of its incident, on the page; `keys`: of `notify.page`."""
    home = Page(url=str(keys.get("url", ""))).open({})
    link = f"{home}run/{quote(run)}/"
    return f"{link}incident/{quote(incident)}/" if incident else link
