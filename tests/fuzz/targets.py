"""What is fuzzed: one function per surface, from bytes to nothing or a `SuperviseError`.

A target writes the bytes to where a hostile or broken writer could have put them, and then uses all
that reads them. Whatever else it raises is a finding, and so is an exit code nobody documented.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import quote

import httpx

from supervise.catalog import Problems, Source, load_policy, parse_yaml, plain_yaml, shipped_folder
from supervise.checkpoints import Register
from supervise.errors import StoreError
from supervise.runtime import RecoveredRun
from supervise.store import Audit, Journal, Quarantine, RunDir, verify_audit
from supervise.web import Page, Settings

from . import mutation
from .probed import (
    change_notices,
    change_segment,
    notice_seeds,
    segment_seeds,
    use_notices,
    use_segment,
)
from .recorded import POLICY, WALL, replaced, sample, say

SAID = (200, 202, 400, 404, 405, 503)  # answers of the page to a reader


@dataclass(frozen=True)
class Target:
    """One surface. `seeds` are sound inputs, `change` makes another of one, `use` reads it."""

    seeds: Callable[[Path], list[bytes]]
    change: Callable[[bytes, Random], bytes]
    use: Callable[[Path, bytes], None]


def use_page(home: Path, raw: bytes) -> None:
    target = raw.decode("utf-8", "replace").replace("?", "\0", 1).partition("\0")
    look(sample(home), (f"/{quote(target[0], safe='/%')}?{quote(target[2], safe='=&%')}",))


def look(run: RunDir, paths: Iterable[str] = ()) -> None:
    """Ask the page for all that it makes of a run: an answer, or a sentence."""
    page = Page(Settings(run.path.parent, cache=run.path.parent / "curves"))
    api = f"/api/run/{run.path.name}"
    asked = paths or (
        *("/api/runs", api, f"{api}/series?m=train_loss_raw&px=7", f"{api}/incident/inc-1"),
        *(f"/run/{run.path.name}/export.html", f"/api/compare?a={run.path.name}"),
    )

    async def ask() -> None:
        transport = httpx.ASGITransport(app=page.application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for path in asked:
                answer = await http.get(path)
                assert answer.status_code in SAID, (path, answer.status_code, answer.text)

    asyncio.run(ask())
    page.close()


def use_journal(home: Path, raw: bytes) -> None:
    run = sample(home)
    with replaced(run.journal_path / "00000.jrn", raw):
        for command in ("status", "replay", "export --csv", "why-not --rule spike --step 25"):
            say(*command.split(), str(run.path))
        with contextlib.suppress(StoreError):
            RecoveredRun.read(run, load_policy)
        look(run)
        Journal.open(run.journal_path).close()


def use_audit(home: Path, raw: bytes) -> None:
    run = sample(home)
    with replaced(run.audit_path, raw):
        for command in (
            *("audit verify", "audit show", "audit show --json", "status", "status --json"),
            *("why", "why --json", "replay", "events", "events --all --json --since 1h"),
            *("export --csv", "why-not --rule spike --step 25"),
        ):
            say(*command.split(), str(run.path))
        say("runs", "--runs", str(run.path.parent))
        look(run)
        with contextlib.suppress(StoreError):
            RecoveredRun.read(run, load_policy)
        try:
            Audit.open(run.audit_path, run.id, at_ns=1, wall=WALL).close()
            opened = verify_audit(run.audit_path)
            assert opened.status == "good" or not opened.records
        finally:
            for torn in run.path.glob("audit.log.truncated-*"):
                torn.unlink()


DOCUMENTS = ("state.json", "run.json", "launch.json", "checkpoints.json", "quarantine.json")


def use_status(home: Path, raw: bytes) -> None:
    name, _, content = raw.partition(b"\n")
    run = sample(home)
    if name.decode("ascii", "replace") not in DOCUMENTS:
        return
    with replaced(run.path / name.decode(), content):
        for command in ("status", "status --json", "checkpoints", "checkpoints --json", "why"):
            say(*command.split(), str(run.path))
        say("runs", "--json", "--runs", str(run.path.parent))
        look(run)
        for read in (lambda: Register(run.path), lambda: Quarantine(run.quarantine_path).read()):
            with contextlib.suppress(StoreError):
                read()


def use_policy(home: Path, raw: bytes) -> None:
    path = home / "policy.yaml"
    path.write_bytes(raw)
    say("policy", "check", "--json", str(path))
    load_policy(path)


def audit_seeds(home: Path) -> list[bytes]:
    whole = sample(home).audit_path.read_bytes()
    return [whole, mutation.chained([json.loads(line[65:]) for line in whole.splitlines()[:3]])]


def status_seeds(home: Path) -> list[bytes]:
    run = sample(home)
    quarantine = {"entries": [{"kind": "shard", "name": "a.tar"}, {"kind": "batch", "name": 7}]}
    found = [name.encode() + b"\n" + (run.path / name).read_bytes() for name in DOCUMENTS[:4]]
    return [*found, b"quarantine.json\n" + mutation.dumped(quarantine)]


def change_status(raw: bytes, chance: Random) -> bytes:
    name, _, content = raw.partition(b"\n")
    change = mutation.bitten if chance.random() < 0.3 else mutation.reworded
    return name + b"\n" + change(content, chance)


def policy_seeds(home: Path) -> list[bytes]:
    names = ("policies/observe.yaml", "policies/packs/hang.yaml", "runbooks/soften.yaml")
    found = [POLICY.encode(), (shipped_folder("policies") / "nano.yaml").read_bytes()]
    for name in names:
        folder, _, file = name.rpartition("/")
        found.append((shipped_folder(folder) / file).read_bytes())
    return found


def change_policy(raw: bytes, chance: Random) -> bytes:
    if chance.random() < 0.5:
        return mutation.bitten(raw, chance)
    root = parse_yaml(Source("p", raw.decode("utf-8", "replace")), Problems())
    if root is None:
        return mutation.bitten(raw, chance)
    return json.dumps(mutation.twisted(plain_yaml(root), chance), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


TARGETS: dict[str, Target] = {
    "segment": Target(segment_seeds, change_segment, use_segment),
    "notices": Target(notice_seeds, change_notices, use_notices),
    "journal": Target(
        lambda home: [(sample(home).journal_path / "00000.jrn").read_bytes()],
        mutation.of_journal,
        use_journal,
    ),
    "audit": Target(audit_seeds, mutation.of_audit, use_audit),
    "status": Target(status_seeds, change_status, use_status),
    "policy": Target(policy_seeds, change_policy, use_policy),
    "page": Target(
        lambda home: [
            b"api/run/run/series?m=train_loss_raw&x=step&lo=1&hi=1e9&px=10&rank=0&from=3",
            b"api/compare?a=run@1&b=run",
            b"run/run/incident/inc-1/evidence/snapshot-1/host.json",
        ],
        mutation.bitten,
        use_page,
    ),
}
