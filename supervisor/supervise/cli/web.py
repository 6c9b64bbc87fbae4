"""`supervise web`: the page of all runs of a directory, served to one person's browser."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import click

from ..errors import StoreError, UsageError
from ..store import files
from ..store.run_directory import RUNS, is_run
from ._output import echo, reserve_stdout
from ._runs import NO_RUN, find_run

PORT, TRIED_PORTS = 8787, 50
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN_BYTES, SHORTEST_TOKEN = 24, 16
NEEDED = ("starlette", "uvicorn", "numpy", "h11", "anyio")


@click.command(name="web")
@click.argument("runs", type=click.Path(path_type=Path), metavar="[RUNS]", default=RUNS)
@click.option(
    "--port", type=click.IntRange(1, 65535), help=f"Default: {PORT}, or the next free one."
)
@click.option(
    "--host",
    default=LOOPBACK[0],
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on.",
)
@click.option("--i-know", is_flag=True, help="Allow a --host beyond this machine, without TLS.")
@click.option(
    "--uds",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Serve on a unix socket that only you can open, without a token.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Also answer to this host name; repeatable.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep the token in FILE, so that links stay valid after a restart.",
)
@click.option("--no-token", is_flag=True, help="Let every user of this machine read the runs.")
@click.option("--write", is_flag=True, help="Allow commands to the runs, with a second token.")
@click.option("--by", metavar="NAME", help="Operator's name for commands. Default: your login.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the curves. Default: ~/.cache/supervise.",
)
@click.option(
    "--export",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the page of the run RUNS to one HTML file, and serve nothing.",
)
def web_command(
    runs: Path, write: bool, by: str | None, cache: Path | None, target: Path | None, **network: Any
) -> int:
    """Show all runs of a directory in a browser.

    The page shows what needs you first, then every run. Of each run it has the live curves with the
    actions marked in them, the incidents, rules, ranks and checkpoints. RUNS is a directory of runs
    (default: ./runs), or one run. Nothing is written into the runs, and the page loads nothing from
    other servers. The address contains a token; `kill -USR1` prints it again. From another machine
    use the printed `ssh -L` command.

    \b
    Examples:
      supervise web
      supervise web --uds ~/page.sock /data/runs
      supervise web --export page.html runs/20260105-101112-7f3a9c

    Needs: pip install 'supervise-train[web]'.

    Exit codes: 0; 64 no such directory or run, wrong usage, or a package is missing.
    """
    directory, only = _runs_of(runs)
    server = _server()
    settings = server.Settings(
        directory=directory,
        only=only,
        write_token=secrets.token_urlsafe(TOKEN_BYTES) if write else "",
        by=by or getpass.getuser(),
        cache=cache,
    )
    if target is None:
        _serve(server, settings, Network(**network))
    elif only is None:
        raise UsageError("--export is for one run", hint="supervise web runs/NAME --export FILE")
    else:
        _export(server.Page(settings), only, target)
    return 0


@dataclass(frozen=True)
class Network:
    """Where the page is served, and to whom; the fields are the options."""

    host: str
    port: int | None
    i_know: bool
    uds: Path | None
    allow_host: tuple[str, ...]
    token_file: Path | None
    no_token: bool


def _runs_of(path: Path) -> tuple[Path, str | None]:
    """Return the directory of runs, and the one run that is named. Raises StoreError."""
    if not is_run(path) and not path.is_dir() and path != RUNS:
        path = find_run(str(path))
    if is_run(path):
        return path.absolute().parent, path.absolute().name
    if not path.is_dir():
        raise StoreError(f"there is no directory {path}", hint=NO_RUN)
    return path.absolute(), None


def _serve(server: ModuleType, settings: Any, network: Network) -> None:
    """Serve until a signal. Raises UsageError."""
    host, uds = network.host, network.uds
    is_local = host in LOOPBACK or uds is not None
    if not is_local and not network.i_know:
        raise UsageError(
            f"{host} is not the loopback, and there is no TLS: the token could be read on the way",
            hint=f"ssh -L {PORT}:127.0.0.1:{PORT} {socket.gethostname()}, or add --i-know",
        )
    token = "" if network.no_token or uds is not None else _token(network.token_file)
    listener = _bind_path(uds) if uds is not None else _bind(host, network.port)
    lines = _addresses(listener, uds, token, os.environ)
    if not is_local:
        lines.append("there is no TLS: who reads the network reads the token")
    if not token and uds is None:
        lines.append("there is no token: every user of this machine can read these runs")
    if settings.write_token:
        lines.append(f"second token, for commands: {settings.write_token}")
    outer = [] if uds is not None else _outer_hosts(os.environ, listener.getsockname()[1])
    names = [*network.allow_host, *outer, *([] if is_local else [host])]
    os.nice(10)
    server.serve(settings, listener, token, names, lambda: echo(*lines, err=True))
    if uds is not None:
        uds.unlink(missing_ok=True)


def _server() -> ModuleType:
    """Return the module of the server. Raises UsageError: a package is missing."""
    # By name, as commands are imported: the page stands on the commands, whose facts it shows.
    try:
        return import_module("supervise.web.server")
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        raise UsageError(
            f"the page needs the package {missing!r}", hint="pip install 'supervise-train[web]'"
        ) from None


def _export(page: Any, run: str, target: Path) -> None:
    raw = (
        import_module("supervise.web.export")
        .export_page(*page.curves(run, is_limited=False))
        .encode()
    )
    page.close()
    try:
        with files.replacing_file(target.absolute(), shared=True) as file:
            file.write(raw)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}") from error
    with reserve_stdout((target,)):
        echo(f"{target}: {len(raw) / 1e3:.0f} kB; it opens without a server")


def _token(path: Path | None) -> str:
    """Return a new token, or that of a file, which is made where there is none."""
    fresh = secrets.token_urlsafe(TOKEN_BYTES)
    if path is None:
        return fresh
    try:
        if not path.exists():
            files.replace_file(path.absolute(), f"{fresh}\n".encode(), durable=True)
        token = files.read_file(path, limit=4096).decode().strip()
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot use {path}: {error}") from error
    if path.stat().st_mode & 0o077:
        raise UsageError(f"others can read {path}", hint=f"chmod 600 {path}")
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{path} holds no token of {SHORTEST_TOKEN} characters or more", hint=f"rm {path}"
        )
    return token


def _bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port the next free one from PORT on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for candidate in [port] if port is not None else range(PORT, PORT + TRIED_PORTS):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            problem = error
    reason = "" if problem is None else problem.strerror
    raise UsageError(f"cannot listen on {host}: {reason}", hint="supervise web --port 9000")


def _bind_path(path: Path) -> socket.socket:
    """Return a listening unix socket that only its owner can open."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        if path.is_socket():  # of an earlier start
            path.unlink()
        listener.bind(str(path))
        listener.listen(64)
    except OSError as error:
        raise UsageError(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)
    return listener


def _addresses(
    listener: socket.socket, uds: Path | None, token: str, environ: Mapping[str, str]
) -> list[str]:
    """Return the lines that say how to open the page."""
    host = socket.gethostname()
    if uds is not None:
        return [
            f"page on {uds}; from your own machine:",
            f"  ssh -L {PORT}:{uds.absolute()} {host}   then open http://127.0.0.1:{PORT}/",
        ]
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    query = f"?token={token}" if token else ""
    lines = [
        f"http://{shown}:{port}/{query}",
        f"from your own machine:  ssh -L {port}:127.0.0.1:{port} {host}   then open the line above",
    ]
    if proxy := environ.get("VSCODE_PROXY_URI"):
        lines.append(f"in code-server: {proxy.replace('{{port}}', str(port))}{query}")
    if prefix := environ.get("JUPYTERHUB_SERVICE_PREFIX"):
        lines.append(f"in JupyterHub: {prefix}proxy/{port}/{query}")
    return lines


def _outer_hosts(environ: Mapping[str, str], port: int) -> list[str]:
    """Return the names under which a proxy of this session asks."""
    names = ("VSCODE_PROXY_URI", "JUPYTERHUB_PUBLIC_URL")
    urls = [environ.get(name, "").replace("{{port}}", str(port)) for name in names]
    return [name for url in urls if (name := urlsplit(url).hostname)]
