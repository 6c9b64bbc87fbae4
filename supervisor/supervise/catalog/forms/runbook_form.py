"""The form of a runbook: its steps, and what the person on call should know.

`steps`, `verify`, `if_it_fails` and `if_refused` are executed; everything else is for people, and
is linked in each message of an incident. The other forms are in `file_forms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ..schema.field_types import Doc, OneOf, Pattern
from .part_types import KeysOf, StepType

RUNBOOK = "[a-z][a-z0-9-]{0,63}"
RunbookName = Annotated[
    str,
    Pattern(RUNBOOK, "a runbook's name, in lower case, such as rollback-and-rewarm"),
]
Version = Annotated[Literal["supervise/v1"], Doc("of the language")]
OneStep = Annotated[Any, StepType()]
Lines = tuple[str, ...]


@dataclass(frozen=True)
class LocalizeForm:
    """Four areas where a cause can be; each list begins with the cheapest check."""

    optimization: Annotated[Lines, Doc("learning rate, batch size, moments, precision")] = ()
    model: Annotated[Lines, Doc("attention, activations, routing")] = ()
    data: Annotated[Lines, Doc("batches, mixture, order, tokenizer")] = ()
    hardware: Annotated[Lines, Doc("devices, network, storage, the machine")] = ()

    def lists(self) -> Mapping[str, Lines]:
        """Return the lists that are not empty, by area."""
        found = vars(self).items()
        return {place: lines for place, lines in found if lines}


Meaning = Annotated[str, Doc("what has happened when this runs")]
Impact = Annotated[str, Doc("what it costs the run")]
Handles = Annotated[Lines, Doc("ids of the metrics that it is for")]
Evidence = Annotated[Lines, Doc("what to look at in the evidence bundle")]
Containment = Annotated[Lines, Doc("what keeps it from getting worse until the cause is known")]
StepList = Annotated[tuple[OneStep, ...], Doc("actions, in order")]
Verify = Annotated[
    Any, OneOf((KeysOf("verify"),), nullable=True), Doc("the last step: how the effect is verified")
]
Replay = Annotated[Lines, Doc("how to reproduce it, away from the run")]
OverWhen = Annotated[Lines, Doc("what must be true before a person closes it")]
IfItFails = Annotated[RunbookName, Doc("runbook to run when a step fails, or hold")]
IfRefused = Annotated[RunbookName | None, Doc("runbook that runs instead when a step is refused")]
Diagnose = Annotated[Lines, Doc("questions for the person on call, in this order")]
Localize = Annotated[LocalizeForm, Doc("where to look, in each of four areas")]
NO_AREAS = LocalizeForm()


@dataclass(frozen=True, kw_only=True)
class RunbookForm:
    """A runbook inside a policy."""

    meaning: Meaning = ""
    impact: Impact = ""
    handles: Handles = ()
    evidence: Evidence = ()
    containment: Containment = ()
    steps: StepList
    verify: Verify = None
    probe_replay: Replay = ()
    over_when: OverWhen = ()
    if_it_fails: IfItFails = "hold"
    if_refused: IfRefused = None
    diagnose: Diagnose = ()
    localize: Localize = NO_AREAS


@dataclass(frozen=True, kw_only=True)
class RunbookFile:
    """runbooks/<name>.yaml: the same, explained."""

    version: Version
    runbook: Annotated[RunbookName, Doc("the file's own name")]
    meaning: Meaning
    impact: Impact
    handles: Handles = ()
    evidence: Evidence = ()
    containment: Containment = ()
    steps: StepList
    verify: Verify = None
    probe_replay: Replay = ()
    over_when: OverWhen = ()
    if_it_fails: IfItFails = "hold"
    if_refused: IfRefused = None
    diagnose: Diagnose
    localize: Localize = NO_AREAS
