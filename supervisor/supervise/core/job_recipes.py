"""Recipes that start jobs of known libraries again from a checkpoint: one table.

A recipe is what a policy needs in `job.checkpoints.glob` and `job.relaunch`. It is recognised in
the code of the script and in the command, never in prose. Where a job loads the newest checkpoint
by itself, it needs no argument: a relaunch moves newer ones aside.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from .model.policy import RelaunchSettings
from .model.redaction import Redactor

CHECKPOINT, DIRECTORY, STEP = "{checkpoint}", "{directory}", "{step}"  # of `job.relaunch`


def fill_recipe(template: str, path: str, step: int) -> str:
    """Put a checkpoint in the place of {checkpoint}, {directory} and {step}.

    Args:
        step: 0-based, the last one that is in it.
    """
    values = {CHECKPOINT: path, DIRECTORY: path.rpartition("/")[0], STEP: str(step + 1)}
    for name, value in values.items():
        template = template.replace(name, value)
    return template


def describe_relaunch(settings: RelaunchSettings | None, path: str, step: int) -> str:
    """Return what a job is given that is started again, in words: an error in it ends the job."""
    settings = settings or RelaunchSettings()
    words = [fill_recipe(word, path, step) for word in settings.args]
    parts = [f"job.relaunch.args {' '.join(Redactor().command(words))}"] if words else []
    parts += [f"job.relaunch.env {', '.join(settings.env)}"] if settings.env else []
    if settings.resume != "args" or not parts:
        parts.append(f"job.relaunch.resume {settings.resume}")
    return ", ".join(parts)


_NO_PATHS = ("int", "float", "bool", "str2bool", "strtobool", "str_to_bool")
_DECLARES = ("add_argument", "option")  # of argparse, of click and typer


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        flag: as it is written, such as `--resume-from`.
        name: of its value in the code.
        switch: it takes no value. path: its value can be the path of a file.
    """

    flag: str
    name: str
    switch: bool
    path: bool


class ScriptCode:
    """What the text of a script says; of one that is no Python: nothing."""

    def __init__(self, text: str) -> None:
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # of another Python, or none
            self.tree = ast.parse("")
        self._nodes = list(ast.walk(self.tree))
        self.calls = [node for node in self._nodes if isinstance(node, ast.Call)]

    @cached_property
    def origins(self) -> dict[str, str]:
        """What each imported name stands for: `{"L": "lightning", "T": "transformers.Trainer"}`."""
        imports = {}
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    imports[name] = alias.name if alias.asname else name
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for alias in node.names:
                    imports[alias.asname or alias.name] = f"{module}.{alias.name}"
        return imports

    @cached_property
    def called_names(self) -> frozenset[str]:
        """The names of all that is called, as imported; a class of the script's own counts as the
        one that it is derived from."""
        return frozenset(self._resolve(call.func) for call in self.calls)

    @cached_property
    def used(self) -> frozenset[str]:
        """The names of all variables and attributes that are read, and keys that are constants."""
        return frozenset(self._used())

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """The options that it declares."""
        return tuple(filter(None, map(_option, self.calls)))

    def imports(self, *roots: str) -> bool:
        """Return whether it imports one of these packages, or anything of them."""
        return any(name.partition(".")[0] in roots for name in self.origins.values())

    def calls_of(self, roots: tuple[str, ...], *endings: str) -> bool:
        """Return whether it calls something of one of these packages whose name ends like this."""
        return any(
            name.partition(".")[0] in roots and name.endswith(endings) for name in self.called_names
        )

    def refers_to(self, roots: tuple[str, ...], ending: str) -> bool:
        """Return whether its code uses a name of one of these packages that ends like this."""
        names = {self.origins.get(name, "") for name in self.used}
        names |= {self._resolve(node) for node in self._nodes if isinstance(node, ast.Attribute)}
        return any(name.partition(".")[0] in roots and name.endswith(ending) for name in names)

    def compares_with(self, name: str, value: str) -> bool:
        """Return whether it asks whether this variable or attribute has this value."""
        for node in self._nodes:
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                names = {_last_part(_dotted(side)) for side in sides}
                if name in names and any(_constant(side) == value for side in sides):
                    return True
        return False

    def first_text_assigned(self, name: str) -> str | None:
        """Return the first text that this variable, attribute or argument is given."""
        for node in self._nodes:
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            target_names = [_last_part(_dotted(target)) for target in targets]
            target_names += [node.arg or ""] if isinstance(node, ast.keyword) else []
            value = _constant(getattr(node, "value", None))
            if name in target_names and value:
                return value
        return None

    def _resolve(self, node: ast.expr) -> str:
        """Return the dotted name of an expression, as imported."""
        root, dot, remainder = _dotted(node).partition(".")
        if not dot and root in self._bases:
            return self._bases[root]
        return f"{self.origins.get(root, root)}{dot}{remainder}"

    @cached_property
    def _bases(self) -> dict[str, str]:
        """The imported class that each class of the script is derived from first."""
        own_classes = {
            n.name: n.bases[0] for n in self._nodes if isinstance(n, ast.ClassDef) and n.bases
        }
        bases = {}
        for name in own_classes:
            base, visited = _dotted(own_classes[name]), {name}
            while base in own_classes and base not in visited:
                visited.add(base)
                base = _dotted(own_classes[base])
            root, dot, remainder = base.partition(".")
            bases[name] = f"{self.origins.get(root, root)}{dot}{remainder}"
        return bases

    def _used(self) -> Iterator[str]:
        for node in self._nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield node.attr
            elif isinstance(node, ast.Subscript) and (key := _constant(node.slice)):
                yield key


def _option(call: ast.Call) -> Option | None:
    """Return the option that a call declares, None if it declares none."""
    if _last_part(_dotted(call.func)) not in _DECLARES:
        return None
    names = (option for arg in call.args if (option := _constant(arg)) and option.startswith("--"))
    flag = next(names, "").partition("/")[0]  # click: --resume/--no-resume
    if not flag:
        return None
    arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    kind, action = arguments.get("type"), arguments.get("action")
    switch = "is_flag" in arguments or _constant(action) in ("store_true", "store_const")
    switch |= action is not None and _last_part(_dotted(action)) == "BooleanOptionalAction"
    no_path = kind is not None and _last_part(_dotted(kind)) in _NO_PATHS
    no_path = no_path or "choices" in arguments or _constant(action) == "store_false"
    name = _constant(arguments.get("dest")) or flag[2:].replace("-", "_")
    return Option(flag, name, switch, not no_path)


def _constant(node: object) -> str | None:
    """Return the text that an expression is, None if it is none."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _dotted(node: ast.expr) -> str:
    """Return the name of an expression; what is no name in it is empty: `f().x` is `.x`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


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


def recognise_recipe(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """Return the recipe of a job, None if it is of no known kind.

    Args:
        code: of the training script, or of "" if there is none to read.
        argv: the command, launchers such as torchrun included.
    """
    return next(
        (recipe for recipe_of in RECIPES if (recipe := recipe_of(code, argv)) is not None), None
    )


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
    out = _value(argv, "trainer.save_folder", "save_folder") or code.first_text_assigned(
        "save_folder"
    )
    if out is None:
        note += "; name that folder in job.checkpoints.glob"
        return Recipe("OLMo-core", works=False, note=note)
    return Recipe("OLMo-core", f"{_path(out)}/step*", note=note)


def _transformers(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """Trainer or a class derived from it, perhaps in another file of the job's."""
    elsewhere = any(
        name.endswith("Trainer") and not _of_lightning(name) for name in code.called_names
    )
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
    has_option = any(option.flag == "--resume-from-step" for option in code.options)
    if not (code.imports("nanochat") and has_option):
        return None
    return Recipe("nanochat", args=(f"--resume-from-step={STEP}",))


def _nanogpt(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    """nanoGPT: train.py overwrites one file, which is announced; a copy of a good one is pinned."""
    if not code.compares_with("init_from", "resume"):
        return None
    return Recipe("nanoGPT-like", args=("--init_from=resume",))


def _plain(code: ScriptCode, argv: Sequence[str]) -> Recipe | None:
    option = _resume_option(code)
    if option is None:
        return None
    return Recipe(f"a script with {option.partition('=')[0]}", args=(option,))


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
    if not any(
        verb in name.rpartition(".")[2].lower() for name in code.called_names for verb in _LOADS
    ):
        return None
    values: dict[str, str] = {}
    for option in code.options:
        plain = option.flag[2:].replace("-", "_")
        if plain in _PREFERRED and option.path and option.name in code.used:
            values[plain] = option.flag if option.switch else f"{option.flag}={CHECKPOINT}"
    return next((values[name] for name in _PREFERRED if name in values), None)


def _value(argv: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of these options, given as `--name=x` or `--name x`."""
    for i in range(len(argv) - 1, -1, -1):
        name, equals, value = argv[i].partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") in names:
            return value if equals else next(iter(argv[i + 1 : i + 2]), None)
    return None


def _path(folder: str) -> str:
    return folder.removeprefix("./").rstrip("/")
