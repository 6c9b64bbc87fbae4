"""Static check of a training script: its library and its checkpoints.

Nothing is run or imported. What cannot be told from the text is called unknown: the run says it in
its first minute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoints.discovery import matches
from ..core.analysis.job_recipes import Recipe, of_code
from ..core.analysis.script_code import ScriptCode

MAX_BYTES = 2 << 20
DRIVING = ("Trainer", "Lightning", "litgpt", "torchtitan", "OLMo-core")  # their own code loops
_SAVES = re.compile(r"save(_state|_checkpoint|_pretrained|_model|_file)?")
_SAVERS = ("torch", "fabric", "accelerator", "dcp", "checkpointer", "manager", "model", "engine")


@dataclass
class ScriptFacts:
    """What is known of a job before it runs.

    Attributes:
        name: of the script's file, "" if the command names none.
        saves: lines on which a checkpoint may be saved.
        existing: how many files match the recipe's pattern already.
    """

    name: str = ""
    recipe: Recipe | None = None
    saves: list[int] = field(default_factory=list)
    existing: int = 0

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
    found.saves = sorted(call.lineno for call in code.calls if _saves(call))
    return found


def _saves(call: ast.Call) -> bool:
    """Return whether a call saves a checkpoint, by the names in it."""
    func = call.func
    if isinstance(func, ast.Name):
        return bool(re.fullmatch(r"save(_\w+)?", func.id))
    if not (isinstance(func, ast.Attribute) and _SAVES.fullmatch(func.attr)):
        return False
    owner = ast.unparse(func.value).lower()
    return func.attr != "save" or any(owner.endswith(name) for name in _SAVERS)
