"""End of this process: the record of an error that ended it or a thread, and its exit code.

The record is a small JSON file, written at exit from `sys.last_value` and from what `sys.exit` was
given; no hook of the job is replaced, its exit code and its streams stay. Texts are bounded and
redacted: no value of a variable of the environment whose name calls it a secret, no token, and the
home directory is `~`. An error that came from another process (a worker of a data loader, a process
of a pool, a rank below a launcher) carries that one's traceback in its own text; it is taken apart
here.

At exit Python has forgotten with which code the job asked to end, and a supervisor that took over
from a dead one is not the job's parent and cannot ask the kernel. What is seen is `sys.exit`, to
which the way in listens (`inject/sitecustomize.py`); a script that raises `SystemExit` itself
counts as one that ran to its end.

Knows nothing of torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
import time
import traceback
from threading import get_ident
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

from . import files

MESSAGE_CHARS, TRACE_CHARS = 2000, 6000
TRACE_FRAMES = 30  # innermost ones of each error of a chain
THREADS = 4  # that ended with an error and are recorded, of one process
RANKS = 64  # of a launcher
ERROR_FILE_BYTES = 65536
FULL_BYTES = 1 << 20  # free on a disk that counts as full; project default

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen ")
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)(?:, in (.+))?$', re.MULTILINE)
_CAUGHT_IN = re.compile(r"Caught [\w.]+ in (.+?)\.?$", re.MULTILINE)  # torch's ExceptionWrapper
_SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error")
_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|SIGNATURE|DSN|WEBHOOK|PRIVATE", re.IGNORECASE
)
_TOKEN = re.compile(
    r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,})"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_TORCH_WRITER = re.compile(r"inline_container|iostream error")  # hides why it could not write
_SHORTEST = 6  # a shorter value would be found everywhere by chance

Place = tuple[str, int, str]  # file, line, function
_ended: list[int] = []  # pids that have recorded their end
_threads: list[int] = []  # pid of each thread that was recorded


def record_end(status: Any, frames: Sequence[Place], *, marks: str, **facts: Any) -> None:
    """Record the error that ends this process, once; nothing if it ends well.

    Args:
        status, frames: what `sys.exit` was given, and the innermost frames that called it.
        marks: directory of the record.
        facts: fields of the record that the caller knows better, such as `rank`.

    Raises:
        OSError: the record cannot be written.
    """
    if os.getpid() in _ended:
        return
    error = getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, KeyboardInterrupt):
        record = record_error(error)
    elif error is None and status not in (None, 0) and not _is_spawned(status, frames):
        record = exit_record(status, frames)
    else:
        return
    _ended.append(os.getpid())
    _write(marks, {**record, **facts})


def _is_spawned(status: Any, frames: Sequence[Place]) -> bool:
    """Return whether multiprocessing ends a child of its own: the parent knows more of that."""
    name = frames[0][0] if frames else ""
    return isinstance(status, int) and name.endswith(os.path.join("multiprocessing", "spawn.py"))


def watch_threads(location: Callable[[], Mapping[str, Any]]) -> None:
    """Record what ends a thread. `threading.excepthook` stays what it is. Call it once.

    Args:
        location: returns `marks`, the directory, and further fields of the record.
    """
    make = getattr(threading, "_make_invoke_excepthook", None)
    if make is None:  # another Python: threads are not seen
        return

    def make_invoke() -> Callable[[Any], None]:
        invoke = make()

        def invoke_excepthook(thread: Any) -> None:
            try:
                _record_thread(thread, sys.exc_info()[1], dict(location()))
            except Exception:  # the job's own hook comes in any case
                pass
            invoke(thread)

        return invoke_excepthook

    vars(threading)["_make_invoke_excepthook"] = make_invoke


def _record_thread(thread: Any, error: Optional[BaseException], facts: dict[str, Any]) -> None:
    count = _threads.count(os.getpid())
    if error is None or isinstance(error, SystemExit) or count >= THREADS:
        return
    _threads.append(os.getpid())
    _write(
        facts.pop("marks"),
        {**record_error(error), "kind": "thread", "thread": thread.name, **facts},
    )


def record_error(error: BaseException) -> dict[str, Any]:
    """Return the record of an uncaught error: see `_write` for what is added."""
    trace = traceback.extract_tb(error.__traceback__, limit=-200)
    places = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(trace)]
    if isinstance(error, SyntaxError) and error.filename:
        places.insert(0, (error.filename, error.lineno or 0, ""))
    lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-TRACE_FRAMES)
    record: dict[str, Any] = {
        "kind": "exception",
        "type": _name(type(error)),
        "message": _text(error),
        "traceback": "".join(lines),
        **_location(places),
    }
    if isinstance(error, OSError) and error.errno is not None:
        record["errno"] = errno.errorcode.get(error.errno, str(error.errno))
    remote = _remote(record["message"]) or _remote(_text(error.__cause__))
    if remote:
        record.update(remote)
    else:
        record["message"] = _with_origin(error, record["message"])
        if _TORCH_WRITER.search(record["message"]):
            record["message"] += _full_disk(error)
    ranks = _ranks(error)
    if ranks:
        text = ", ".join(f"rank {rank['rank']} with code {rank['code']}" for rank in ranks)
        record.update(kind="launcher", ranks=ranks, message=f"ended: {text}")
    return record


def _with_origin(error: BaseException, message: str) -> str:
    """Return the message of an error with that of the first one behind it, if there is one.

    The data loader's error says that a worker is gone, the one behind it by which signal; the end
    of a file that could not be written fails as well, and hides why. An error that was handled
    before one of another type explains nothing, unless it is the system's and has no own class.
    """
    root_cause = error
    for _ in range(TRACE_FRAMES):
        handled = None if root_cause.__suppress_context__ else root_cause.__context__
        related = type(handled) in (type(root_cause), OSError)
        behind = root_cause.__cause__ or (handled if related else None)
        if behind is None:
            break
        root_cause = behind
    origin = f"{_name(type(root_cause))}: {_first_line(_text(root_cause))}"
    if root_cause is error or _first_line(_text(root_cause)) in message:
        return message
    line, end, tail = message.partition("\n")
    return f"{line} (from {origin}){end}{tail}"


def _full_disk(error: BaseException) -> str:
    """Return that the disk is full which torch could not save to, "" otherwise.

    Source: `save(obj, f)` of torch/serialization.py.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_locals.get("f")
        module = frame.f_globals.get("__name__")
        if (module, frame.f_code.co_name) != ("torch.serialization", "save"):
            continue
        if isinstance(path, (str, os.PathLike)):
            try:
                disk = os.statvfs(os.path.dirname(os.path.abspath(path)))
            except OSError:
                return ""
            free = disk.f_bavail * disk.f_frsize
            return f": {os.strerror(errno.ENOSPC)}: '{path}'" if free < FULL_BYTES else ""
    return ""


def error_location(error: BaseException) -> str:
    """Return "file:line" of the innermost place of the job's own code, "" without one."""
    trace = traceback.extract_tb(error.__traceback__, limit=-200)
    location = _location(
        [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(trace)]
    )
    return f"{location['file']}:{location['line']}" if location else ""


def exit_record(status: Any, frames: Sequence[Place]) -> dict[str, Any]:
    """Return the record of a process that called `sys.exit` with something else than 0."""
    code = status & 0xFF if isinstance(status, int) else 1
    text = f"sys.exit({status})" if isinstance(status, int) else _text(status)
    record = {
        "kind": "exit",
        "type": "SystemExit",
        "message": text,
        "code": code,
        **_location(frames),
    }
    if any(name.rpartition(os.sep)[2] == "argparse.py" for name, _, _ in frames):
        record["message"] = "argparse refused the arguments"
    return record


def _write(marks: str, record: dict[str, Any]) -> None:
    """Add who it was and when, make it fit for others to read, and put it into its file."""
    clean = _cleaner()
    about: dict[str, Any] = {
        "pid": os.getpid(),
        "at_ns": time.monotonic_ns(),
        "rank": _number("RANK", "SLURM_PROCID"),
        "world_size": _number("WORLD_SIZE", "SLURM_NTASKS"),
        **record,
    }
    about["message"] = clean(_cut(about["message"], MESSAGE_CHARS))
    about["traceback"] = clean(_cut(about.get("traceback", ""), TRACE_CHARS))
    for name in ("file", "function", "type", "thread", "within"):
        if name in about:
            about[name] = clean(str(about[name]))[-300:]
    for rank in about.get("ranks", ()):
        rank["message"] = clean(_cut(rank["message"], MESSAGE_CHARS))
    path = os.path.join(marks, f"failure.{about['pid']}.{about['at_ns']}.json")
    files.replace_file(path, json.dumps(about).encode("utf-8", "replace"))


def _location(places: Iterable[Place]) -> dict[str, Any]:
    """Return the innermost place of the job's own code, else the innermost of all; `{}`: none."""
    foreign = [frame for frame in places if not frame[0].startswith(_OURS)]
    job_frames = [frame for frame in foreign if _is_own(frame[0])]
    for name, line, function in (job_frames or foreign)[:1]:
        return {"file": _readable(name), "line": line, "function": function}
    return {}


def _is_own(name: str) -> bool:
    return not (_LIBRARY.search(name) or name.startswith((_STANDARD, _OURS)))


def _readable(name: str) -> str:
    """Return a path as people type it from the job's working directory."""
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        return name
    return name[len(here) :] if name.startswith(here) else name


def _remote(text: str) -> dict[str, Any]:
    """Return what a traceback of another process says that stands in a text; `{}` without one.

    Its last line is `type: message`, the lines above are frames.
    """
    frames = list(_FRAME.finditer(text))
    if "Traceback (most recent call last)" not in text or not frames:
        return {}
    tail = text[frames[-1].end() :].rstrip('"\n ').lstrip("\n").split("\n")
    lines = [line for line in tail if not line.startswith((" ", "\t"))]
    name, _, message = "\n".join(lines).partition(": ")
    if not re.fullmatch(r"[\w.]+", name):
        return {}
    places = [(match[1], int(match[2]), match[3] or "") for match in reversed(frames)]
    cause, spawned = _CAUGHT_IN.search(text), _SPAWNED.search(text)
    within = cause[1] if cause else f"process {spawned[1]}" if spawned else "another process"
    short = name.rpartition(".")[2]
    return {"type": short, "message": message.strip(), "within": within, **_location(places)}


def _ranks(error: BaseException) -> list[dict[str, Any]]:
    """Return which ranks a launcher saw fail, with the pid and the return code of each.

    Source: torch.distributed.elastic.multiprocessing.errors.ChildFailedError and ProcessFailure.
    """
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "ChildFailedError" or not isinstance(failures, dict):
        return []
    lines = []
    for rank, failure in list(failures.items())[:RANKS]:
        path = str(getattr(failure, "error_file", ""))
        message, trace = _error_file(path) if os.path.isfile(path) else ("", "")
        about = {"rank": int(rank), "pid": int(failure.pid), "code": int(failure.exitcode)}
        lines.append({**about, "message": message, **_location(_places(trace))})
    return lines


def _error_file(path: str) -> tuple[str, str]:
    """Return message and call stack of the file that a rank under torchrun's `record` wrote."""
    try:
        with os.fdopen(files.open_file(path, foreign=True), "rb") as file:
            content = json.loads(file.read(ERROR_FILE_BYTES))["message"]
        if isinstance(content, str):
            return content, ""
        return str(content["message"]), str(content.get("extraInfo", {}).get("py_callstack", ""))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "", ""


def _places(trace: str) -> list[Place]:
    return [(f[1], int(f[2]), f[3] or "") for f in reversed(list(_FRAME.finditer(trace)))]


def _cleaner() -> Callable[[str], str]:
    """Return what takes secrets out of a text, and the home directory."""
    secrets = [
        re.escape(value)
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name) and not value.isdigit()
    ]
    pattern = re.compile("|".join(sorted(secrets, key=len, reverse=True)) or r"(?!)")
    home = os.path.expanduser("~")

    def clean(text: str) -> str:
        text = _TOKEN.sub("<redacted>", pattern.sub("<redacted>", text))
        return re.sub(re.escape(home) + r"(?=/|\b)", "~", text) if len(home) > 1 else text

    return clean


def _number(*names: str) -> Optional[int]:
    """Return the first of these variables of the environment that is a number, else None."""
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else cls.__name__


def _text(value: Any) -> str:
    try:
        return "" if value is None else str(value)
    except Exception as error:  # of the job's own class
        return f"<no text: {type(error).__name__}>"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _cut(text: str, room: int) -> str:
    """Return beginning and end of a long text."""
    half = room // 2
    return text if len(text) <= room else f"{text[:half]}\n…\n{text[-half:]}"


HEADLINE_CHARS = 200
# thread -> status, frames
_asked: dict[int, tuple[Any, Sequence[Any]]] = {}


def record_exit_calls() -> None:
    """Listen to `sys.exit`. To be called once."""
    global _asked
    _asked = getattr(sys.exit, "asked", _asked)


def requested_exit() -> tuple[Any, Sequence[Any]]:
    """Return what this thread gave to `sys.exit` last, and the frames that called it."""
    return _asked.get(get_ident(), (None, ()))


def end_summary() -> tuple[int, str]:
    """Return the exit code and, where an error ends the process, what it is.

    The code is the one that was asked for last, 0 where none was.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        status, _ = requested_exit()
        return _code(status), (status if isinstance(status, str) else "")
    return (-2 if isinstance(error, KeyboardInterrupt) else 1), _line(error)


def _line(error: BaseException) -> str:
    """Return an error in one line, with the innermost place of the job's own code."""
    headline = (str(error).strip().splitlines() or [""])[0][:HEADLINE_CHARS]
    location = error_location(error)
    text = f"{type(error).__name__}: {headline}" if headline else type(error).__name__
    return f"{text} ({location})" if location else text


def _code(status: Any) -> int:
    """Return the exit code that Python makes of what `sys.exit` was given."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1
