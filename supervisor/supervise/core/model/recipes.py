"""Recipes that start jobs of known libraries again from a checkpoint: one table.

A recipe is what a policy needs in `job.checkpoints.glob` and `job.relaunch`. It is recognised in
the text of the script and in the command. Where a job loads the newest checkpoint by itself, it
needs no argument: a relaunch moves newer ones aside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from .redaction import Redactor

CHECKPOINT, DIRECTORY, STEP = "{checkpoint}", "{directory}", "{step}"  # of `job.relaunch`


@dataclass(frozen=True)
class Recipe:
    """How a job is started again.

    Attributes:
        name: of the library, or of the script's kind.
        glob: of its checkpoints; "" where the job announces them and no pattern is needed.
        resume: see `RelaunchForm`.
        args: added to the command.
        works: False: the script has to be changed first; `note` says how.
        note: what a person should know, "" for nothing.
    """

    name: str
    glob: str = ""
    resume: Literal["args", "library"] = "args"
    args: tuple[str, ...] = ()
    works: bool = True
    note: str = ""


def fill(template: str, path: str, step: int) -> str:
    """Put a checkpoint in the place of {checkpoint}, {directory} and {step}.

    Args:
        step: 0-based, the last one that is in it.
    """
    values = {CHECKPOINT: path, DIRECTORY: path.rpartition("/")[0], STEP: str(step + 1)}
    for name, value in values.items():
        template = template.replace(name, value)
    return template


def command(settings: Mapping[str, Any], path: str, step: int) -> str:
    """Return what a job is given that is started again, in words: an error in it ends the job."""
    words = [fill(str(word), path, step) for word in settings.get("args") or ()]
    parts = [f"job.relaunch.args {' '.join(Redactor().command(words))}"] if words else []
    parts += [f"job.relaunch.env {', '.join(settings['env'])}"] if settings.get("env") else []
    resume = settings.get("resume", "args")
    parts += [f"job.relaunch.resume {resume}"] if resume != "args" or not parts else []
    return ", ".join(parts)


def recognise(script: str, argv: Sequence[str]) -> Recipe | None:
    """Return the recipe of a job, None if it is of no known kind.

    Args:
        script: text of the training script, "" if there is none to read.
        argv: the command, launchers such as torchrun included.
    """
    return next((found for of in RECIPES if (found := of(script, argv)) is not None), None)


def _litgpt(script: str, argv: Sequence[str]) -> Recipe | None:
    """litgpt 0.5: `find_resume_path` in utils.py; only these two commands save an optimizer."""
    command = next((b for a, b in pairwise(argv) if a.rpartition("/")[2] == "litgpt"), None)
    if command is None and not _imports(script, "litgpt"):
        return None
    if command not in ("pretrain", "finetune_full"):
        why = "only litgpt pretrain and finetune_full save what training goes on from"
        return Recipe("litgpt", works=False, note=why)
    if _value(argv, "initial_checkpoint_dir"):
        return Recipe("litgpt", works=False, note="--initial_checkpoint_dir excludes --resume")
    note = "a loader without state_dict is pickled into checkpoints, which are not verified then"
    return Recipe("litgpt", args=(f"--resume={CHECKPOINT}",), note=note)


def _torchtitan(script: str, argv: Sequence[str]) -> Recipe | None:
    """torchtitan 0.3: `_find_load_step` in components/checkpointer/dcp.py, and its defaults."""
    if not (_imports(script, "torchtitan") or any(a.startswith("torchtitan.") for a in argv)):
        return None
    out = _value(argv, "dump_folder") or "outputs"
    folder = _value(argv, "checkpoint.folder") or "checkpoint"
    note = "it loads the newest step-N by itself; checkpoints have to be enabled"
    return Recipe("torchtitan", f"{_path(out)}/{folder}/step-*", note=note)


def _olmo_core(script: str, argv: Sequence[str]) -> Recipe | None:
    """OLMo-core 3.0: `Trainer.fit` and `Checkpointer.find_checkpoints` in olmo_core/train."""
    if not _imports(script, "olmo_core"):
        return None
    note = "it loads the newest stepN of its save folder by itself"
    out = _value(argv, "trainer.save_folder", "save_folder") or _assigned(script, "save_folder")
    if out is None:
        note += "; name that folder in job.checkpoints.glob"
        return Recipe("OLMo-core", works=False, note=note)
    return Recipe("OLMo-core", f"{_path(out)}/step*", note=note)


def _transformers(script: str, argv: Sequence[str]) -> Recipe | None:
    if not (_imports(script, "transformers") and re.search(r"\bTrainer\b|\w+Trainer\(", script)):
        return None
    return Recipe("Trainer", resume="library")


def _lightning(script: str, argv: Sequence[str]) -> Recipe | None:
    if not _imports(script, "lightning", "pytorch_lightning"):
        return None
    if not re.search(r"\bTrainer\(|\bLightningCLI\(", script):
        return None
    note = "inside an epoch its loader starts that epoch again"
    return Recipe("Lightning", resume="library", note=note)


def _accelerate(script: str, argv: Sequence[str]) -> Recipe | None:
    """As in the examples of accelerate: `--resume_from_checkpoint` and `--output_dir`."""
    if not (_imports(script, "accelerate") and "Accelerator" in script):
        return None
    return _by_option(Recipe("accelerate"), script, "Accelerator.load_state")


def _fabric(script: str, argv: Sequence[str]) -> Recipe | None:
    imports = _imports(script, "lightning", "lightning_fabric", "pytorch_lightning")
    if not (imports and re.search(r"\bFabric\(", script)):
        return None
    return _by_option(Recipe("Fabric"), script, "Fabric.load")


def _nanochat(script: str, argv: Sequence[str]) -> Recipe | None:
    """nanochat: scripts/base_train.py; the files of one step are a set."""
    if not (_imports(script, "nanochat") and "--resume-from-step" in script):
        return None
    return Recipe("nanochat", args=(f"--resume-from-step={STEP}",))


def _nanogpt(script: str, argv: Sequence[str]) -> Recipe | None:
    """nanoGPT: train.py overwrites one file; a copy of a good one is pinned."""
    if not ("init_from" in script and re.search(r"init_from\s*==\s*['\"]resume['\"]", script)):
        return None
    out = _value(argv, "out_dir") or _assigned(script, "out_dir") or "out"
    saved = re.search(r"['\"]([\w.-]+\.pt)['\"]", script)
    glob = f"{_path(out)}/{saved[1] if saved else 'ckpt.pt'}"
    return Recipe("nanoGPT-like", glob, args=("--init_from=resume",))


def _plain(script: str, argv: Sequence[str]) -> Recipe | None:
    option = _resume_option(script)
    if option is None:
        return None
    return Recipe(f"script with {option.partition('=')[0]}", args=(option,))


RECIPES: tuple[Callable[[str, Sequence[str]], Recipe | None], ...] = (
    *(_litgpt, _torchtitan, _olmo_core, _nanochat, _transformers, _lightning),
    *(_accelerate, _fabric, _nanogpt, _plain),
)

# ── reading a script and a command ────────────────────────────────────────────────────────────────

# Names that say that their value is a checkpoint come before those that may be a switch.
_PREFERRED = ("resume_from_checkpoint", "resume_from", "resume_path", "ckpt_path", "resume")
_OPTION = re.compile(
    r"add_argument\(\s*(?P<names>(?:['\"]-[\w-]+['\"]\s*,?\s*)+)(?P<rest>(?:(?!add_argument).){,400})",
    re.DOTALL,
)
_SWITCH = re.compile(r"store_true|BooleanOptionalAction")
_NO_PATH = re.compile(r"\btype\s*=\s*(?:int|bool|float|str2bool)\b|\bchoices\s*=")


def _by_option(recipe: Recipe, script: str, call: str) -> Recipe:
    """Add the script's own option to a recipe; say what is missing if it has none."""
    option = _resume_option(script)
    if option is not None:
        return replace(recipe, args=(option,))
    note = f"give the script an option by which it calls {call}, such as --resume_from_checkpoint"
    return replace(recipe, works=False, note=note)


def _resume_option(script: str) -> str | None:
    """Return the argument by which a script with argparse resumes, None if it has none."""
    found: dict[str, str] = {}
    for match in _OPTION.finditer(script):
        name = re.search(r"--[\w-]+", match["names"])
        plain = name[0][2:].replace("-", "_") if name else ""
        if name and plain in _PREFERRED and not _NO_PATH.search(match["rest"]):
            switch = _SWITCH.search(match["rest"])
            found[plain] = name[0] if switch else f"{name[0]}={CHECKPOINT}"
    return next((found[name] for name in _PREFERRED if name in found), None)


def _imports(script: str, *names: str) -> bool:
    roots = "|".join(map(re.escape, names))
    return re.search(rf"^\s*(?:from|import)\s+(?:{roots})\b", script, re.MULTILINE) is not None


def _value(argv: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of these options, given as `--name=x` or `--name x`."""
    for i in range(len(argv) - 1, -1, -1):
        name, equals, value = argv[i].partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") in names:
            return value if equals else next(iter(argv[i + 1 : i + 2]), None)
    return None


def _assigned(script: str, name: str) -> str | None:
    """Return the first text that the script gives this name, as variable or as argument."""
    found = re.search(rf"\b{name}\s*(?::\s*str\s*)?=\s*['\"]([^'\"{{}}]+)['\"]", script)
    return found[1] if found else None


def _path(folder: str) -> str:
    return folder.removeprefix("./").rstrip("/")
