"""The layers, the purity of the core, the manners of the probe and the size of every file.

Each rule is a function from one parsed module to the sentences to print.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("supervisor", "probes", "examples", "benchmarks", "tests")
MAX_FILE = 900
MAX_FUNCTION = 60

# What a layer may import besides itself and `errors`: prefixes, below `supervise` where nothing
# else is named. The first path component below `supervise` names the layer.
LAYERS = {
    "errors": "",
    "exports": "",
    "process_reaper": "",  # a program of its own, of the standard library alone
    "system": "process_reaper",
    "core": "",
    "detectors": "core",
    "actions": "core.model",
    "notifiers": "core.model core.notices core.run_notices json_schemas system",
    "catalog": (
        "core detectors actions notifiers supervise_probe.collectors supervise_probe.faults"
    ),
    "checkpoints": "core system store.files store.run_records",
    "store": "core system",
    "data": "json_schemas report store",
    "report": "core json_schemas store system",
    "trials": "core report store system",
    "recordings": "core",
    "lab": "core catalog recordings store",
    "runtime": (
        "core detectors catalog actions notifiers checkpoints store report system "
        "supervise_probe.ipc.fences supervise_probe.wire"
    ),
    "cli": "supervise supervise_probe.collectors supervise_probe.faults",
    "web": "supervise",
    "__main__": "cli",
}
# Single modules that may import a little more than their layer.
ALSO = {
    "supervise.store.run_records": "supervise_probe.wire",
    "supervise.catalog.lint": "supervise_probe.wire",
    "supervise.catalog.docs": "data.manifest report.incident_report report.stability_record",
    "supervise.catalog.metrics": "recordings",  # for its hints
    "supervise.actions.recovery": "actions.rate_and_clips",  # the re-warm
    "supervise.notifiers": "notifiers.heartbeat",
    "supervise.notifiers.outbox": "notifiers.delivery",
}


def qualified(names: str) -> tuple[str, ...]:
    return tuple(n if n.startswith("supervise") else f"supervise.{n}" for n in names.split())


# In these packages, files are parts of a catalog: they may share helpers, never import each other.
CATALOGS = ("detectors", "actions", "notifiers")
# One file per part: they may be many, and are named as people name the part.
PARTS = qualified(
    "detectors actions notifiers cli supervise_probe.collectors supervise_probe.faults"
)
# What tests and benchmarks may import of `supervise` besides the faces of its packages.
ROOT_MODULES = qualified("errors system json_schemas recordings")
BEHIND_THE_FACE = {
    "supervise.cli._job_check": "a table of commands and of conditions of metrics",
    "supervise.cli._streams": "a stream that is full",
    "supervise.cli.adopt": "a driver with a recorder of ours",
    "supervise.cli.run": "a driver with a recorder of ours",
}
# These do so still; the list may only get shorter.
NOT_YET = ("supervise.report.incident_files",)
ONE_THING = {"adoption"}  # a takeover: `runtime` does what `core` decides
# All that pure code needs. Everything else has a clock, a disk, a network or chance behind it.
PURE = """
__future__ abc ast bisect collections collections.abc copy dataclasses enum functools hashlib heapq
itertools json keyword math msgspec operator re shlex statistics string struct types typing
"""
HIDDEN = "sitecustomize"  # the job's own, which ours hides and hands over to
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "__import__", "breakpoint"})
ADVICE = {
    **dict.fromkeys(("time", "datetime", "random"), "pass it in as an event instead"),
    **dict.fromkeys(("os", "pathlib", "socket"), "let an edge do it and pass the outcome in"),
    "logging": "return a Decision instead",
}


@dataclass(frozen=True)
class Module:
    """One source file, as the rules see it."""

    name: str  # dotted, as imported: supervise.core.engine
    path: str  # as printed, from the source root's package: core/engine.py
    text: str
    is_package: bool = False
    known: frozenset[str] = frozenset()  # dotted names of all modules of ours
    packages: frozenset[str] = frozenset()  # those of them that are packages

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def layer(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    def imports(self) -> Iterator[tuple[int, str, bool]]:
        """Yield (line, dotted target, was it relative), relative ones expanded, deepest known."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name, False) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = self.name.split(".")
                    package = package if self.is_package else package[:-1]
                    package = package[: len(package) - (node.level - 1)]
                    base = ".".join([*package, *([base] if base else [])])
                for alias in node.names:
                    deeper = f"{base}.{alias.name}"
                    yield node.lineno, deeper if deeper in self.known else base, bool(node.level)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def layers(module: Module) -> Iterator[str]:
    """Imports point downward."""
    if not module.name.startswith("supervise.") or module.layer not in LAYERS:
        return
    own = f"supervise.{module.layer}"
    also = qualified(" ".join(ALSO[at] for at in ALSO if within(module.name, (at,))))
    shared = (own, "supervise.errors", "supervise.exports")
    allowed = (*shared, *qualified(LAYERS[module.layer]), *also)
    for line, target, _ in module.imports():
        ours = target.split(".")[0] in ("supervise", "supervise_probe")
        if ours and target != "supervise" and not within(target, allowed):
            yield f"{module.path}:{line} imports {target}; {module.layer} may not look there"
        elif module.layer in CATALOGS and within(target, (own,)) and not within(target, also):
            part = target.removeprefix(own).lstrip(".")
            if part and not part.startswith("_"):
                yield (
                    f"{module.path}:{line} imports {target}; parts of a catalog do not know "
                    "each other, share a _helper instead"
                )


def pure(module: Module) -> Iterator[str]:
    """Core and detectors have no clock, disk, network, chance or third party."""
    if module.layer not in ("core", "detectors") or not module.name.startswith("supervise."):
        return
    for line, target, relative in module.imports():
        if not relative and target not in PURE.split() and not target.startswith("supervise"):
            advice = ADVICE.get(target.split(".")[0], "this layer is pure")
            yield f"{module.path}:{line} imports {target}; {advice}"
    for node in module.nodes:
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in IMPURE_CALLS:
            yield f"{module.path}:{called.lineno} calls {called.id}(); this layer is pure"


def old_python(module: Module) -> Iterator[str]:
    try:
        ast.parse(module.text, feature_version=(3, 9))
    except SyntaxError as error:
        yield f"{module.path}:{error.lineno} is not Python 3.9: {error.msg}"


def polite(module: Module) -> Iterator[str]:
    """The probe takes nothing but the standard library into somebody else's process."""
    if not within(module.name, ("supervise_probe",)):
        return
    for line, target, relative in module.imports():
        top = target.split(".")[0]
        if top == "supervise_probe" and not relative:
            yield f"{module.path}:{line} imports {target} by name; in a job the probe has another"
        elif top == "torch":
            yield f"{module.path}:{line} imports torch; find it in sys.modules instead"
        elif top not in ("supervise_probe", HIDDEN) and top not in sys.stdlib_module_names:
            yield f"{module.path}:{line} imports {target}; the probe has the standard library only"
    yield from old_python(module)


def alongside(module: Module) -> Iterator[str]:
    """Programs that run alongside the job, in its interpreter, need the standard library only."""
    if not within(module.name, ("supervise_offline",)):
        return
    for line, target, _ in module.imports():
        top = target.split(".")[0]
        if top != "supervise_offline" and top not in sys.stdlib_module_names:
            yield f"{module.path}:{line} imports {target}; what torch can do comes as an argument"
    yield from old_python(module)


def matched(module: Module) -> Iterator[str]:
    """Before Python 3.11.5 a possessive group matches too little, see CPython's issue 106052."""
    for number, line in enumerate(module.text.splitlines(), 1):
        if re.search(r"\)[+*?]\+", line) and module.name.startswith("supervise"):
            yield f"{module.path}:{number} has a possessive group; write an atomic one, (?>...)"


def inside(node: ast.AST) -> list[ast.AST]:
    """Return the statements directly in one, and what holds more of them."""
    blocks = ("body", "orelse", "finalbody", "handlers", "cases")
    return [child for block in blocks for child in getattr(node, block, ())]


def span(node: ast.AST) -> int:
    """Return how many lines the outermost functions in `node` take, or `node` if it is one."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return (node.end_lineno or node.lineno) - node.lineno + 1
    return sum(map(span, inside(node)))


def small(module: Module) -> Iterator[str]:
    if module.name.startswith("tests."):
        return
    lines = module.text.count("\n")
    if lines > MAX_FILE:
        yield f"{module.path} has {lines} lines, more than {MAX_FILE}; the idea in it is two ideas"
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = span(node) - sum(map(span, inside(node)))
            if length > MAX_FUNCTION:
                yield (
                    f"{module.path}:{node.lineno} {node.name}() has {length} lines of its own, "
                    f"more than {MAX_FUNCTION}"
                )


def introduced(module: Module) -> Iterator[str]:
    """A file says what it is for; a test file says it by its name."""
    if module.name.startswith("tests."):
        return
    if module.text.strip() and ast.get_docstring(module.tree) is None:
        yield f"{module.path} has no docstring; say what it is for"


def printed(module: Module) -> Iterator[str]:
    """Commands print others' text, so all of it goes through the two functions that clean it."""
    if not module.name.startswith("supervise.cli.") or module.name.endswith(
        ("_output", "_streams")
    ):
        return
    for node in module.nodes:
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called in ("print", "click.echo") or called.endswith("console.print"):
            yield f"{module.path}:{node.lineno} calls {called}(); use echo or echo_json of _output"


def through_the_face(module: Module) -> Iterator[str]:
    """The insides of a package can change without a test that changes."""
    if not module.name.startswith(("tests.", "benchmarks.")):
        return
    for line, target, _ in module.imports():
        inside = target in module.known and target not in module.packages
        ours = target.startswith("supervise.") and target not in ROOT_MODULES
        if ours and inside and target not in (*BEHIND_THE_FACE, *NOT_YET):
            face = target.rpartition(".")[0]
            yield f"{module.path}:{line} imports {target}; import what it offers from {face}"


NAMED_FILE = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:py|md))\b")
OF_LIBRARIES = ("torch", "litgpt/", "scripts/", "Lib/", "site.py", "checkpoint_manager.py")


@cache
def file_names() -> frozenset[str]:
    """Return the names of the Python and Markdown files of the project, without their folders."""
    files = (path for kind in ("py", "md") for path in ROOT.glob(f"[!.]*/**/*.{kind}"))
    return frozenset(path.name for path in (*files, *ROOT.glob("*.md")))


def named(module: Module) -> Iterator[str]:
    """A docstring or comment names files that exist here; a source is public or measured here."""
    if module.name.startswith(("benchmarks.", "tests.test_architecture")):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in module.nodes if isinstance(node, documented))
    texts = [ast.get_docstring(node, clean=False) or "" for node in nodes]
    texts += re.findall(r"# .*", module.text)
    for name in NAMED_FILE.findall("\n".join(t for t in texts if ".py" in t or ".md" in t)):
        if not name.startswith(OF_LIBRARIES) and name.rpartition("/")[2] not in file_names():
            yield f"{module.path} names {name}, which is not here"


ARGS = re.compile(r"^Args:\n((?:    .*\n?|\n)+)", re.M)
ENTRY = re.compile(r"(?:^    |\. )`?((?:[a-z_]\w*, )*[a-z_]\w*)`?: ", re.M)


def described(module: Module) -> Iterator[str]:
    """A docstring names parameters that exist."""
    if not module.name.startswith("supervise"):
        return
    for node in module.nodes:
        documented = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if documented and (section := ARGS.search(ast.get_docstring(node) or "")):
            names = {name for head in ENTRY.findall(section[1]) for name in head.split(", ")}
            names -= {getattr(each, "arg", getattr(each, "id", "")) for each in ast.walk(node)}
            for name in sorted(names):
                yield f"{module.path}:{node.lineno} describes {name}, which is no parameter"


RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    *(layers, pure, polite, alongside, small, introduced, matched, named, printed),
    *(through_the_face, described),
)


@cache
def read_modules() -> list[Module]:
    """Return every Python file of ours; packages of the two source roots by their import name."""
    found = []
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            inside = path.relative_to(ROOT / source)
            parts = list(inside.with_suffix("").parts)
            if source in ("supervisor", "probes"):
                shown = str(Path(*inside.parts[1:]) if source == "supervisor" else inside)
            else:
                parts, shown = [source, *parts], str(path.relative_to(ROOT))
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found.append((name, shown, path.read_text(encoding="utf-8"), is_package))
    known = frozenset(name for name, *_ in found)
    packages = frozenset(name for name, *_, is_package in found if is_package)
    return [Module(*each, known, packages) for each in found]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_is_in_order(rule):
    sentences = [sentence for module in read_modules() for sentence in rule(module)]

    assert not sentences, "\n" + "\n".join(sentences)


def test_only_a_notice_makes_the_text_of_a_message():
    made = [
        module.path
        for module in read_modules()
        if module.name.startswith("supervise.core.")
        for node in module.nodes
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("MessageDraft", "MessageText")
    ]
    assert made == ["core/run_state.py"]


STANDARD = frozenset(("_exit", "_getframe", "_replace", "_make", "_asdict", "_run_exitfuncs"))
PRIVATE_READS = 7  # may only fall


def private_reads(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the private names of other objects, or of product modules, that a test reads."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and re.match("_[^_]", node.attr) and node.attr not in STANDARD:
                names.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("supervise"):
            helpers = (node.module or "").rpartition(".")[2] in ("cli", "detectors", "notifiers")
            names += [a.name for a in node.names if a.name.startswith("_") and not helpers]
    return names


def test_no_test_reads_more_private_names_of_the_product():
    """A test of internals breaks when the code gets better; test what a caller sees."""
    reads = [
        f"{module.path}: {name}"
        for module in read_modules()
        if module.name.startswith("tests.")
        for name in private_reads(module.nodes)
    ]
    assert len(reads) <= PRIVATE_READS, "\n" + "\n".join(reads)
    text = "from supervise.runtime.loop import _x\na._b\nself._c\nos._exit(0)\na.__dict__\n"
    assert private_reads(ast.walk(ast.parse(text))) == ["_x", "_b"]


# Words in the names of sentences: what is in one is a typed fact, too, and code reads that.
SENTENCES = {*("answer", "cause", "error", "gate", "headline", "message", "muted", "problem")}
SENTENCES |= {*("reason", "refusal", "settled", "standstill", "status", "suppressed", "text")}
SENTENCES |= {*("title", "verdict", "why")}
CUTS = ("startswith", "endswith", "removeprefix", "removesuffix", "split")
CUTS += ("partition", "rpartition")
PARSERS = re.compile("catalog|data|notifiers|store|recordings")  # of foreign text
# The codec of a record, what another program wrote, lines and arguments.
READERS = """
cli/__init__ cli/__init__ cli/_params cli/_streams cli/doctor cli/policy_commands
cli/policy_commands cli/web core/model/failure report/incident_builder
runtime/identity runtime/stacks
"""


def sentence_cuts(nodes: Iterable[ast.AST]) -> list[str]:
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        subject = [node.func.value] if node.func.attr in CUTS else []
        if node.func.attr in ("match", "search", "fullmatch"):
            subject = node.args[1:2]
        names = (getattr(n, "id", getattr(n, "attr", "")) for s in subject for n in ast.walk(s))
        if any(SENTENCES & {*name.split("_")} for name in names):
            calls.append(f"{node.lineno}: {ast.unparse(node)}")
    return calls


def test_no_code_reads_a_sentence_back():
    cuts = [
        (module.path.removesuffix(".py"), call)
        for module in read_modules()
        if within(module.name, ("supervise",)) and not PARSERS.match(module.path)
        for call in sentence_cuts(module.nodes)
    ]
    assert sorted(path for path, _ in cuts) == READERS.split(), cuts
    for code in ("muted.startswith('x:')", "str(a.reason).split('/')", "re.match('a', it.why)"):
        assert sentence_cuts(ast.walk(ast.parse(code)))


def repeated(modules: list[Module]) -> list[str]:
    """Return which modules of the supervisor have one name, though they are different things."""
    places: dict[str, list[str]] = {}
    for module in modules:
        if module.name.startswith("supervise.") and not within(module.name, PARTS):
            places.setdefault(module.name.rpartition(".")[2], []).append(module.name)
    return [
        f"{' and '.join(names)} have one name; one concept, one name"
        for name, names in sorted(places.items())
        if len(names) > 1 and name not in ONE_THING
    ]


def test_no_two_modules_have_one_name():
    assert repeated(read_modules()) == []


def absent(modules: list[Module]) -> list[str]:
    """Return the names that a face offers and that none of its modules defines."""
    by_name = {module.name: module for module in modules}
    sentences = []
    for face in modules:
        for call in (node for node in face.nodes if isinstance(node, ast.Call)):
            if ast.unparse(call.func) != "lazy_exports":
                continue
            for part, names in ast.literal_eval(call.args[1]).items():
                offered = set(names.split(", "))
                source = by_name.get(f"{face.name}.{part}")
                missing = offered - (defined(source) if source else set())
                sentences += [f"{face.path} offers {name} of {part}" for name in sorted(missing)]
    return sentences


def defined(module: Module) -> set[str]:
    """Return the names that a module binds at its top level."""
    names: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names


def test_a_face_offers_only_what_exists():
    """It is imported late: a name that is gone shows only when it is asked for."""
    assert absent(read_modules()) == []
    face = "__getattr__ = lazy_exports(__name__, {'part': 'a, b as c', 'none': 'd'})"
    made = [Module("x", "x/__init__.py", face), Module("x.part", "x/part.py", "a = 1")]
    assert absent(made) == ["x/__init__.py offers b as c of part", "x/__init__.py offers d of none"]


def test_the_package_table_is_the_packages():
    readme = (ROOT / "supervisor" / "README.md").read_text(encoding="utf-8")
    table = readme.partition("<!-- packages -->")[2].partition("<!-- /packages -->")[0]
    packages = {
        module.name.removeprefix("supervise.").replace(".", "/")
        for module in read_modules()
        if module.is_package and module.name.startswith("supervise.")
    }
    assert set(re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE)) == packages


KNOWN = frozenset(
    {"supervise.actions", "supervise.runtime", "supervise.core", "supervise.core.engine"}
)


def breaches(name: str, text: str) -> list[str]:
    path = "/".join(name.split(".")[name.startswith("supervise.") :]) + ".py"
    packages = KNOWN - {"supervise.core.engine"}
    module = Module(name, path, text, known=KNOWN | {"supervise_probe.wire"}, packages=packages)
    return [sentence for rule in RULES for sentence in rule(module)]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("supervise.detectors.x", "\nimport time\n", "x.py:2 imports time; pass it in as an event"),
        ("supervise.core.x", "def f():\n import os.path", "core/x.py:2 imports os.path; let"),
        ("supervise.core.x", "open('y')", "core/x.py:1 calls open(); this layer is pure"),
        ("supervise.core.x", "from .. import actions", "core/x.py:1 imports supervise.actions;"),
        ("supervise.actions.x", "from ..core import engine", "imports supervise.core.engine;"),
        ("supervise.actions.x", "from .stop import Stop", "imports supervise.actions.stop;"),
        ("supervise.store.journal", "from supervise_probe import wire", "store may not look"),
        ("supervise_probe.x", "import yaml", "imports yaml; the probe has the standard library"),
        ("supervise_probe.x", "def f():\n import torch.nn", "x.py:2 imports torch; find it in"),
        ("supervise_probe.x", "import supervise_probe", "imports supervise_probe by name"),
        ("supervise_offline.x", "import torch", "imports torch; what torch can do comes as an"),
        ("supervise_offline.x", "match 1:\n  case _: pass", "is not Python 3.9"),
        ("supervise.runtime", "def f():\n" + " x\n" * 60, "runtime.py:1 f() has 61 lines of its"),
        ("supervise.runtime", "#\n" * 901, "runtime.py has 901 lines, more than 900"),
        ("supervise.runtime", "x = 1", "runtime.py has no docstring"),
        ("supervise.core.x", "N = 3  # as gone.md has it", "core/x.py names gone.md, which is not"),
        ("tests.core.x", "from supervise.core import engine", "imports supervise.core.engine; imp"),
        ("supervise.cli.x", "click.echo(json.dumps(y))", "cli/x.py:1 calls click.echo(); use echo"),
        (
            "supervise.web.x",
            "def f(a):\n '''F.\n\n Args:\n     b: c.\n '''",
            "x.py:1 describes b, which is no",
        ),
    ],
)
def test_a_breach_is_one_sentence_with_its_place(name, text, sentence):
    """The rules themselves, on files with one fault each."""
    assert any(sentence in said for said in breaches(name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("supervise.core.x", "from .model import action\nfrom .. import errors"),
        ("supervise.runtime", "from . import actions\nfrom .core import engine\nimport time"),
        ("supervise.detectors.x", "from ._baseline import Baseline\nimport math"),
        ("supervise.store.run_records", "from supervise_probe import wire"),
        ("tests.core.x", "from supervise.core import step\nfrom supervise import core"),
        ("supervise_probe.hooks.install", "from . import wire\nimport zlib"),
        ("supervise.runtime", "def f():\n def g():\n" + "  x\n" * 50 + " x\n" * 50),
    ],
)
def test_what_is_allowed_is_left_alone(name, text):
    """The other side of each line, so that no rule passes by refusing everything."""
    assert breaches(name, f'"""What it is for."""\n{text}\n') == []


# ── the import contracts of pyproject.toml, which `make lint` checks ──────────────────────────────


LINT = Path(sys.executable).with_name("lint-imports")


@pytest.mark.slow
def test_imports_for_types_alone_break_the_contracts(tmp_path):
    probes = tmp_path / "probes"
    shutil.copytree(ROOT / "probes", probes, ignore=shutil.ignore_patterns("__pycache__"))
    for file, planted in (
        ("collectors/loss.py", "from ..probe import Probe"),
        ("torch_state/records.py", "from .learning_rate import LearningRate"),
    ):
        with (probes / "supervise_probe" / file).open("a") as text:
            text.write(f"\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {planted}\n")

    linted = subprocess.run(
        [LINT, "--config", ROOT / "pyproject.toml", "--no-cache"],
        env={**os.environ, "PYTHONPATH": f"{probes}:{ROOT / 'supervisor'}"},
        cwd=probes,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert linted.returncode == 1
    shown = re.sub(r"\s+", " ", linted.stdout)
    assert "collectors.loss -> supervise_probe.probe" in shown, shown
    assert "records -> .learning_rate" in shown, shown
