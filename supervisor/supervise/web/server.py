"""The server of the page: routes, live events, commands of operators.

Nothing of a request opens a file by its name: runs are looked up among those of the directory,
incidents among those of the run, evidence among the entries of a manifest. Reading is done on
threads, with a limit in time, and each run has its own: one whose disk hangs delays no other. The
curves are built one run at a time, with low priority.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..cli import operate, runs
from ..cli.record import build_record
from ..core.model.decisions import json_document, plain_json
from ..errors import MISSHAPEN, StoreError, SuperviseError
from ..report.incident_views import render_page
from ..report.stability_record import render_record_page
from ..store import files
from ..store.run_directory import is_run
from . import export
from .curves import BuildingError, Query, QueryError, RunCurves, cache_folder
from .gate import HOSTS, Gate
from .run_view import RunView, describe_metrics, write_note

FIRST_NEEDED = ("supervise.catalog.loader", "supervise.catalog.lint", "supervise.runtime.launcher")
LIVE_S, STILL_S = 1.0, 15.0  # between two looks of a live view; between two signs of life
MAX_LIVE, MAX_OPEN, MAX_COMPARED, MAX_READ = 32, 8, 6, 4
IDLE_S = 30.0  # a run that somebody looked at since stays open
REQUEST_S = 10.0
LIST_S, ROW_S = 5.0, 0.2  # for all rows of the list; until one more is read, where MAX_READ hang
UNREAD = "its files are not read yet: a disk may be slow"
TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".txt": "text/plain",
}
ORDERS = {  # command -> its arguments, and the question before it
    "pause": ((), "Pause the job at its next step boundary?"),
    "resume": ((), "Continue the paused job?"),
    "ack": (("incident",), "Acknowledge the open incident? Its reminders stop."),
    "silence": (("rule", "for"), "Silence this rule? It neither acts nor notifies meanwhile."),
    "approve": (("id", "sha"), "Approve this request? Its runbook runs with these arguments."),
    "deny": (("id",), "Deny this request? The incident is held until it is released."),
    "release": ((), "End the hold? The policy may act again."),
    "savepoint": ((), "Save the training state in memory, for a later rollback?"),
    "stop": (("requeue",), "End the job? It is interrupted at a step boundary."),
}
LEAST = {"approve": ("id", "sha"), "deny": ("id",), "silence": ("rule",)}  # arguments that must be
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How the page is served.

    Attributes:
        directory: of the runs. only: the one run that is shown, None for all of it.
        write_token: the second one, for commands; "" for none. by: the operator's name.
        cache: directory of the curves; None: that of the user.
    """

    directory: Path
    only: str | None = None
    write_token: str = ""
    by: str = ""
    cache: Path | None = None


class ProblemError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.hint = status, text, hint


class RunReader:
    """Reads the files of one run, a thread at a time; one that waits for a disk is left behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: Future[Any] | None = None

    def read(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raises ProblemError where it, or one before, takes longer."""
        return self.finish(self.start(work), REQUEST_S)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begin to read, after the one before; where that is late there is a ProblemError."""
        result = Future[T]()
        if self._late is None or self._late.done():
            with suppress(RuntimeError):  # there may be no more threads
                threading.Thread(target=self._run, args=(work, result), daemon=True).start()
                return result
        result.set_exception(ProblemError(503, UNREAD))
        return result

    def finish(self, result: Future[T], within_s: float) -> T:
        """Return what was started. Raises ProblemError where it takes longer."""
        try:
            return result.result(within_s)
        except TimeoutError:
            if not result.cancel():  # it has its turn, so it is what the others wait for
                self._late = result
            raise ProblemError(503, UNREAD) from None

    def _run(self, work: Callable[[], T], result: Future[T]) -> None:
        with self._lock:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except Exception as error:
                    result.set_exception(error)


async def _on_thread(work: Callable[..., T], *args: Any, limit_s: float | None = REQUEST_S) -> T:
    """Return what `work` returns; a thread that waits for a disk is left behind."""
    try:
        thread = to_thread.run_sync(work, *args, abandon_on_cancel=True)
        return await asyncio.wait_for(thread, limit_s)
    except TimeoutError:
        raise ProblemError(503, "there is no answer yet: a disk may be slow") from None


class Page:
    """All that the routes share: the open runs, and who looks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._readers: dict[str, RunReader] = {}
        self._views: dict[str, RunView] = {}
        self._curves: dict[str, RunCurves] = {}
        self._used: dict[str, float] = {}  # name -> when somebody looked at it last
        self._listed: dict[str, RunView] = {}  # of the list: their records are not kept
        self._rows: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._documents: dict[str, tuple[object, dict[str, Any]]] = {}
        self._lock = threading.RLock()  # of these tables; never held for a disk
        self.viewers = 0
        self.is_ending = asyncio.Event()
        run, incident = "/run/{run}", "/incident/{incident}"
        self.application = Starlette(
            routes=[
                Route("/", self._shell("runs", "./")),
                Route("/compare/", self._shell("compare", "../")),
                Route(f"{run}/", self._shell("run", "../../")),
                Route(f"{run}{incident}/", self._shell("incident", "../../../../")),
                Route(f"{run}{incident}/report.html", self._reading(self._report_page)),
                Route(f"{run}/record.html", self._reading(self._record_page, limit_s=None)),
                Route(f"{run}/export.html", self._reading(self._export_page, limit_s=None)),
                Route(
                    f"{run}{incident}/evidence/{{bundle}}/{{name}}", self._reading(self._evidence)
                ),
                Route("/static/{name}", self._reading(self._static)),
                Route("/api/runs", self._reading(self._run_list)),
                Route("/api/commands", self._reading(self._orders)),
                Route("/api/compare", self._reading(self._comparison)),
                Route(f"/api{run}", self._reading(self._document)),
                Route(f"/api{run}/metrics", self._reading(self._metrics)),
                Route(f"/api{run}/series", self._reading(self._series)),
                Route(f"/api{run}/head", self._reading(self._head)),
                Route(f"/api{run}/live", self._live),
                Route(f"/api{run}{incident}", self._reading(self._incident)),
                Route(f"/api{run}{incident}/evidence", self._reading(self._bundles)),
                Route(f"/api{run}/command", self._command, methods=["POST"]),
                Route(f"/api{run}/note", self._note, methods=["PUT"]),
            ],
            exception_handlers={
                404: lambda request, error: _error(404, "there is no such page"),
                405: lambda request, error: _error(405, "not by this method"),
                **dict.fromkeys(ERRORS, _on_error),
            },
        )
        self.application.router.redirect_slashes = False  # to an address that a proxy does not know

    def close(self) -> None:
        """Write the caches."""
        for curves in self._curves.values():
            curves.close()

    # ── runs ──

    def view(self, name: str) -> RunView:
        """Return a run, up to date. Raises ProblemError, StoreError."""
        if name not in self._names():
            raise ProblemError(404, "there is no such run")
        with self._lock:
            now_s = self._used[name] = time.monotonic()
            for other in sorted(self._used, key=self._used.__getitem__)[:-MAX_OPEN]:
                if now_s - self._used[other] > IDLE_S:
                    del self._used[other]
                    self._drop(other)
        return self._reader(name).read(lambda: self._updated_view(name))

    def _names(self) -> list[str]:
        """Return the names that may be runs, without a look at any: its disk may hang."""
        directory, only = self.settings.directory, self.settings.only
        try:
            with os.scandir(directory) as entries:
                names = [e.name for e in entries if not e.is_file(follow_symlinks=False)]
        except OSError as error:
            raise StoreError(f"cannot read {directory}: {error.strerror}") from error
        return [name for name in names if only in (None, name)]

    def _reader(self, name: str) -> RunReader:
        with self._lock:
            return self._readers.setdefault(name, RunReader())

    def _updated_view(self, name: str) -> RunView:
        view = self._views.get(name)
        if view is None or not view.is_there():
            with self._lock:
                self._drop(name)
            path = self.settings.directory / name
            if not is_run(path):
                raise ProblemError(404, "there is no such run")
            view = self._views[name] = RunView(path)
        view.update()
        return view

    def _drop(self, name: str) -> None:
        self._views.pop(name, None)
        self._documents.pop(name, None)
        if (curves := self._curves.pop(name, None)) is not None:
            threading.Thread(target=curves.close, daemon=True).start()

    def curves(self, name: str, view: RunView | None = None) -> RunCurves:
        """Return the curves of a run."""
        view = self.view(name) if view is None else view

        def open_curves() -> RunCurves:
            if name not in self._curves:
                folder = cache_folder(view.run.id, self.settings.cache)
                self._curves[name] = RunCurves(view, folder)
            return self._curves[name]

        return self._curves.get(name) or self._reader(name).read(open_curves)

    def _reading(
        self, answer: Callable[[Request], Response], *, limit_s: float | None = REQUEST_S
    ) -> Callable[[Request], Any]:
        """Return a route that answers on a thread, in a limited time."""

        async def route(request: Request) -> Response:
            return await _on_thread(answer, request, limit_s=limit_s)

        return route

    # ── pages ──

    def _shell(self, page: str, up: str) -> Callable[[Request], Any]:
        def answer(request: Request) -> Response:
            if "run" in request.path_params:
                view = self.view(request.path_params["run"])
                if "incident" in request.path_params:
                    _known_incident(view, request)
            return Response(export.page_source(page, up), media_type="text/html")

        return self._reading(answer)

    def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        kind = TYPES.get(Path(name).suffix)
        path = export.static_files().get(name)
        if kind is None or path is None:
            raise ProblemError(404, "there is no such file")
        raw = files.read_file(path, foreign=True)
        tag = f'"{hashlib.sha256(raw).hexdigest()[:16]}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(raw, media_type=kind, headers=headers)

    def _report_page(self, request: Request) -> Response:
        view = self.view(request.path_params["run"])
        return _document(render_page(view.report(_known_incident(view, request))))

    def _record_page(self, request: Request) -> Response:
        view = self.view(request.path_params["run"])
        return _document(render_record_page(build_record(view.run)))

    def _export_page(self, request: Request) -> Response:
        name = request.path_params["run"]
        raw = export.export_page(self.view(name), self.curves(name))
        headers = {"Content-Disposition": f'attachment; filename="{_plain(name)}.html"'}
        return Response(raw, media_type="text/html", headers=headers)

    def _evidence(self, request: Request) -> Response:
        view = self.view(request.path_params["run"])
        bundle, name = (request.path_params[key] for key in ("bundle", "name"))
        raw = export.evidence_file(view, _known_incident(view, request), bundle, name)
        headers = {
            "Content-Disposition": f'attachment; filename="{_plain(name)}"',
            "Content-Security-Policy": "sandbox; default-src 'none'",
        }
        return Response(raw, media_type="application/octet-stream", headers=headers)

    # ── documents ──

    def _run_list(self, request: Request) -> Response:
        names = self._names()
        for name in set(self._readers).difference(names):
            for table in (self._listed, self._rows, self._readers):
                table.pop(name, None)
        stamped = sorted(self._stamped_rows(names), key=itemgetter(0), reverse=True)
        rows = [row for _, row in stamped if row]
        needs = [need for row in rows for need in row["needs"]]
        order = sorted(needs, key=_urgency)
        return _json(
            {
                "now": time.time(),
                "directory": str(self.settings.directory),
                "writable": bool(self.settings.write_token),
                "needs": order,
                "runs": [{k: v for k, v in row.items() if k != "needs"} for row in rows],
            }
        )

    def _stamped_rows(self, names: Sequence[str]) -> Iterator[tuple[float, Mapping[str, Any]]]:
        """Yield when a run began, and its row; of one that is not read in time its problem."""
        until_s = time.monotonic() + LIST_S
        started: dict[str, Future[tuple[float, Mapping[str, Any]]]] = {}
        pending: set[Future[Any]] = set()
        for name in names:
            if len(pending) >= MAX_READ:
                pending = wait(pending, ROW_S, FIRST_COMPLETED).not_done
            if time.monotonic() > until_s:
                break
            work = partial(self._read_row, self.settings.directory / name)
            started[name] = self._reader(name).start(work)
            pending.add(started[name])
        for name in names:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                yield self._reader(name).finish(started.get(name) or Future(), left_s)
            except ProblemError as error:
                path = str(self.settings.directory / name)
                yield math.inf, _problem_row(runs.RunSummary(name, path, problem=str(error)))

    def _read_row(self, path: Path) -> tuple[float, Mapping[str, Any]]:
        """Return the same of the files; one that cannot be read has its problem, and no page."""
        began_s = math.inf
        try:
            began_s = (path / "run.json").stat().st_mtime
            view = self._listed.get(path.name)
            if view is None or not view.is_there():
                self._rows.pop(path.name, None)
                view = self._listed[path.name] = RunView(path, brief=True)
            view.update()
            if path.name not in self._rows or self._rows[path.name][0] != view.version:
                self._rows[path.name] = view.version, plain_json(view.summary())
            row = self._rows[path.name][1]
            return began_s, {**row, "needs": plain_json(view.needs(row["state"]))}
        except (FileNotFoundError, NotADirectoryError):  # no run
            return 0.0, {}
        except (OSError, SuperviseError, *MISSHAPEN) as error:
            summary = runs.summarize_run(path)
            summary.problem = summary.problem or str(error)
            return began_s, _problem_row(summary)

    def _document(self, request: Request) -> Response:
        name = request.path_params["run"]
        return _json(self._run_document(name))

    def _run_document(self, name: str) -> dict[str, Any]:
        view = self.view(name)
        curves = self.curves(name, view)
        curves.update()
        return self._document_of(name, view, curves)

    def _document_of(self, name: str, view: RunView, curves: RunCurves) -> dict[str, Any]:
        version = view.version, curves.version()
        if name not in self._documents or self._documents[name][0] != version:
            document = export.run_document(view, curves)
            document["writable"] = bool(self.settings.write_token)
            self._documents[name] = version, document
        return self._documents[name][1]

    def _metrics(self, request: Request) -> Response:
        curves = self.curves(request.path_params["run"])
        if (progress := curves.progress()) < 1.0:
            raise BuildingError(progress)
        return _json({"metrics": describe_metrics(curves.metrics())})

    def _series(self, request: Request) -> Response:
        query = Query.parse(request.query_params.multi_items())
        curves = self.curves(request.path_params["run"])
        curves.update()
        headers = {"ETag": curves.tag(query), "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        raw = curves.series(query)
        return Response(raw, media_type="application/octet-stream", headers=headers)

    def _head(self, request: Request) -> Response:
        curves = self.curves(request.path_params["run"])
        curves.update()
        return _json(curves.head())

    def _incident(self, request: Request) -> Response:
        view = self.view(request.path_params["run"])
        report = view.report(_known_incident(view, request))
        return Response(report.encode(), media_type="application/json")

    def _bundles(self, request: Request) -> Response:
        view = self.view(request.path_params["run"])
        return _json({"bundles": export.list_evidence(view, _known_incident(view, request))})

    def _comparison(self, request: Request) -> Response:
        chosen: list[tuple[str, RunView, RunCurves, int | None]] = []
        for key, value in request.query_params.multi_items():
            if key in "abcdef" and len(chosen) < MAX_COMPARED:
                chosen_part = re.fullmatch(r"(.*?)(?:@([0-9]{1,8}))?", value, re.DOTALL)
                assert chosen_part is not None
                name, attempt = chosen_part.groups()
                number = None if attempt is None else int(attempt)
                curves = self.curves(name)
                curves.update()
                chosen.append((key, self.view(name), curves, number))
        if not chosen:
            raise QueryError("a, b, …: name runs to compare")
        return _json(export.compare_runs(chosen))

    def _orders(self, request: Request) -> Response:
        return _json(
            {
                "writable": bool(self.settings.write_token),
                "by": self.settings.by,
                "commands": {name: question for name, (_, question) in ORDERS.items()},
            }
        )

    # ── live ──

    async def _live(self, request: Request) -> Response:
        name = request.path_params["run"]
        if self.viewers >= MAX_LIVE:
            return _error(429, f"{MAX_LIVE} live views are open", "close one of them")
        await _on_thread(self.view, name)
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
        return StreamingResponse(
            self._events(name), media_type="text/event-stream", headers=headers
        )

    async def _events(self, name: str) -> AsyncIterator[str]:
        """Yield all but the curves, then what is new once a second.

        A view that was cut off connects again: whatever it has missed is in the first status.
        """
        self.viewers += 1
        try:
            document = await _on_thread(self._run_document, name)
            head = await _on_thread(lambda: self.curves(name).head())
            record = max((row["record"] for row in document["decisions"]), default=-1)
            whole = {key: value for key, value in document.items() if key != "frames"}
            yield _event("head", head) + _event("status", whole)
            still_s = time.monotonic()
            while not self.is_ending.is_set():
                await asyncio.sleep(LIVE_S)
                newest = await _on_thread(self._look, name, document, head, record)
                document, head, record, text = newest
                if not text and time.monotonic() - still_s > STILL_S:
                    text = _event("still", {})
                if text:
                    still_s = time.monotonic()
                    yield text
        except (ProblemError, SuperviseError) as error:
            yield _event("status", {"problem": str(error)})
        finally:
            self.viewers -= 1

    def _look(
        self, name: str, document: dict[str, Any], head: dict[str, Any], record: int
    ) -> tuple[dict[str, Any], dict[str, Any], int, str]:
        """Return what is now, and the events about what has changed."""
        view, text = self.view(name), ""
        curves = self.curves(name, view)
        curves.update()
        now = curves.head()
        if now != head:
            text += _event("head", now)
        for row in reversed(view.decisions(record)):
            text += _event("record", plain_json(row))
            record = row.record
        newest = self._document_of(name, view, curves)
        if newest is document:
            return newest, now, record, text
        changed = {
            key: value
            for key, value in newest.items()
            if key not in ("decisions", "frames") and document.get(key) != value
        }
        if changed:
            text += _event("status", changed)
        return newest, now, record, text

    # ── what changes something ──

    async def _body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request that may change something. Raises ProblemError."""
        if not self.settings.write_token:
            hint = "supervise web --write, or the command that the page shows"
            raise ProblemError(403, "this page only reads", hint)
        offered = request.headers.get("x-supervise-write", "")
        if not hmac.compare_digest(offered.encode(), self.settings.write_token.encode()):
            raise ProblemError(403, "the second token is missing or wrong")
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise ProblemError(400, "the body is not a JSON object")
        return body

    async def _command(self, request: Request) -> Response:
        body = await self._body(request)
        view = await _on_thread(self.view, request.path_params["run"])
        command, given = body.get("command"), body.get("args") or {}
        if command not in ORDERS or not isinstance(given, dict):
            raise ProblemError(400, f"command: one of {', '.join(ORDERS)}")
        args = {name: given[name] for name in ORDERS[command][0] if given.get(name) is not None}
        missing = [name for name in LEAST.get(command, ()) if not args.get(name)]
        unfit = [name for name, value in args.items() if not _is_fit(name, value)]
        if missing or unfit:
            raise ProblemError(400, f"{command}: {', '.join([*missing, *unfit])} missing or unfit")
        if command == "silence":
            args.setdefault("for", 1000)
        given = {**args, "via": "web"}
        send = partial(operate.send_and_wait, view.run.path, command, self.settings.by, given)
        answer = await _on_thread(send, limit_s=None)
        return _json(answer.facts())

    async def _note(self, request: Request) -> Response:
        body = await self._body(request)
        view = await _on_thread(self.view, request.path_params["run"])
        tags, note = body.get("tags"), body.get("note")
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise ProblemError(400, "tags: a list of texts")
        if not isinstance(note, str):
            raise ProblemError(400, "note: a text")
        return _json(await _on_thread(write_note, view.run.id, tags, note))


def _is_fit(name: str, value: object) -> bool:
    if name == "for":
        return type(value) is int and 0 <= value < 1 << 31
    return isinstance(value, bool) if name == "requeue" else isinstance(value, str)


def _problem_row(summary: runs.RunSummary) -> Mapping[str, Any]:
    content = {name: getattr(summary, name) for name in summary.__slots__}
    content |= {name: [] for name in ("rollbacks", "tags", "needs")}
    content |= {"verdict": summary.problem, "note": "", "curve": {"steps": [], "loss": []}}
    row: dict[str, Any] = plain_json(content)
    return row


def _urgency(need: Mapping[str, Any]) -> tuple[str, float]:
    left_s = need["left_s"]
    return need["severity"] or "SEV9", math.inf if left_s is None else left_s


def _known_incident(view: RunView, request: Request) -> str:
    name = str(request.path_params["incident"])
    if name not in {mark["id"] for mark in view.marks()["incidents"]}:
        raise ProblemError(404, "the run has no such incident")
    return name


def _plain(name: str) -> str:
    """Return the name of a download."""
    return re.sub(r"[^-.0-9A-Za-z_]", "_", name)


def _document(text: str) -> Response:
    """Return a page of another part of supervise under a policy of its own."""
    styles = export.style_hashes(_STYLE.findall(text))
    policy = f"default-src 'none'; style-src {styles}; img-src data:; base-uri 'none'"
    headers = {"Content-Security-Policy": f"{policy}; form-action 'none'; frame-ancestors 'self'"}
    return Response(text, media_type="text/html", headers=headers)


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {json_document(content)}\n\n"


def _json(content: Any, status: int = 200) -> Response:
    return Response(json_document(content), status, media_type="application/json")


def _error(status: int, text: str, hint: str | None = None) -> Response:
    return JSONResponse({"error": text, "hint": hint}, status)


def _on_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed; none shows more than its sentence."""
    match error:
        case ProblemError():
            return _error(error.status, error.text, error.hint)
        case BuildingError():
            return _json({"building": error.progress}, 202)
        case QueryError():
            return _error(400, str(error))
        case StoreError():
            return _error(503 if request.method == "GET" else 409, str(error), error.hint)
        case SuperviseError():
            return _error(409, str(error), error.hint)
        case KeyError() | FileNotFoundError():
            return _error(404, "there is no such thing")
    return _error(500, f"the run cannot be shown: {type(error).__name__}")


ERRORS: Sequence[type[Exception]] = (
    *(ProblemError, BuildingError, QueryError, SuperviseError, KeyError, OSError, Exception),
)


class _Server(uvicorn.Server):
    """Ends the live views before it waits for its connections."""

    def __init__(self, config: uvicorn.Config, page: Page) -> None:
        super().__init__(config)
        self._page = page

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End in order at the first signal; uvicorn would raise it again at the end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop serving."""
        self._page.is_ending.set()
        await super().shutdown(sockets)


def serve(
    settings: Settings,
    listener: socket.socket,
    token: str,
    hosts: Sequence[str],
    announce: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM; `announce` prints the addresses, again at SIGUSR1.

    The access log is off: it would hold the token.
    """
    page = Page(settings)
    address = listener.getsockname()
    port = address[1] if isinstance(address, tuple) else 0
    door = files.read_file(export.STATIC / "token.html", foreign=True)
    gate = Gate(
        page.application,
        token,
        (*HOSTS, *(name.lower() for name in hosts)),
        cookie=f"supervise_{port}",
        door=door,
    )
    config = uvicorn.Config(
        gate,
        access_log=False,
        log_level="warning",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    signal.signal(signal.SIGUSR1, lambda *_: announce())
    for module in FIRST_NEEDED:
        import_module(module)
    announce()
    try:
        _Server(config, page).run(sockets=[listener])
    finally:
        page.close()
