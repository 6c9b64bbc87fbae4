"""Actions in words, with what was observed of them, and what they cost. Text and numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...core.model import format_actions

Part = Mapping[str, Any]

QUIET = frozenset(("snapshot", "notify", "verify", "check_weights"))  # they change nothing


def did(actions: Sequence[Part], *, verified: bool) -> list[str]:
    """Return what was done, in order; a pause and its end are one.

    Args:
        verified: the training went on as ordered, so that a re-warm was completed.
    """
    found: list[str] = []
    paused = False
    for n, action in enumerate(actions):
        verb, ok = action["verb"], action["ok"]
        if verb == "notify" or (verb == "resume" and ok and not action["undo"] and paused):
            continue
        paused |= bool(verb == "pause" and ok)
        later = _end_of_pause(actions[n:]) if verb == "pause" and ok else None
        text = _succeeded(later or action) if ok else _failed(action)
        text = f"undo: {text}" if action["undo"] and verb != "resume" else text
        if ok and (ramp := _rewarm(action["args"].get("rewarm"), verified=verified)):
            text += ramp
        if text not in found[-1:]:
            found.append(text)
    return found


def _end_of_pause(later: Iterable[Part]) -> Part | None:
    return next((one for one in later if one["verb"] == "resume" and one["ok"]), None)


def _failed(action: Part) -> str:
    name = action["verb"].replace("_", " ")
    if action["ok"] is False:
        why = str(action["outcome"]).partition(" failed: ")[2] or action["outcome"]
        return f"{name} FAILED: {why}"
    if action["outcome_record"] is not None:
        return f"{name}: no answer, so its effect is unknown"
    return f"{name} under way"


def _succeeded(action: Part) -> str:
    form = DONE.get(action["verb"])
    if form is not None:
        return form(action)
    return format_actions.describe(action["verb"], action["args"])


def _snapshot(action: Part) -> str:
    missing = len(action["result"].get("missing", ()))
    parts = "1 part" if missing == 1 else f"{missing} parts"
    return f"evidence saved{f' ({parts} missing)' if missing else ''}"


def _rollback(action: Part) -> str:
    return f"weights of step {action['result'].get('step', '?')} restored; the loop went on"


def origin(action: Part) -> int:
    """Return the step at which a rollback or relaunch was ordered: it left from there."""
    return int(action["result"].get("from_step", action["step"]))


def _relaunch(action: Part) -> str:
    of_step = f"the checkpoint of step {action['args'].get('step', '?')}"
    if action["result"].get("resumed") is False:
        return f"started again, NOT from {of_step}: it trains from its own start"
    return f"started again from {of_step}"


def _rewarm(rewarm: Any, *, verified: bool) -> str:
    steps = rewarm.get("steps") if isinstance(rewarm, Mapping) else None
    if not steps:
        return ""
    return (
        f" · lr re-warmed over {steps} steps" if verified else f" (lr to re-warm in {steps} steps)"
    )


def _resume(action: Part) -> str:
    held = action["result"].get("held_s")
    return f"paused {held:.1f} s" if isinstance(held, (int, float)) else "paused and resumed"


def _hold_rate(action: Part) -> str:
    args = action["args"]
    if "limit" in args:
        return f"lr held at {args['limit']:.3g} at most ({args['harmful']:.3g} did the harm)"
    return "learning rate free again" if args.get("lift") else "learning rate held"


def _quarantine(action: Part) -> str:
    names = [str(one.get("name")) for one in action["args"].get("add", ())]
    return f"left out {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}"


DONE: Mapping[str, Callable[[Part], str]] = {
    "pause": lambda action: f"paused since step {action['result'].get('paused_step', '?')}",
    "resume": _resume,
    "snapshot": _snapshot,
    "savepoint": lambda action: "savepoint written",
    "rollback": _rollback,
    "relaunch": _relaunch,
    "stop": lambda action: "job stopped",
    "lr_scale": lambda action: f"learning rate × {action['args'].get('value')}",
    "hold_rate": _hold_rate,
    "skip_step": lambda action: f"{action['args'].get('count')} updates skipped",
    "quarantine": _quarantine,
    "check_weights": lambda action: (
        "weights compared on the probe batch"
        if "loss" in action["result"]
        else "the weights could not be judged"
    ),
    "profile": lambda action: "profile taken",
}


def would(suppressed: Iterable[Part]) -> tuple[str, str] | None:
    """Return `(mode, plan)` of the newest runbook that a mode kept from running, None for none."""
    found = None
    for one in suppressed:
        mode = one["by"].removeprefix("mode:")
        if mode == one["by"] or not one["runbook"]:
            continue
        plan = ", ".join(s["verb"] for s in one["would"] if s["verb"] not in QUIET)
        found = mode, f"{one['runbook']} ({plan})" if plan else one["runbook"]
    return found


def cost(actions: Iterable[Part], skipped: int = 0) -> dict[str, Any]:
    """Return the steps to repeat, those lost to a loop that went on, seconds of pauses, updates
    skipped, and relaunches."""
    found: dict[str, Any] = {
        "steps_repeated": 0,
        "steps_lost": 0,
        "paused_s": 0.0,
        "skipped": skipped,
        "relaunches": 0,
    }
    for action in actions:
        if not action["ok"]:
            continue
        verb, result, args = action["verb"], action["result"], action["args"]
        if verb == "rollback" and isinstance(result.get("step"), int):
            found["steps_lost"] += max(0, origin(action) - result["step"])
        elif verb == "relaunch" and isinstance(args.get("step"), int):
            found["steps_repeated"] += max(0, origin(action) - args["step"])
            found["relaunches"] += 1
        elif verb == "resume" and isinstance(result.get("held_s"), (int, float)):
            found["paused_s"] += float(result["held_s"])
        elif verb == "skip_step":
            found["skipped"] += int(args.get("count") or 0)
    return found


def budgets(used: Mapping[str, Any], actions: Iterable[Part]) -> list[str]:
    """Return "1 of 2 rollbacks used" for each budget that an action counted in, but for `all`."""
    found = []
    names = {
        name for one in actions if one["touches_job"] for name in (one["verb"], one["runbook"])
    }
    for name, text in used.items():
        spent, _, most = str(text).partition("/")
        if name in names and most and spent != "0":
            plural = "" if most == "1" else "s"
            found.append(f"{spent} of {most} {name.replace('_', ' ')}{plural} used")
    return found
