"""Static check of a training script: its loop, its library and its checkpoints.

Nothing is run or imported. What cannot be told from the text is called unknown: the run says it in
its first minute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoints.discovery import matches
from ..core.analysis.job_recipes import Recipe, of_code
from ..core.analysis.script_code import ScriptCode

MAX_BYTES = 2 << 20
DRIVING = ("Trainer", "Lightning", "litgpt", "torchtitan", "OLMo-core")  # their own code loops
UNKNOWN = "the first minute of the run says what a rollback can do"
_SAVES = re.compile(r"save(_state|_checkpoint|_pretrained|_model|_file)?")
_SAVERS = ("torch", "fabric", "accelerator", "dcp", "checkpointer", "manager", "model", "engine")
_OPTIMIZER = re.compile(r"opt|scaler|adam|sgd|muon|lion|adafactor", re.I)
Loop = ast.For | ast.AsyncFor | ast.While


@dataclass
class ScriptFacts:
    """What is known of a job before it runs.

    Attributes:
        name: of the script's file, "" if the command names none.
        loops: `(while or for, line)` of the statements that the updates are made in.
        saves: lines on which a checkpoint may be saved.
        existing: how many files match the recipe's pattern already.
    """

    name: str = ""
    recipe: Recipe | None = None
    loops: list[tuple[str, int]] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    existing: int = 0

    def loop(self) -> tuple[bool, str]:
        """Return whether a rollback may take the loop back, and the sentence about it."""
        library = self.recipe.name if self.recipe else ""
        if library in DRIVING and not self.loops:
            return False, f"{library} runs it: a rollback restores the weights, the loop goes on"
        if not self.loops:
            where = f"{self.name} makes no update that can be seen" if self.name else "no script"
            return False, f"{where}: {UNKNOWN}"
        kinds = dict.fromkeys(kind for kind, _ in self.loops)
        places = ", ".join(f"`{kind}` at {self.name}:{line}" for kind, line in self.loops)
        if "for" in kinds:
            return False, f"{places}: a rollback restores the weights, the loop goes on"
        return True, f"{places}: a rollback takes it back too, where its variables can be copied"

    def checkpoints(self) -> tuple[bool, str]:
        """Return whether the job can be started again from one, and the sentence about it."""
        found = self.recipe
        if found is None:
            saved = f"saved at {self.name}:{self.saves[0]}; " if self.saves else "none seen; "
            return False, f"{saved}nothing says how the job resumes: see job.relaunch"
        if not found.works:
            return False, f"{found.name}: {found.note}"
        how = "" if found.resume == "library" else " ".join(found.args)
        itself = "from what it saves itself" if found.resume == "library" else "by itself"
        parts = [f"{found.name}: resumes {f'by {how}' if how else itself}"]
        if found.glob:
            parts.append(f"{found.glob}, {self.existing} there now")
        elif found.name not in DRIVING and not self.saves:
            return False, f"{parts[0]}; no save is seen in {self.name}"
        return True, "; ".join([*parts, *([found.note] if found.note else [])])


def look_at(script: str | None, argv: Sequence[str]) -> ScriptFacts:
    """Return what the script (None: the command names none) and the command say."""
    text = ""
    if script is not None:
        try:
            with Path(script).open("rb") as file:
                text = file.read(MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            text = ""
    code = ScriptCode(text)
    recipe = of_code(code, argv)
    found = ScriptFacts(Path(script).name if script else "", recipe)
    if recipe is not None and recipe.glob:
        found.existing = len(matches([recipe.glob], Path.cwd()))
    tree, calls = code.tree, code.calls
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    loops: dict[Loop, None] = {}
    for call in calls:
        if _updates(call, tree):
            loops |= dict.fromkeys(_around(call, parents, calls, set()))
    found.loops = [("while" if isinstance(o, ast.While) else "for", o.lineno) for o in loops]
    found.saves = sorted(call.lineno for call in calls if _saves(call))
    return found


def _updates(call: ast.Call, tree: ast.Module) -> bool:
    """Return whether a call is the step of an optimizer, by the names in it."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "step"):
        return False
    owner = ast.unparse(call.func.value)
    if re.search(r"sched|prof|env\b", owner, re.I):
        return False
    return bool(_OPTIMIZER.search(owner)) or owner in _made(tree)


def _made(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are given what looks like an optimizer."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Call) and _OPTIMIZER.search(ast.unparse(value.func)):
            assert isinstance(node, ast.Assign)
            yield from map(ast.unparse, node.targets)


def _saves(call: ast.Call) -> bool:
    """Return whether a call saves a checkpoint, by the names in it."""
    func = call.func
    if isinstance(func, ast.Name):
        return bool(re.fullmatch(r"save(_\w+)?", func.id))
    if not (isinstance(func, ast.Attribute) and _SAVES.fullmatch(func.attr)):
        return False
    owner = ast.unparse(func.value).lower()
    return func.attr != "save" or any(owner.endswith(name) for name in _SAVERS)


def _around(
    node: ast.AST, parents: dict[ast.AST, ast.AST], calls: list[ast.Call], seen: set[str]
) -> Iterator[Loop]:
    """Yield the loops that drive a call: of its function, else of those that call the function.

    One `for` is enough to keep the loop where it is; a `while` inside a `for` counts as that.
    """
    inside: list[Loop] = []
    while node in parents:
        child, node = node, parents[node]
        if isinstance(node, Loop) and child in node.body:
            inside.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
    if inside:
        yield next((loop for loop in inside if not isinstance(loop, ast.While)), inside[0])
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in seen:
        for call in calls:
            if ast.unparse(call.func).rpartition(".")[2] == node.name:
                yield from _around(call, parents, calls, {*seen, node.name})
