"""Fixtures of all tests; helpers are in `tests/support`."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import probed_job, receivers, recorded_run

# A shell ignores these for what it starts in the background, and our jobs would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# The same examples each time, so that a failure belongs to a change; `make fuzz` draws new ones.
settings.register_profile("busy machine", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("unit lane", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=500)
settings.load_profile("busy machine")


# `make unit`, `make integration`, ... run one lane each.
LANES = {"e2e": "journeys", "matrix": "matrix"}
HERE = Path(__file__).parent
SLOW = {HERE / folder for folder in ("e2e", "matrix", "probe/live")}
# Files of quick tests that start processes or compute for seconds: a third of what all cost.
INTEGRATION = {
    HERE / folder / f"test_{name}.py"
    for folder, names in (
        ("checkpoints", "ownership"),
        ("cli", "init streams terminal_width"),
        ("data", "corpus gate numbers"),
        ("fuzz", "corpus"),
        ("inputs", "ways_to_die"),
        ("job", "fencing idleness launch process signals terminal"),
        ("notifiers", "console"),
        ("offline", "bounds"),
        ("outputs", "evidence stacks"),
        ("store", "hostile"),
        ("trials", "significance"),
        ("web", "curves list page pyramid security"),
        ("", "children"),
    )
    for name in names.split()
}


def pytest_configure(config: pytest.Config) -> None:
    """Hide torch from the lane that must not need it, and look at fewer examples there."""
    if config.option.markexpr == "unit":
        settings.load_profile("unit lane")
        sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` raises


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of the unit lane what has none of its tests: importing it takes seconds."""
    is_left_out = collection_path in SLOW or collection_path in INTEGRATION
    return (config.option.markexpr == "unit" and is_left_out) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its lane: by its folder, else by whether it is slow."""
    for item in items:
        if item.path.parent in SLOW:
            item.add_marker("slow")
        lane = LANES.get(item.nodeid.split("/", 2)[1])
        if lane is None:
            is_unit = item.path not in INTEGRATION and not item.get_closest_marker("slow")
            lane = "unit" if is_unit else "integration"
        if not item.get_closest_marker("chaos"):
            item.add_marker(lane)


def pytest_collection_finish() -> None:
    """Collect less garbage: each time, millions of objects of pytest's own would be visited."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def isolated_index_of_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Leave alone the index of runs of whoever runs the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def make_frames() -> Callable[..., list[Any]]:
    """See `recorded_run.make_frames`."""
    return recorded_run.make_frames


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(recorded_run.SMALL)
    return path


@pytest.fixture
def keep_run(tmp_path: Path, small: Path) -> Callable[..., Any]:
    """A function that judges events as the supervisor does: see `recorded_run.record_run`."""

    def keep(
        events: Iterable[Any], *, policy: Path = small, name: str = "run", **options: Any
    ) -> Any:
        return recorded_run.record_run(tmp_path / name, events, policy=policy, **options)

    return keep


@pytest.fixture
def no_threads() -> Iterator[None]:
    """The limit of threads: from here on `can't start new thread`."""
    before = threading.stack_size(1 << 50)  # more memory than there can be, for each
    yield
    threading.stack_size(before)


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("job")


@pytest.fixture
def launch(make_folder):
    def run(script, *argv, folder=None, **options):
        return probed_job.launch(folder or make_folder(), script, *argv, **options)

    return run


@pytest.fixture
def receiver():
    """A function that starts a real receiver; it returns `(url, what was received)`."""
    with contextlib.ExitStack() as stack:

        def start(code: int) -> tuple[str, list[tuple[str, Any]]]:
            hook = stack.enter_context(receivers.http_server())
            hook.answers = [(code, {}, b"")]
            return hook.url.removesuffix(receivers.SECRET_PATH), hook.received

        yield start
