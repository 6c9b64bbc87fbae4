"""Documents of several parts: the one-file export of a run, a comparison, and files of evidence.

The export is the page itself, its styles and scripts in the file and named by their hashes, with
the answers of the server as of now. It has no token, no environment, and needs no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import yaml
from markupsafe import Markup
from msgspec import Struct

from .. import system
from ..core.model.decisions import json_document, plain_json
from ..errors import MISSHAPEN, StoreError
from ..report.incident_report import IncidentReport
from ..report.pages import TEMPLATES, render_template
from ..report.stability_record import record_leaves, text_of
from ..store import files
from ..store.run_records import MANIFEST
from .curves import MAX_METRICS, Query, RunCurves
from .run_view import RunView, describe_metrics, metrics_by_board

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
STATIC = Path(__file__).with_name("static")
EXPORT_PIXELS, BUILD_S = 1500, 600
BLOCK = 1 << 18  # bytes of a file of evidence in memory at once; it may have gigabytes
PRIVATE = frozenset({"environment.json"})  # never leaves the run directory by the page
GROUPS = {
    **dict.fromkeys(("code", "supervise"), "code"),
    **dict.fromkeys(("files", "inputs"), "data"),
    **dict.fromkeys(("hardware", "system"), "machine"),
    "packages": "packages",
}
STYLES = ("uplot.css", "style.css", "page.css")
SCRIPTS = ("uplot.js", "dom.js", "data.js", "charts.js", "incident.js", "run.js", "lists.js")
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


def page_source(page: str, up: str) -> str:
    """Return the shell of a page, whose links are relative: any prefix will do."""
    return render_template("page", page=page, up=up, styles=STYLES, scripts=SCRIPTS, frozen="")


def run_document(view: RunView, curves: RunCurves) -> dict[str, Any]:
    """Return all of the page of a run but its curves, as the browser gets it."""
    return {**view.document(), **curves.facts(), **_about_metrics(curves.metrics())}


@lru_cache(maxsize=8)  # those of a run, which change at a relaunch at most
def _about_metrics(metrics: tuple[str, ...]) -> dict[str, Any]:
    present, missing = metrics_by_board(metrics)
    return {"metrics": describe_metrics(metrics), "boards": present, "missing": missing}


def export_page(view: RunView, curves: RunCurves) -> str:
    """Return the page of a run in one file, when its curves are built. Raises StoreError."""
    until_s = time.monotonic() + BUILD_S
    while curves.progress() < 1.0:
        if time.monotonic() > until_s:
            raise StoreError(f"the curves are not built within {BUILD_S} s: a disk may be slow")
        time.sleep(0.1)
    document = run_document(view, curves)
    names = dict.fromkeys(name for board in document["boards"].values() for name in board)
    chosen = [*names][:MAX_METRICS]
    series = curves.series(Query(chosen, pixels=EXPORT_PIXELS)) if chosen else b""
    content = {
        "run": {**document, "needs": [], "metrics": describe_metrics(chosen)},
        "series": base64.b64encode(series).decode(),
        "left_out": [name for name in document["metrics"] if name not in chosen],
        "incidents": {name: json.loads(r.encode()) for name, r in view.reports().items()},
        "made": system.wall_time(),
    }
    styles = [_static_text(name) for name in STYLES]
    scripts = [_static_text(name).replace("</script", "<\\/script") for name in SCRIPTS]
    policy = (
        f"default-src 'none'; img-src data:; script-src {_hashes(scripts)}; "
        f"style-src {_hashes(styles)}; base-uri 'none'; form-action 'none'"
    )
    return render_template(
        "page",
        page="run",
        title=view.name,
        policy=policy,
        styles=[Markup(text) for text in styles],  # noqa: S704
        scripts=[Markup(text) for text in scripts],  # noqa: S704
        # As JSON in a script element: no text in it can end the element.
        frozen=Markup(json_document(content).replace("<", "\\u003c")),  # noqa: S704
    )


def _static_text(name: str) -> str:
    return files.read_file(
        (TEMPLATES if name == "style.css" else STATIC) / name, foreign=True
    ).decode()


def report_policy(text: str) -> str:
    """Return the content security policy of a page of another part of supervise."""
    styles = _hashes(_STYLE.findall(text))
    policy = f"default-src 'none'; style-src {styles}; img-src data:; base-uri 'none'"
    return f"{policy}; form-action 'none'; frame-ancestors 'self'"


def _hashes(texts: Sequence[str]) -> str:
    """Return the sources of a content security policy that allow these texts."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


# ── evidence ──


class EvidenceFile(Struct, frozen=True):
    """A file that a manifest lists."""

    name: str
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True):
    """The manifest of a bundle, as far as the page shows it."""

    files: Sequence[EvidenceFile]


def list_evidence(view: RunView, report: IncidentReport) -> list[dict[str, Any]]:
    """Return the bundles of an incident with the files of their manifests."""
    bundles = []
    for bundle in report.evidence.bundles:
        name = Path(bundle.path).name
        digest, listed = _manifest(view, report.id, name)
        state = "good" if digest == bundle.sha256 else "changed"
        bundles.append(
            {
                "name": name,
                "sha256": bundle.sha256,
                "state": state if listed else "missing",
                "files": [f for f in listed if f["name"] not in PRIVATE],
                "withheld": [f["name"] for f in listed if f["name"] in PRIVATE],
            }
        )
    return bundles


def open_evidence(view: RunView, incident: str, bundle: str, name: str) -> BinaryIO:
    """Return a file of a bundle. Raises KeyError: no manifest has it; OSError."""
    if not re.fullmatch(r"snapshot-\d+", bundle) or name in PRIVATE:
        raise KeyError(name)
    listed = {file["name"] for file in _manifest(view, incident, bundle)[1]}
    if name not in listed or Path(name).name != name:
        raise KeyError(name)
    return os.fdopen(files.open_file(view.run.incidents_path / incident / bundle / name), "rb")


def read_blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file in blocks, and close it."""
    with file:
        while size > 0 and (block := file.read(min(size, BLOCK))):
            size -= len(block)
            yield block


def _manifest(view: RunView, incident: str, bundle: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the digest of a manifest, and the files that it lists."""
    with suppress(OSError, *MISSHAPEN):
        path = view.run.incidents_path / incident / bundle / MANIFEST
        raw = files.read_file(path, limit=files.MAX_JSON)
        listed = msgspec.json.decode(raw, type=Manifest).files
        return hashlib.sha256(raw).hexdigest(), msgspec.to_builtins(listed)
    return "", []


# ── comparison ──


def compare_runs(views: Mapping[str, RunView]) -> dict[str, Any]:
    """Return what differs between the settings of runs, and how many are the same."""
    columns = {key: dict(_facts(view)) for key, view in views.items()}
    if len({view.described.policy_digest for view in views.values()}) > 1:
        for key, view in views.items():
            columns[key] |= dict(_policy_facts(view))
    names = dict.fromkeys(name for facts in columns.values() for name in facts)
    rows = []
    for group, name in names:
        values = {key: facts.get((group, name), "–") for key, facts in columns.items()}
        if len(set(values.values())) > 1:
            rows.append({"group": group, "name": name, "values": values})
    return {"differs": rows, "same": len(names) - len(rows)}


def _facts(view: RunView) -> Iterator[tuple[tuple[str, str], str]]:
    described = view.described
    yield ("command", "command"), shlex.join(described.argv)
    for name, value in _options(described.argv).items():
        yield ("command", name), value
    yield ("policy", "policy"), f"{described.policy} ({described.mode})"
    yield ("policy", "digest"), described.policy_digest
    launches = (r.data.get("identity") for r in reversed(view.records) if r.kind == "identity")
    identity = plain_json(next(launches, None) or {})
    with suppress(StoreError):
        identity = identity or view.run.read_json("identity.json").get("identity", {})
    for section, content in identity.items() if isinstance(identity, dict) else ():
        group = GROUPS.get(section)
        if group is not None:
            for path, value in record_leaves(content, "" if group == "packages" else section):
                yield (group, path.removeprefix("versions.")), text_of(value)


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Return the options of a command by name, `--name value` and `--name=value`."""
    options: dict[str, str] = {}
    for this, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = this.partition("=")
        if name.startswith("--"):
            options[name] = value if equals else "" if following.startswith("-") else following
    return options


def _policy_facts(view: RunView) -> Iterator[tuple[tuple[str, str], str]]:
    with suppress(OSError, yaml.YAMLError, *MISSHAPEN):
        text = files.read_file(view.run.policy_path, limit=files.MAX_JSON)
        for path, value in record_leaves(yaml.load(text, SafeLoader)):  # noqa: S506
            yield ("rules", path), text_of(value)
