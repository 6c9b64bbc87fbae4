"""The server of the page: routes, live events, and commands of operators.

Nothing of a request opens a file by its name: runs are looked up among those of the directory,
incidents among those of the run, evidence among the entries of a manifest. Each request has a
thread, with a limit in time, and each run a lock: one whose disk hangs delays no other. The curves
are built one run at a time, with low priority.
"""

from __future__ import annotations

import asyncio
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
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import uvicorn
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from ..cli import operate, runs
from ..cli.record import build_record
from ..core.model.decisions import json_document, plain_json
from ..errors import MISSHAPEN, StoreError, SuperviseError
from ..report.pages import TEMPLATES
from ..report.stability_record import render_record_page
from ..store import files
from ..store.run_directory import is_run
from . import export
from .curves import BuildingError, Query, QueryError, RunCurves, cache_folder
from .gate import HOSTS, Gate, problem_answer
from .run_view import RunView, write_note

FIRST_NEEDED = ("supervise.catalog.loader", "supervise.catalog.lint", "supervise.runtime.launcher")
LIVE_S, STILL_S = 1.0, 15.0  # between two looks of a stream; until it says that nothing is new
MAX_STREAMS, MAX_OPEN, MAX_COMPARED, MAX_READ = 32, 8, 6, 4
IDLE_S = 30.0  # a run that somebody looked at since stays open
REQUEST_S = 10.0
LIST_S, ROW_S = 5.0, 0.2  # for all rows of the list; until one more is read, where MAX_READ hang
UNREAD = "its files are not read yet: a disk may be slow"
ORDERS = {  # command -> its arguments
    **dict.fromkeys(("pause", "resume", "release", "savepoint"), ()),
    "ack": ("incident",),
    "silence": ("rule", "for"),
    "approve": ("id", "sha"),
    "deny": ("id",),
    "stop": ("requeue",),
}
OPTIONAL = ("incident", "for", "requeue")
SILENCED = 1000  # steps, where a command names none
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


class OrderArguments(Struct, frozen=True, rename={"steps": "for"}.get):
    """Arguments of an operator's command, as far as it has them."""

    incident: str | None = None
    rule: str | None = None
    steps: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    id: str | None = None
    sha: str | None = None
    requeue: bool | None = None


class Order(Struct, frozen=True):
    """The body of a command."""

    command: str
    args: OrderArguments = OrderArguments()


class Note(Struct, frozen=True):
    """The body that replaces the tags and the note of a run."""

    tags: list[str]
    note: str


class Since(Struct, frozen=True):
    """The newest that a page has of a run: the version of its facts, and the number of a record."""

    version: int = 0
    record: int = -1


class ProblemError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.hint = status, text, hint


class OpenRun:
    """A run in the list, or that somebody looks at; one thread at a time reads its files."""

    def __init__(self, path: Path, cache: Path | None) -> None:
        self.used_s = -math.inf  # when somebody looked at it last
        self.path, self._cache = path, cache
        self._view: RunView | None = None
        self._curves: RunCurves | None = None
        self._brief: RunView | None = None  # of the list: its records are not kept
        self._row: tuple[int, Mapping[str, Any]] = (0, {})
        self._whole: dict[str, Any] = {}  # of the page, and at which version each part came
        self._changed: dict[str, int] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._is_late = False  # what has the lock waits for a disk

    # ── with its lock ──

    def view(self) -> RunView:
        """Return the run, up to date. Raises ProblemError, StoreError."""
        view = self._view  # another thread may drop it
        if view is None or not view.is_there():
            self.drop()
            if not is_run(self.path):
                raise ProblemError(404, "there is no such run")
            view = self._view = RunView(self.path)
        view.update()
        return view

    def curves(self) -> tuple[RunView, RunCurves]:
        """Return the run and its curves, up to date as far as they are built."""
        view = self.view()
        curves = self._curves
        if curves is None:
            curves = self._curves = RunCurves(view, cache_folder(view.run.id, self._cache))
        curves.update()
        return view, curves

    def document(self, since: Since) -> dict[str, Any]:
        """Return the facts that have changed since, and of the records those that are new."""
        view, curves = self.curves()
        whole = export.run_document(view, curves)
        changed = [key for key, value in whole.items() if self._whole.get(key, self) != value]
        if changed:  # by the clock: a page may have the version of an earlier start
            self._version = max(self._version + 1, int(time.time() * 1e3))
            self._whole, self._changed = (
                whole,
                self._changed | dict.fromkeys(changed, self._version),
            )
        fresh = {key: whole[key] for key, at in self._changed.items() if at > since.version}
        if since.version:
            fresh["decisions"] = view.decisions(since.record)
        return {**fresh, "version": self._version}

    def row(self) -> tuple[float, Mapping[str, Any]]:
        """Return when it began, and its row of the list; of no run there is none."""
        began_s = math.inf
        try:
            began_s = (self.path / "run.json").stat().st_mtime
            if self._brief is None or not self._brief.is_there():
                self._brief, self._row = RunView(self.path, brief=True), (0, {})
            self._brief.update()
            if self._row[0] != self._brief.version:
                self._row = self._brief.version, self._brief.summary()
            row = self._row[1]
            return began_s, {**row, "needs": plain_json(self._brief.needs(row["state"]))}
        except (FileNotFoundError, NotADirectoryError):  # no run
            return 0.0, {}
        except (OSError, SuperviseError, *MISSHAPEN) as error:
            summary = runs.summarize_run(self.path)
            return began_s, _problem_row(summary, summary.problem or str(error))

    # ── of any thread ──

    def drop(self) -> None:
        """Close what is open of it; nothing of the list."""
        self._view, curves, self._curves = None, self._curves, None
        if curves is not None:
            with suppress(RuntimeError):  # there may be no more threads: its cache stays locked
                threading.Thread(target=curves.close, daemon=True).start()

    def close(self) -> None:
        """Write the cache of its curves."""
        curves = self._curves
        if curves is not None:
            curves.close()

    def read(self, work: Callable[[], T], *, is_limited: bool = True) -> T:
        """Return what `work` returns, one at a time. Raises ProblemError: one before it is late."""
        limit_s = 0.0 if self._is_late else REQUEST_S
        if not self._lock.acquire(timeout=limit_s if is_limited else -1.0):
            self._is_late = True
            raise ProblemError(503, UNREAD)
        try:
            return work()
        finally:
            self._is_late = False
            self._lock.release()


async def _on_thread(work: Callable[..., T], *args: Any, limit_s: float | None = None) -> T:
    """Return what `work` returns; a thread that waits for a disk longer is left behind."""
    result = Future[T]()

    def run() -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            try:
                result.set_result(work(*args))
            except Exception as error:
                result.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # there may be no more threads
        raise ProblemError(503, UNREAD) from None
    try:
        return await asyncio.wait_for(asyncio.wrap_future(result), limit_s)
    except TimeoutError:
        raise ProblemError(503, UNREAD) from None


class _Static(StaticFiles):
    """Files of the page; the browser asks each time whether they are still the same."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return a file, or that it has not changed."""
        response = super().file_response(*args, **options)
        response.headers["cache-control"] = "no-cache"
        return response


def _style(request: Request) -> Response:
    """Return the sheet that the page shares with the reports."""
    return FileResponse(TEMPLATES / "style.css", headers={"cache-control": "no-cache"})


class Page:
    """All that the routes share: the open runs, and how many streams there are."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._runs: dict[str, OpenRun] = {}
        self._operator = settings.by if settings.write_token else None
        self._lock = threading.Lock()  # of this table; never held for a disk
        self._streams = 0
        self.is_ending = asyncio.Event()
        run, incident = "/run/{run}", "/incident/{incident}"
        self.application = Starlette(
            routes=[
                Route("/", self._shell("runs", "./")),
                Route("/compare/", self._shell("compare", "../")),
                Route(f"{run}/", self._shell("run", "../../")),
                Route(f"{run}{incident}/", self._shell("incident", "../../../../")),
                Route(f"{run}/record.html", _reading(self._record_page, is_limited=False)),
                Route(f"{run}/export.html", _reading(self._export_page, is_limited=False)),
                Route(f"{run}{incident}/evidence/{{bundle}}/{{name}}", _reading(self._evidence)),
                Route("/static/style.css", _style),
                Mount("/static", _Static(directory=export.STATIC)),
                Route("/api/runs", self._run_list),
                Route("/api/compare", _reading(self._comparison)),
                Route(f"/api{run}", _reading(self._document)),
                Route(f"/api{run}/live", self._live),
                Route(f"/api{run}/series", _reading(self._series)),
                Route(f"/api{run}{incident}", _reading(self._incident)),
                Route(f"/api{run}/command", self._command, methods=["POST"]),
                Route(f"/api{run}/note", self._note, methods=["PUT"]),
            ],
            exception_handlers={
                404: lambda request, error: problem_answer(404, "there is no such page"),
                405: lambda request, error: problem_answer(405, "not by this method"),
                **dict.fromkeys(ERRORS, _on_error),
            },
        )
        self.application.router.redirect_slashes = False  # to an address that a proxy does not know

    def close(self) -> None:
        """Write the caches."""
        with self._lock:
            opened = [*self._runs.values()]
        for run in opened:
            run.close()

    # ── runs ──

    def view(self, name: str) -> RunView:
        """Return a run, up to date. Raises ProblemError, StoreError."""
        run = self._opened(name)
        return run.read(run.view)

    def curves(self, name: str, *, is_limited: bool = True) -> tuple[RunView, RunCurves]:
        """Return a run and its curves, up to date as far as they are built."""
        run = self._opened(name)
        return run.read(run.curves, is_limited=is_limited)

    def _opened(self, name: str) -> OpenRun:
        if name not in self._names():
            raise ProblemError(404, "there is no such run")
        with self._lock:
            run = self._entry(name)
            run.used_s = time.monotonic()
            newest_first = sorted(self._runs.values(), key=lambda r: r.used_s, reverse=True)
            for other in newest_first[MAX_OPEN:]:
                if run.used_s - other.used_s > IDLE_S:
                    other.drop()
            return run

    def _entry(self, name: str) -> OpenRun:
        if name not in self._runs:
            self._runs[name] = OpenRun(self.settings.directory / name, self.settings.cache)
        return self._runs[name]

    def _names(self) -> list[str]:
        """Return the names that may be runs, without a look at any: its disk may hang."""
        directory, only = self.settings.directory, self.settings.only
        try:
            with os.scandir(directory) as entries:
                names = [e.name for e in entries if not e.is_file(follow_symlinks=False)]
        except OSError as error:
            raise StoreError(f"cannot read {directory}: {error.strerror}") from error
        return [name for name in names if only in (None, name)]

    # ── pages ──

    def _shell(self, page: str, up: str) -> Callable[[Request], Any]:
        def answer(request: Request) -> Response:
            if "incident" in request.path_params:
                self._incident_of(request)
            elif "run" in request.path_params:
                self.view(request.path_params["run"])
            return Response(export.page_source(page, up), media_type="text/html")

        return _reading(answer)

    def _incident_of(self, request: Request) -> tuple[RunView, str]:
        """Return the run and the incident of a request. Raises ProblemError: there is none."""
        view, incident = self.view(request.path_params["run"]), request.path_params["incident"]
        if incident not in view.incident_ids():
            raise ProblemError(404, "the run has no such incident")
        return view, incident

    def _record_page(self, request: Request) -> Response:
        text = render_record_page(build_record(self.view(request.path_params["run"]).run))
        return Response(text, media_type="text/html", headers={_CSP: export.report_policy(text)})

    def _export_page(self, request: Request) -> Response:
        name = request.path_params["run"]
        raw = export.export_page(*self.curves(name))
        return Response(raw, media_type="text/html", headers=_download(f"{name}.html"))

    def _evidence(self, request: Request) -> Response:
        bundle, name = (request.path_params[key] for key in ("bundle", "name"))
        file = export.open_evidence(*self._incident_of(request), bundle, name)
        size = os.fstat(file.fileno()).st_size
        headers = {**_download(name), _CSP: "sandbox; default-src 'none'"}
        return StreamingResponse(
            export.read_blocks(file, size),
            media_type="application/octet-stream",
            headers={**headers, "Content-Length": str(size)},
        )

    # ── documents ──

    async def _run_list(self, request: Request) -> Response:
        names = await _on_thread(self._names, limit_s=REQUEST_S)
        with self._lock:
            opened = {name: self._entry(name) for name in names}
            gone = [self._runs.pop(name) for name in set(self._runs) - set(names)]
        for run in gone:
            run.drop()
        stamped = sorted(await _stamped_rows(opened), key=itemgetter(0), reverse=True)
        rows = [dict(row) for _, row in stamped if row]
        needs = [need for row in rows for need in row.pop("needs")]
        content = {"needs": sorted(needs, key=_urgency), "runs": rows}
        return _json({"directory": str(self.settings.directory), **content})

    def _document(self, request: Request) -> Response:
        return _json(self._changes(request.path_params["run"], _since(request)))

    def _changes(self, name: str, since: Since) -> dict[str, Any]:
        """Return what has changed of a run. Raises ProblemError, StoreError."""
        run = self._opened(name)
        return run.read(partial(run.document, since)) | {"operator": self._operator}

    def _series(self, request: Request) -> Response:
        query = Query.parse(request.query_params.multi_items())
        run = self._opened(request.path_params["run"])
        raw = run.read(lambda: run.curves()[1].series(query))
        return Response(raw, media_type="application/octet-stream")

    def _incident(self, request: Request) -> Response:
        view, incident = self._incident_of(request)
        report = view.report(incident)
        files_of = export.list_evidence(view, report)
        return _json({**json.loads(report.encode()), "files": files_of})

    def _comparison(self, request: Request) -> Response:
        chosen = [(k, v) for k, v in request.query_params.multi_items() if k in tuple("abcdef")]
        if not chosen:
            raise QueryError("a, b, …: name runs to compare")
        views = {key: self.view(name) for key, name in chosen[:MAX_COMPARED]}
        return _json(export.compare_runs(views))

    # ── live ──

    async def _live(self, request: Request) -> ASGIApp:
        """Return a stream of events: documents with what has changed. Raises ProblemError."""
        name, since = request.path_params["run"], _since(request)
        await _on_thread(self._opened, name, limit_s=REQUEST_S)
        if self._streams >= MAX_STREAMS:
            raise ProblemError(503, f"{MAX_STREAMS} live views are open", "close one of them")
        events = StreamingResponse(
            self._events(name, since),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            self._streams += 1  # nothing is waited for since it was compared
            try:
                await events(scope, receive, send)
            finally:
                self._streams -= 1

        return answer

    async def _events(self, name: str, since: Since) -> AsyncIterator[str]:
        """Yield what has changed, looked at once a second; without a change a sign of life.

        It ends where the run cannot be read: the answer to the next request says why.
        """
        sent_s = -math.inf  # the first is sent at once: a proxy holds nothing back
        with suppress(ProblemError, SuperviseError, OSError):
            while not self.is_ending.is_set():
                changes = await _on_thread(self._changes, name, since, limit_s=REQUEST_S)
                is_still = time.monotonic() - sent_s > STILL_S
                if changes["version"] != since.version or is_still:
                    sent_s = time.monotonic()
                    records = [since.record, *(row["record"] for row in changes["decisions"])]
                    since = Since(changes["version"], max(records))
                    yield f"data: {json_document(changes)}\n\n"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.is_ending.wait(), LIVE_S)

    # ── what changes something ──

    async def _body(self, request: Request, form: type[T]) -> T:
        """Return the body of a request that may change something. Raises ProblemError."""
        if not self.settings.write_token:
            hint = "supervise web --write, or the command that the page shows"
            raise ProblemError(403, "this page only reads", hint)
        offered = request.headers.get("x-supervise-write", "")
        if not hmac.compare_digest(offered.encode(), self.settings.write_token.encode()):
            raise ProblemError(403, "the second token is missing or wrong")
        try:
            return msgspec.json.decode(await request.body(), type=form)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProblemError(400, f"the body: {error}") from None

    async def _command(self, request: Request) -> Response:
        """Carry out a command. Raises ProblemError."""
        order = await self._body(request, Order)
        if order.command not in ORDERS:
            raise ProblemError(400, f"command: one of {', '.join(ORDERS)}")
        view = await _on_thread(self.view, request.path_params["run"], limit_s=REQUEST_S)
        given, names = msgspec.to_builtins(order.args), ORDERS[order.command]
        args = {name: given[name] for name in names if given[name] is not None}
        if missing := [name for name in names if name not in OPTIONAL and not args.get(name)]:
            raise ProblemError(400, f"{order.command}: {', '.join(missing)} missing")
        if order.command == "silence":
            args.setdefault("for", SILENCED)
        args["via"] = "web"
        send = partial(operate.send_and_wait, view.run.path, order.command, self.settings.by, args)
        return _json((await _on_thread(send)).facts())

    async def _note(self, request: Request) -> Response:
        """Replace tags and note of a run. Raises ProblemError."""
        body = await self._body(request, Note)
        view = await _on_thread(self.view, request.path_params["run"], limit_s=REQUEST_S)
        return _json(await _on_thread(write_note, view.run.id, body.tags, body.note))


def _since(request: Request) -> Since:
    """Return what a page has of a run. Raises QueryError."""
    try:
        return msgspec.convert(dict(request.query_params), Since, strict=False)
    except msgspec.ValidationError as error:
        raise QueryError(str(error)) from None


def _reading(
    answer: Callable[[Request], Response], *, is_limited: bool = True
) -> Callable[[Request], Any]:
    """Return a route that answers on a thread, in a limited time."""

    async def route(request: Request) -> Response:
        return await _on_thread(answer, request, limit_s=REQUEST_S if is_limited else None)

    return route


async def _stamped_rows(opened: Mapping[str, OpenRun]) -> list[tuple[float, Mapping[str, Any]]]:
    """Return when each run began, and its row; of one that is not read in time its problem."""
    until_s = time.monotonic() + LIST_S
    started: dict[str, asyncio.Task[tuple[float, Mapping[str, Any]]]] = {}
    pending: set[asyncio.Task[Any]] = set()
    for name, run in opened.items():
        if len(pending) >= MAX_READ:
            _, pending = await asyncio.wait(pending, timeout=ROW_S, return_when=FIRST_COMPLETED)
        if time.monotonic() > until_s:
            break
        started[name] = asyncio.create_task(_on_thread(run.read, run.row))
        pending.add(started[name])
    if pending:
        await asyncio.wait(pending, timeout=max(0.0, until_s - time.monotonic()))
    rows = []
    for name, run in opened.items():
        task = started.get(name)
        if task is not None and task.done() and task.exception() is None:
            rows.append(task.result())
        else:
            rows.append((math.inf, _problem_row(runs.RunSummary(name, str(run.path)), UNREAD)))
            if task is not None:
                task.cancel()
    return rows


def _problem_row(summary: runs.RunSummary, problem: str) -> Mapping[str, Any]:
    row: dict[str, Any] = plain_json({**asdict(summary), "problem": problem, "needs": []})
    return row


def _urgency(need: Mapping[str, Any]) -> tuple[str, float]:
    left_s = need["left_s"]
    return need["severity"] or "SEV9", math.inf if left_s is None else left_s


_CSP = "Content-Security-Policy"


def _download(name: str) -> dict[str, str]:
    plain = re.sub(r"[^-.0-9A-Za-z_]", "_", name)
    return {"Content-Disposition": f'attachment; filename="{plain}"'}


def _json(content: Any, status: int = 200) -> Response:
    return Response(json_document(content), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed; none shows more than its sentence."""
    match error:
        case ProblemError():
            return problem_answer(error.status, error.text, error.hint)
        case BuildingError():
            return _json({"building": error.progress}, 202)
        case QueryError():
            return problem_answer(400, str(error))
        case StoreError():
            return problem_answer(503 if request.method == "GET" else 409, str(error), error.hint)
        case SuperviseError():
            return problem_answer(409, str(error), error.hint)
        case KeyError() | FileNotFoundError():
            return problem_answer(404, "there is no such thing")
    return problem_answer(500, f"the run cannot be shown: {type(error).__name__}")


ERRORS: Sequence[type[Exception]] = (
    *(ProblemError, BuildingError, QueryError, SuperviseError, KeyError, OSError, Exception),
)


class _Server(uvicorn.Server):
    """Ends the streams before it waits for its connections."""

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
    door = files.read_file(export.STATIC / "token.html", foreign=True).decode()
    names = (*HOSTS, *(name.lower() for name in hosts))
    gate = Gate(page.application, token, names, cookie=f"supervise_{port}", door=door)
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
