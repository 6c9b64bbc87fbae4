"""Documents of several parts: the one-file export of a run, a comparison, and files of evidence.

The export is the page itself, its styles and scripts in the file and named by their hashes, with
the answers of the server as of now. It has no token, no environment, and needs no network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from .. import system
from ..core.model.decisions import json_document, plain_json
from ..errors import MISSHAPEN, StoreError
from ..report.pages import TEMPLATES
from ..report.stability_record import record_leaves, text_of
from ..store import files
from ..store.run_records import MANIFEST
from .curves import MAX_METRICS, BuildingError, Query, RunCurves
from .run_view import BOARDS, RunView, boards_of, describe_metrics

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
STATIC = Path(__file__).with_name("static")
EXPORT_PIXELS = 1500
PRIVATE = frozenset({"environment.json"})  # never leaves the run directory by the page
WITHHELD = "it may hold secrets: read it in the run directory"
GROUPS = {
    **dict.fromkeys(("code", "supervise"), "code"),
    **dict.fromkeys(("files", "inputs"), "data"),
    **dict.fromkeys(("hardware", "system"), "machine"),
    "packages": "packages",
}
_PART = re.compile(r'<(link|script)\b[^>]*?(?:href|src)="[^"]*static/([\w.-]+)"[^>]*>(</script>)?')


def static_files() -> dict[str, Path]:
    """Return the files of the page by name; its sheet is that of the reports."""
    return {path.name: path for path in (*STATIC.iterdir(), TEMPLATES / "style.css")}


def page_source(page: str, up: str) -> bytes:
    """Return the shell of a page, whose links are relative: any prefix will do."""
    text = files.read_file(STATIC / "page.html").decode()
    return text.replace("{{up}}", up).replace("{{page}}", page).encode()


def run_document(view: RunView, curves: RunCurves) -> dict[str, Any]:
    """Return all of the page of a run but its curves, as the browser gets it."""
    document = view.document()
    present, missing = boards_of(curves.metrics())
    return {
        **document,
        "undone": [*document["undone"], *plain_json(curves.repeated())],
        "attempts": curves.attempts(),
        "building": curves.progress(),
        "cache": curves.cache_note(),
        "lead": curves.lead(),
        "frames": curves.head()["frames"],
        "boards": present,
        "missing": missing,
    }


def export_page(view: RunView, curves: RunCurves) -> bytes:
    """Return the page of a run in one file. Raises BuildingError, StoreError."""
    if (progress := curves.progress()) < 1.0:
        raise BuildingError(progress)
    document = run_document(view, curves)
    names = dict.fromkeys(name for board in document["boards"].values() for name in board)
    metrics = [*names][:MAX_METRICS]
    series = curves.series(Query(metrics, pixels=EXPORT_PIXELS)) if metrics else b""
    content = {
        "run": {**document, "needs": [], "writable": False},
        "metrics": describe_metrics(metrics),
        "series": base64.b64encode(series).decode(),
        "incidents": {
            mark["id"]: json.loads(view.report(mark["id"]).encode())
            for mark in document["incidents"]
        },
        "made": system.wall_time(),
    }
    # As JSON in a script element: no text in it can end the element.
    frozen = json_document(content).replace("<", "\\u003c")
    styles: list[str] = []
    scripts: list[str] = []
    source = page_source("run", "").decode()
    sources = static_files()
    for kind, name, _ in _PART.findall(source):
        text = files.read_file(sources[name]).decode().replace("</script", "<\\/script")
        (styles if kind == "link" else scripts).append(text)
    policy = (
        f"default-src 'none'; img-src data:; script-src {style_hashes(scripts)}; "
        f"style-src {style_hashes(styles)}; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += "".join(f"<style>{text}</style>" for text in styles)
    body = f'<script type="application/json" id="frozen">{frozen}</script>'
    body += "".join(f"<script>{text}</script>" for text in scripts)
    source = _PART.sub("", source)
    source = re.sub(r"<title>.*?</title>", f"<title>{html.escape(view.name)}</title>", source)
    # Not `re.sub`: it would read escapes in what is put in.
    before, charset, after = source.partition('<meta charset="utf-8">')
    inner, end, tail = after.rpartition("</body>")
    return f"{before}{charset}{head}{inner}{body}{end}{tail}".encode()


def style_hashes(texts: Sequence[str]) -> str:
    """Return the sources of a content security policy that allow these texts."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def export_run(view: RunView, curves: RunCurves) -> bytes:
    """Return the page of a run in one file, when its curves are built."""
    while curves.progress() < 1.0:
        time.sleep(0.1)
    return export_page(view, curves)


# ── evidence ──


def list_evidence(view: RunView, incident: str) -> list[dict[str, Any]]:
    """Return the bundles of an incident with the files of their manifests."""
    bundles = []
    for bundle in view.report(incident).evidence.bundles:
        name = Path(bundle.path).name
        listed = _manifest(view, incident, name)
        state = "good" if _digest(view, incident, name) == bundle.sha256 else "changed"
        bundles.append(
            {
                "name": name,
                "sha256": bundle.sha256,
                "state": state if listed else "missing",
                "files": [f for f in listed if f["name"] not in PRIVATE],
                "withheld": [
                    {"name": f["name"], "text": WITHHELD} for f in listed if f["name"] in PRIVATE
                ],
            }
        )
    return bundles


def evidence_file(view: RunView, incident: str, bundle: str, name: str) -> bytes:
    """Return a file of a bundle. Raises KeyError: no manifest has it; OSError."""
    if not re.fullmatch(r"snapshot-\d+", bundle) or name in PRIVATE:
        raise KeyError(name)
    if name not in {file["name"] for file in _manifest(view, incident, bundle)}:
        raise KeyError(name)
    if Path(name).name != name:
        raise KeyError(name)
    return files.read_file(view.run.incidents_path / incident / bundle / name)


def _manifest(view: RunView, incident: str, bundle: str) -> list[dict[str, Any]]:
    with suppress(OSError, *MISSHAPEN):
        content = files.read_json(view.run.incidents_path / incident / bundle / MANIFEST)
        return [{key: f[key] for key in ("name", "bytes", "sha256")} for f in content["files"]]
    return []


def _digest(view: RunView, incident: str, bundle: str) -> str:
    with suppress(OSError):
        raw = files.read_file(view.run.incidents_path / incident / bundle / MANIFEST)
        return hashlib.sha256(raw).hexdigest()
    return ""


# ── comparison ──


def compare_runs(chosen: Sequence[tuple[str, RunView, RunCurves, int | None]]) -> dict[str, Any]:
    """Return what differs between runs, or attempts: `(key, run, its curves, attempt)` each."""
    columns = {key: dict(_facts(view)) for key, view, _, _ in chosen}
    policies = {view.described.policy_digest for _, view, _, _ in chosen}
    if len(policies) > 1:
        for key, view, _, _ in chosen:
            columns[key] |= dict(_policy_facts(view))
    names = dict.fromkeys(name for facts in columns.values() for name in facts)
    rows = []
    for group, name in names:
        values = {key: facts.get((group, name), "–") for key, facts in columns.items()}
        if len(set(values.values())) > 1:
            rows.append({"group": group, "name": name, "values": values})
    # A run without a journal has none, and hides no curve of the others.
    metrics = [own for _, _, curves, _ in chosen if (own := set(curves.metrics()))]
    common = set.intersection(*metrics) if metrics else set()
    boards = dict.fromkeys(name for board in BOARDS.values() for name in board if name in common)
    runs = [{"key": key, "attempt": attempt, **_result(view)} for key, view, _, attempt in chosen]
    return {
        "runs": runs,
        "x": "tokens" if _differ_in_tokens(rows) and "tokens_seen" in common else "step",
        "differs": rows,
        "same": len(names) - len(rows),
        "metrics": [*boards, *sorted(common - boards.keys())],
    }


def _result(view: RunView) -> dict[str, Any]:
    """Return how a run went and ended."""
    row = plain_json(view.summary())
    marks = {mark["id"]: mark for mark in view.marks()["incidents"]}
    worst = marks.get(row["gravest"]["id"]) if row["gravest"] else None
    facts = row["ending"]["facts"] if row["ending"] else []
    troubles = [fact["text"] for fact in facts if fact["kind"] != "finished"]
    return {
        **{name: row[name] for name in ("run", "state", "step")},
        "id": view.run.id,
        "steps_per_s": row["steps_per_s"],
        "verdict": ", ".join([row["state"], *troubles]) if facts else row["verdict"],
        "actions": view.action_lines(),
        "drill": ", ".join(f"{d.fault} at step {d.step}" for d in view.described.drills),
        "worst": worst and {name: worst[name] for name in ("id", "severity", "title")},
    }


def _differ_in_tokens(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an option of the batch or of its length differs: steps are then unlike."""
    words = ("batch", "seq", "accum", "block")
    return any(row["group"] == "command" and any(w in row["name"] for w in words) for row in rows)


def _facts(view: RunView) -> Iterator[tuple[tuple[str, str], str]]:
    described = view.described
    yield ("command", "command"), shlex.join(described.argv)
    for name, value in _options(described.argv).items():
        yield ("command", name), value
    yield ("policy", "policy"), f"{described.policy} ({described.mode})"
    yield ("policy", "digest"), described.policy_digest
    for record in reversed(view.records):
        if record.kind == "identity":
            identity = plain_json(record.data.get("identity") or {})
            break
    else:
        identity = {}
    with suppress(StoreError):
        identity = identity or view.run.read_json("identity.json").get("identity", {})
    for section, content in identity.items():
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
