"""A policy for runs that are trials: it judges and acts as the real one, and reaches nobody."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.model.policy import Policy
from ..document import yaml_writer
from .freeze import document, policy
from .policy_loader import compose

# People are neither told nor asked. The job is one launch: a recipe starts the real run again.
LEFT_OUT = ("notify", "approvals")
LEFT_OUT_OF_JOB = ("relaunch", "on_crash", "preempt")


@dataclass(frozen=True, slots=True)
class Isolated:
    """A policy for trials.

    Attributes:
        policy: the whole one.
        text: YAML of what is left; each rule has the digest that it has in `policy`.
        left_out: keys that were given and are not in `text`, as "job.relaunch".
    """

    policy: Policy
    text: str
    left_out: tuple[str, ...]


def isolated(name_or_path: str) -> Isolated:
    """Load a policy, and leave out what would reach people or start a job again.

    Raises:
        PolicyErrors, InputError: as `load_policy`.
    """
    draft = compose(name_or_path)
    whole = document(draft)
    console = whole.get("notify", {}).keys() <= {"console"}
    left_out = [name for name in LEFT_OUT if whole.pop(name, None)]
    if console and "notify" in left_out:
        left_out.remove("notify")
    left_out += [f"job.{name}" for name in LEFT_OUT_OF_JOB if whole["job"].pop(name, None)]
    return Isolated(policy(draft), yaml_writer.dump(whole), tuple(left_out))
