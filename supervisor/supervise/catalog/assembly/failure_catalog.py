"""The classes of failures that count under a policy: its own, then those that are shipped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Mapping as AbstractMapping
from dataclasses import asdict
from functools import cache
from typing import Any

from ...core.analysis.failure_classes import FailureClass
from ..document import yaml_reader
from ..document.diagnostics import Problems
from ..document.nodes import Mapping
from ..forms.failure_form import FailuresFile
from ..forms.file_forms import PolicyFile
from ..inventory import shipped
from ..schema.dataclass_types import read_form

FOLDER, NAME = "policies/failures", "classes"


def classes(own: Iterable[AbstractMapping[str, Any]] = ()) -> tuple[FailureClass, ...]:
    """Return the classes in the order in which they are tried.

    Args:
        own: `job.failures` of the policy, as plain data.
    """
    return (*(FailureClass(**each) for each in own), *_shipped())


@cache
def _shipped() -> tuple[FailureClass, ...]:
    path = shipped.find(FOLDER, NAME)
    assert path is not None, "classes.yaml is part of this distribution"
    problems = Problems()
    root = yaml_reader.read(path, shipped.label(path), problems)
    assert root is not None
    form: FailuresFile = read_form(FailuresFile, root, problems, "")
    problems.stop()
    return tuple(FailureClass(**asdict(each)) for each in form.failures)


def check(root: Mapping, form: PolicyFile, problems: Problems) -> None:
    """Every pattern of `job.failures` is a regular expression."""
    for each in form.job.failures:
        for pattern in (*each.match, *each.logs):
            try:
                re.compile(pattern)
            except re.error as error:
                what = f"job.failures: {each.id}: {pattern!r} is no regular expression"
                problems.add(root.place("job"), f"{what}: {error}")
