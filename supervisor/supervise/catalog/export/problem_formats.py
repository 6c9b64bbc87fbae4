"""Problems in the formats of other programs: workflow commands of GitHub Actions, JSON."""

from __future__ import annotations

from typing import Any

from ..document.diagnostics import Problem


def github(problem: Problem, level: str) -> str:
    """Return a workflow command that marks the place in a pull request."""
    text = problem.message + (f" ({problem.hint})" if problem.hint else "")
    where = {"file": problem.path, "line": str(problem.line), "col": str(problem.col)}
    marks = ",".join(f"{key}={_property(value)}" for key, value in where.items())
    return f"::{level} {marks}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def plain(problem: Problem) -> dict[str, Any]:
    """Return the fields of a problem for JSON; line and column count from 1."""
    return {
        "file": problem.path,
        "line": problem.line,
        "col": problem.col,
        "message": problem.message,
        "hint": problem.hint,
    }
