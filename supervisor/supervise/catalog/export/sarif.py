"""Problems in the formats of other programs: SARIF 2.1.0, workflow commands, JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from ..document.diagnostics import Problem

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = {
    "policy-error": ("error", "Something in a policy, pack, runbook or test file is wrong."),
    "policy-warning": ("warning", "Something is odd, and allowed."),
}


def sarif(errors: Iterable[Problem], warnings: Iterable[Problem], version: str) -> dict[str, Any]:
    """Return a SARIF log with one run; columns count characters from 1."""
    results = [_result("policy-error", problem) for problem in errors]
    results += [_result("policy-warning", problem) for problem in warnings]
    rules = [
        {
            "id": name,
            "shortDescription": {"text": text},
            "defaultConfiguration": {"level": level},
        }
        for name, (level, text) in RULES.items()
    ]
    driver = {"name": "supervise policy check", "version": version, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(rule: str, problem: Problem) -> dict[str, Any]:
    place = {
        "artifactLocation": {"uri": quote(problem.path.replace("\\", "/"), safe="/:")},
        "region": {"startLine": problem.line, "startColumn": problem.col},
    }
    return {
        "ruleId": rule,
        "ruleIndex": list(RULES).index(rule),
        "level": RULES[rule][0],
        "message": {"text": sentence(problem)},
        "locations": [{"physicalLocation": place}],
    }


def github(problem: Problem, level: str) -> str:
    """Return a workflow command that marks the place in a pull request."""
    where = {"file": problem.path, "line": str(problem.line), "col": str(problem.col)}
    marks = ",".join(f"{key}={_property(text)}" for key, text in where.items())
    return f"::{level} {marks}::{_data(sentence(problem))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sentence(problem: Problem) -> str:
    """Return the sentence with its hint, without the place."""
    return problem.message + (f" ({problem.hint})" if problem.hint else "")


def plain(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON holds it."""
    return {
        "file": problem.path,
        "line": problem.line,
        "col": problem.col,
        "message": problem.message,
        "hint": problem.hint,
    }
