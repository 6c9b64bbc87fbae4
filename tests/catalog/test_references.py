"""Whatever one place of a policy says of another is checked, with what was probably meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from supervise.catalog import Problem, check_file
from supervise.core import fill_recipe
from supervise.core.model import PLACEHOLDERS

from .conftest import pointed

HEAD = """\
version: supervise/v1
mode: enforce
use: [hang]
budgets: {all: {max: 3}, restart: {max: 2}}
"""
BACK = "job: {on_crash: restart, relaunch: "
MOVES = """\
machine:
  any: {run: acting, hold: holding, exited: halted}
  launching: {first_frame: warming}
  warming: {ready: nominal}
  nominal: {notice: suspect}
  suspect: {clear: nominal}
  acting: {verified: probation}
  probation: {passed: nominal}
  holding: {released: warming}
"""


@pytest.fixture
def check(tmp_path: Path) -> Callable[[str], tuple[list[str], list[str]]]:
    """Return a function from a policy's text to its errors and its warnings."""

    def told(problems: tuple[Problem, ...]) -> list[str]:
        return [f"{p.line}:{p.col}: {p.message} ({p.hint})" for p in problems]

    def check(text: str) -> tuple[list[str], list[str]]:
        (tmp_path / "p.yaml").write_text(text, "utf-8")
        found = check_file(str(tmp_path / "p.yaml"))
        return told(found.errors), told(found.warnings)

    return check


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "job: {on_crash: ¦restart}",
            "restart starts the job again, but the policy does not say how (add relaunch: {args: "
            "[...]} to job)",
        ),
        (
            BACK + "{args: ['--resume=¦{chekpoint}']}}",
            "job.relaunch.args[0]: no placeholder '{chekpoint}' (did you mean '{checkpoint}'?)",
        ),
        (
            "override:\n  hang.stalled: {¦aftr: {min: 30s}}",
            "hang.stalled has no key 'aftr' (did you mean 'after'?)",
        ),
    ],
)
def test_a_name_that_means_nothing_is_an_error_with_a_hint(check, line, said):
    """At the place where it stands, with the name that was probably meant."""
    text, [spot] = pointed(f"{HEAD}{line}\n")

    errors, _ = check(text)

    assert errors == [spot + said]


@pytest.mark.parametrize(
    "line",
    [
        "job: {on_crash: page-with-evidence}",
        BACK + "{}}",
        BACK + "{args: ['--resume={checkpoint}', '{directory}/{step}']}}",
        BACK + """{args: ['--with={"a": 1}', '{}', '${now:%Y}', '${HOME}', '{{rank}}']}}""",
        "override:\n  hang.stalled: {grace: {eval: 30s, exiting: 10s}}",
        "planned: [{from: 10, to: 50, what: learning_rate, expect: up}]",
        "planned: [{from: 10, to: 50, what: a new mix of data}]",
        "notify: {heartbeat: {url_env: HC, every: 15s}}",
        MOVES.replace("any: {", "any: {session_started: warming, "),
        MOVES.replace("probation: {", "probation: {session_started: warming, "),
    ],
)
def test_what_has_a_meaning_is_left_alone(check, line):
    """No errors, no warnings; braces that are the job's own stay as they are."""
    assert check(f"{HEAD}{line}\n") == ([], [])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "¦" + MOVES + "  halted: {session_started: halted}",
            "machine: no state has a transition for 'session_started' (another training in "
            "the same launch would start in the state of the last one; "
            "add any: {session_started: warming})",
        ),
        (
            "notify: {heartbeat: {url_env: HC, every: ¦5s}}",
            "notify.heartbeat: a ping every 5 s: services refuse more than 5 a minute (every: 60s)",
        ),
        (
            "notify: {heartbeat: {url_env: HC, every: ¦2h}}",
            "notify.heartbeat: a ping every 7200 s: a dead run is noticed only after that"
            " (every: 60s)",
        ),
        (
            "approvals: {all: {timeout: ¦9m}}",
            "approvals.all: 540 s to answer is less than 10 min (timeout: 15m)",
        ),
    ],
)
def test_what_is_odd_is_a_warning(check, line, said):
    """Moves that are missing are allowed."""
    text, [spot] = pointed(f"{HEAD}{line}\n")

    errors, warnings = check(text)

    assert (errors, [w for w in warnings if "never used" not in w]) == ([], [spot + said])


def test_every_placeholder_is_filled_in():
    """What the check takes is what a launch puts the checkpoint's values for."""
    text = "|".join(f"{{{name}}}" for name in PLACEHOLDERS)

    assert fill_recipe(text, "/a/b.pt", 41) == "/a/b.pt|/a|42"
