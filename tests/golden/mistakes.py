"""What people read of a mistake: each message with its place, of policies with one mistake each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from supervise.catalog import PolicyErrors, load_policy, shipped_folder

from ..catalog.conftest import BASE, GOOD, HEAD, ONE, TEAM, VERSION, pointed

# What is put in the place of what, in the good policy; ¦: a message is about this very place.
CHANGES = [
    ("mode: enforce", "¦moed: enforce"),
    ("version: supervise/v1\n", "¦"),
    ("supervise/v1", "¦supervise/v2"),
    ("mode: enforce", "mode: ¦enforced"),
    ("mode: enforce", "approvals: {¦clam: {}}"),
    ("mode: enforce", "job: {on_crash: ¦clam}"),
    ("mode: enforce", "job: {on_crash: ¦hold}"),
    ("mode: enforce", "job: {on_crash: ¦restart}"),
    ("mode: enforce", "job: {relaunch: {args: ['--resume=¦{chekpoint}']}}"),
    ("mode: enforce", "planned: [{from: 5, to: ¦4, what: x}]"),
    ("all: {max: 6}", "all: {max: ¦1001}"),
    ("run: calm", "see: ¦hnag"),
    ("run: calm", "see: ¦hold"),
    ("mode: enforce", "use: [hang, ¦hang]"),
    ("gt: 12.0", "gt: ¦12s"),
    ("mode: enforce", "hold_reminder: ¦30"),
    ("mode: enforce", "baseline: {window: 10, min: ¦11}"),
    ("kind: threshold", "kind: ¦treshold"),
    ("kind: threshold, metric: t", "metric: t"),
    ("metric: train_loss_raw", "metric: ¦''"),
    ("run: calm", "run: ¦rollback"),
    ("mode: enforce", "notify: {heartbeat: {url_env: HC, every: ¦0s}}"),
    ("mode: enforce", "notify: {page: {url: ¦'https://a.example/?token=x'}}"),
    ("gt: 12.0", "gte: ¦1, gt: 12.0"),
    ("gt: 12.0", "gt: 12.0, clear: ¦13"),
    ("gt: 12.0", "gt: 12.0, m_of_n: ¦[5, 3]"),
    ("gt: 12.0", "gt: 12.0, ¦metric: x"),
    ("wild:", "not:"),
    ("when: high and wild", "when: high and ¦wid"),
    ("when: high and wild", "when: ¦(high"),
    ("id: dead", "id: ¦spike"),
    ("sev: SEV0", "sev: ¦sev0"),
    ("[snapshot, {lr", "[¦{rollback: {at_least: 1}}, {lr"),
    ("[snapshot, {lr", "[¦pause, snapshot, {lr"),
    (", verify]", "]"),
    (
        "[snapshot, {lr_scale: {set: 0.5}}, verify]",
        "{steps: [snapshot, {lr_scale: {set: 0.5}}, verify], if_refused: ¦calm}",
    ),
    ("[snapshot, {lr", "[¦verify, {lr"),
    ("[snapshot, {lr", "[snapshot, stop, ¦{lr"),
    ("[snapshot, {lr", "[snapshot, ¦hold, {lr"),
    (", verify]", ", hold]"),
    ("[snapshot, {lr_scale: {set: 0.5}}, verify]", "{steps: [snapshot, hold], if_it_fails: ¦sev0}"),
    ("mode: enforce", "escalate: {ladder: [¦hold-for-config, calm]}"),
    ("mode: enforce", "job: {on_crash: ¦hold-for-config}"),
    ("calm: [snapshot, {lr_scale: {set: 0.5}}, verify]", "calm: ¦[]"),
    ("set: 0.5", "set: ¦2"),
    ("{lr_scale: {set: 0.5}}", "¦lr_scale"),
    ("{lr_scale: {set: 0.5}}", "¦{pause: , resume: }"),
    ("  calm:", "  ¦Calm: [notify]\n  calm:"),
    (", lr_scale: {max: 2, per: 5000}", ""),
    ("all: {max: 6}, ", ""),
    ("mode: enforce", "escalate: {ladder: [calm, ¦nix]}"),
    ("mode: enforce", "escalate: {ladder: [¦hold, calm]}"),
    ("mode: enforce", "escalate: {ladder: [calm, ¦calm]}"),
    ("mode: enforce", "inhibit: [{by_rule: dead, mute: [¦dead]}]"),
    ("mode: enforce", "inhibit: [{by_rule: spike, mute: [¦dead]}]"),
    ("sev: SEV0, for: 3}", "sev: SEV2}\ninhibit:\n  - {by_rule: dead, mute: [¦spike]}"),
    ("mode: enforce", "inhibit: [¦{mute: [spike]}]"),
    ("mode: enforce", "inhibit: [¦{by_rule: dead, mute: []}]"),
    ("sev: SEV0", "sev: SEV0, phases: {¦earl: off}"),
    ("sev: SEV0", "sev: SEV0, phases: {late: ¦SEV3}"),
    ("sev: SEV0", "sev: SEV1, phases: {late: SEV0}}\ninhibit:\n  - {by_rule: spike, mute: [¦dead]"),
    ("sev: SEV0", "sev: SEV1, phases: {early: off}}\ninhibit:\n  - {by_rule: dead, mute: [¦spike]"),
    ("mode: enforce", "notify: {webhook: {url_env: U, allow_http: ¦maybe}}"),
    ("mode: enforce", "use: ¦hang"),
    ("mode: enforce", "notify: {¦slak: {}}"),
    ("mode: enforce", "notify: {slack: {¦url: x}}"),
    ("mode: enforce", "machine: ¦{any: {exited: halted}}"),
    ("  calm:", "  hold: ¦[notify]\n  calm:"),
]
# A policy that uses a shipped pack or runbook, by the file.
FILES = {
    "packs/hang.yaml": HEAD + "use: [hang]\n",
    "runbooks/soften.yaml": HEAD
    + ONE
    + "rules: [{id: r, when: a, sev: SEV1, run: soften}]\nsavepoints: {every: 9}\n"
    "budgets: {all: {max: 1}, lr_scale: {max: 1}, rollback: {max: 1}}\n",
}
HANG, SOFTEN = FILES
FILE_CHANGES = [
    (HANG, "pack: hang", "pack: hung"),
    (HANG, "when: stalled", "when: gone"),
    (HANG, "id: stuck", "id: stalled"),
    (HANG, "min: 120s", "min: 120"),
    (HANG, "p99_multiple: 8", "p99_multiple: 8s"),
    (HANG, "run: stop-and-page", "run: stop-and-pag"),
    (SOFTEN, "runbook: soften", "runbook: softer"),
    (SOFTEN, "  - snapshot\n", "  - snapshto\n"),
    (SOFTEN, "verify: {", "verfy: {"),
    (SOFTEN, "within: 200", "within: 5"),
    (SOFTEN, "  - snapshot\n", "  - snapshot\n  - verify\n"),
    (SOFTEN, "if_it_fails: h", "if_it_fails: x"),
    (SOFTEN, "meaning: Pr", "meaning: oops: Pr"),
]

# What a policy with a base says, and the files beside it.
EXTENDING: list[tuple[str, dict[str, str]]] = [
    ("extends: nanno", {}),
    ("extends: team", {"team.yaml": BASE}),
    ("extends: ../team.yaml", {}),
    ("extends: a.yaml", {"a.yaml": VERSION + "extends: p.yaml\n"}),
    ("extends: base.yaml\noverride: {own.lod: {gt: 2.0}}", TEAM),
    ("extends: base.yaml\noverrid: {high: {gt: 2.0}}", TEAM),
    ("extends: base.yaml\nremove: [own.mino]", TEAM),
    ("extends: base.yaml\ndetectors: {high: {kind: nonfinite, metrics: [train_loss_raw]}}", TEAM),
    ("extends: base.yaml\nuse: amp", TEAM),
    ("extends: base.yaml", {**TEAM, "base.yaml": BASE.replace("gt: 12.0", "gtt: 12.0")}),
    (
        "extends: base.yaml\njob: {relaunch: {}}\nuse: [nonfinite]",
        {**TEAM, "base.yaml": BASE.replace("restart: {max: 1}, ", "")},
    ),
    ("extends: packs/base.yaml", {"packs/base.yaml": VERSION + "pack: base\n"}),
]


def _told(text: str, files: Mapping[str, str]) -> Iterator[str]:
    """Yield what is said of a policy and the files beside it."""
    with TemporaryDirectory() as home:
        for name, content in {**files, "p.yaml": text}.items():
            path = Path(home, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        try:
            load_policy(Path(home, "p.yaml"))
        except PolicyErrors as error:
            for problem in error.problems:
                hint = f" ({problem.hint})" if problem.hint else ""
                line = f"    {problem.location}: {problem.message}{hint}"
                yield line.replace(f"{home}/", "").replace(str(shipped_folder("policies")), "HOME")


def _texts() -> Iterator[str]:
    for old, new in CHANGES:
        assert old in GOOD
        text, places = pointed(GOOD.replace(old, new, 1))
        told = [*_told(text, {})]
        for place in places:
            assert any(line.startswith(f"    p.yaml:{place}") for line in told), (new, told)
        yield from [f"== {old!r} -> {new!r}", *told]
    for file, old, new in FILE_CHANGES:
        folder, _, name = file.partition("/")
        shipped = shipped_folder("policies/packs" if folder == "packs" else folder) / name
        content = shipped.read_text("utf-8")
        assert old in content
        told = [*_told(FILES[file], {file: content.replace(old, new, 1)})]
        yield from [f"== {file}: {old!r} -> {new!r}", *told]
    for line, files in EXTENDING:
        changed = [name for name in files if files[name] != TEAM.get(name)]
        yield from [f"== {line!r} {changed}", *_told(f"{VERSION}{line}\n", files)]


def mistakes() -> str:
    """Return the whole file."""
    return "\n".join(_texts()) + "\n"
