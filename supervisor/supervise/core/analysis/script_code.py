"""The code of a training script: its imports, calls, options and constants.

Comments, docstrings and other text are no code, so that nothing here is taken from them. Nothing is
run or imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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
        found = {}
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for one in node.names:
                    name = one.asname or one.name.partition(".")[0]
                    found[name] = one.name if one.asname else name
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for one in node.names:
                    found[one.asname or one.name] = f"{module}.{one.name}"
        return found

    @cached_property
    def called(self) -> frozenset[str]:
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
            name.partition(".")[0] in roots and name.endswith(endings) for name in self.called
        )

    def refers_to(self, roots: tuple[str, ...], ending: str) -> bool:
        """Return whether its code uses a name of one of these packages that ends like this."""
        names = {self.origins.get(name, "") for name in self.used}
        names |= {self._resolve(node) for node in self._nodes if isinstance(node, ast.Attribute)}
        return any(name.partition(".")[0] in roots and name.endswith(ending) for name in names)

    def compares(self, name: str, value: str) -> bool:
        """Return whether it asks whether this variable or attribute has this value."""
        for node in self._nodes:
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                names = {_last(_dotted(side)) for side in sides}
                if name in names and any(_constant(side) == value for side in sides):
                    return True
        return False

    def assigned(self, name: str) -> str | None:
        """Return the first text that this variable, attribute or argument is given."""
        for node in self._nodes:
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            given = [_last(_dotted(target)) for target in targets]
            given += [node.arg or ""] if isinstance(node, ast.keyword) else []
            value = _constant(getattr(node, "value", None))
            if name in given and value:
                return value
        return None

    def _resolve(self, node: ast.expr) -> str:
        """Return the dotted name of an expression, as imported."""
        root, dot, rest = _dotted(node).partition(".")
        if not dot and root in self._bases:
            return self._bases[root]
        return f"{self.origins.get(root, root)}{dot}{rest}"

    @cached_property
    def _bases(self) -> dict[str, str]:
        """The imported class that each class of the script is derived from first."""
        own = {n.name: n.bases[0] for n in self._nodes if isinstance(n, ast.ClassDef) and n.bases}
        found = {}
        for name in own:
            base, seen = _dotted(own[name]), {name}
            while base in own and base not in seen:
                seen.add(base)
                base = _dotted(own[base])
            root, dot, rest = base.partition(".")
            found[name] = f"{self.origins.get(root, root)}{dot}{rest}"
        return found

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
    if _last(_dotted(call.func)) not in _DECLARES:
        return None
    names = (text for arg in call.args if (text := _constant(arg)) and text.startswith("--"))
    flag = next(names, "").partition("/")[0]  # click: --resume/--no-resume
    if not flag:
        return None
    given = {one.arg: one.value for one in call.keywords if one.arg}
    kind, action = given.get("type"), given.get("action")
    switch = "is_flag" in given or _constant(action) in ("store_true", "store_const")
    switch |= action is not None and _last(_dotted(action)) == "BooleanOptionalAction"
    no_path = kind is not None and _last(_dotted(kind)) in _NO_PATHS
    no_path = no_path or "choices" in given or _constant(action) == "store_false"
    name = _constant(given.get("dest")) or flag[2:].replace("-", "_")
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


def _last(name: str) -> str:
    return name.rpartition(".")[2]
