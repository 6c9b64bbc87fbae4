"""Recipes that start jobs of known libraries again from a checkpoint: one table.

A recipe is what a policy needs in `job.checkpoints.glob` and `job.relaunch`. It is recognised in
the code of the script and in the command, never in prose. Where a job loads the newest checkpoint
by itself, it needs no argument: a relaunch moves newer ones aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ..model.recipes import CHECKPOINT, STEP
from .script_code import ScriptCode

TRANSFORMERS = ("transformers", "trl", "sentence_transformers")  # their trainers are one
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


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


def recognise(script: str, argv: Sequence[str]) -> Recipe | None:
    """Return the recipe of a job, None if it is of no known kind.

    Args:
        script: text of the training script, "" if there is none to read.
        argv: the command, launchers such as torchrun included.
    """
    return of_code(ScriptCode(script), argv)


def of_code(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """Return the recipe of a job whose script has this code."""
    return next((recipe for of in RECIPES if (recipe := of(code, argv)) is not None), None)


def _litgpt(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """Return the recipe of litgpt 0.5; only these two commands save an optimizer."""
    # `find_resume_path` in litgpt/utils.py
    command = next((b for a, b in pairwise(argv) if a.rpartition("/")[2] == "litgpt"), None)
    if command is None:
        return None
    if command not in ("pretrain", "finetune_full"):
        why = "only litgpt pretrain and finetune_full save what training goes on from"
        return Recipe("litgpt", works=False, note=why)
    if _value(argv, "initial_checkpoint_dir"):
        return Recipe("litgpt", works=False, note="--initial_checkpoint_dir excludes --resume")
    note = "a loader without state_dict is pickled into checkpoints, which are not verified then"
    return Recipe("litgpt", args=(f"--resume={CHECKPOINT}",), note=note)


def _torchtitan(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """Return the recipe of torchtitan 0.3, with the defaults of its checkpointer."""
    # `_find_load_step` in torchtitan/components/checkpointer/dcp.py
    if not (code.imports("torchtitan") or any(a.startswith("torchtitan.") for a in argv)):
        return None
    out = _value(argv, "dump_folder") or "outputs"
    folder = _value(argv, "checkpoint.folder") or "checkpoint"
    note = "it loads the newest step-N by itself; checkpoints have to be enabled"
    return Recipe("torchtitan", f"{_path(out)}/{folder}/step-*", note=note)


def _olmo_core(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """OLMo-core 3.0: `Trainer.fit` and `Checkpointer.find_checkpoints` in olmo_core/train."""
    if not code.imports("olmo_core"):
        return None
    note = "it loads the newest stepN of its save folder by itself"
    out = _value(argv, "trainer.save_folder", "save_folder") or code.assigned("save_folder")
    if out is None:
        note += "; name that folder in job.checkpoints.glob"
        return Recipe("OLMo-core", works=False, note=note)
    return Recipe("OLMo-core", f"{_path(out)}/step*", note=note)


def _transformers(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """Trainer or a class derived from it, perhaps in another file of the job's."""
    elsewhere = any(name.endswith("Trainer") and not _of_lightning(name) for name in code.called)
    elsewhere = elsewhere and code.refers_to(TRANSFORMERS, "TrainingArguments")
    if not (code.calls_of(TRANSFORMERS, "Trainer") or elsewhere):
        return None
    return Recipe("Trainer", resume="library")


def _of_lightning(name: str) -> bool:
    return name.partition(".")[0] in LIGHTNING


def _lightning(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    if not code.calls_of(LIGHTNING, ".Trainer", ".LightningCLI"):
        return None
    note = "inside an epoch its loader starts that epoch again"
    return Recipe("Lightning", resume="library", note=note)


def _accelerate(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """As in the examples of accelerate: `--resume_from_checkpoint` and `--output_dir`."""
    if not code.calls_of(("accelerate",), ".Accelerator"):
        return None
    return _by_option(Recipe("accelerate"), code, "Accelerator.load_state")


def _fabric(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    if not code.calls_of(LIGHTNING, ".Fabric"):
        return None
    return _by_option(Recipe("Fabric"), code, "Fabric.load")


def _nanochat(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """Return the recipe of nanochat; the files of one step are a set."""
    # scripts/base_train.py of nanochat
    own = any(option.flag == "--resume-from-step" for option in code.options)
    if not (code.imports("nanochat") and own):
        return None
    return Recipe("nanochat", args=(f"--resume-from-step={STEP}",))


def _nanogpt(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """nanoGPT: train.py overwrites one file, which is announced; a copy of a good one is pinned."""
    if not code.compares("init_from", "resume"):
        return None
    return Recipe("nanoGPT-like", args=("--init_from=resume",))


def _plain(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    option = _resume_option(code)
    if option is None:
        return None
    return Recipe(f"script with {option.partition('=')[0]}", args=(option,))


RECIPES: tuple[Callable[[ScriptCode, Sequence[str]], Recipe | None], ...] = (
    *(_litgpt, _torchtitan, _olmo_core, _nanochat, _transformers, _lightning),
    *(_accelerate, _fabric, _nanogpt, _plain),
)

# Names that say that their value is a checkpoint come before those that may be a switch.
_PREFERRED = (
    *("resume_from_checkpoint", "resume_checkpoint", "resume_ckpt", "resume_from", "resume_path"),
    *("ckpt_path", "resume"),
)
_LOADS = ("load", "restore", "resume")


def _by_option(recipe: Recipe, code: ScriptCode, call: str) -> Recipe:
    """Add the script's own option to a recipe; say what is missing if it has none."""
    option = _resume_option(code)
    if option is not None:
        return replace(recipe, args=(option,))
    note = f"give the script an option by which it calls {call}, such as --resume_from_checkpoint"
    return replace(recipe, works=False, note=note)


def _resume_option(code: ScriptCode) -> str | None:
    """Return the argument by which a script resumes, None if it has none.

    It declares one, uses its value, and loads something.
    """
    if not any(verb in name.rpartition(".")[2].lower() for name in code.called for verb in _LOADS):
        return None
    found: dict[str, str] = {}
    for option in code.options:
        plain = option.flag[2:].replace("-", "_")
        if plain in _PREFERRED and option.path and option.name in code.used:
            found[plain] = option.flag if option.switch else f"{option.flag}={CHECKPOINT}"
    return next((found[name] for name in _PREFERRED if name in found), None)


def _value(argv: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of these options, given as `--name=x` or `--name x`."""
    for i in range(len(argv) - 1, -1, -1):
        name, equals, value = argv[i].partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") in names:
            return value if equals else next(iter(argv[i + 1 : i + 2]), None)
    return None


def _path(folder: str) -> str:
    return folder.removeprefix("./").rstrip("/")
