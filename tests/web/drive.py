"""The page in real browsers, seven kinds of runs, four widths, light and dark: `make page`.

    python tests/web/drive.py [--again] [--only TEXT]

Insists of each page: no message in the console, no request to another host, nothing wider than the
window, no serious or critical finding of axe. Runs and screenshots are kept in `.cache/page`; look
at the screenshots. Where Firefox is installed, three pages are opened there as well. `--again`
makes the runs anew, `--only` opens pages with TEXT in their name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / ".cache" / "page"
RUNS, SHOTS = HERE / "runs", HERE / "screenshots"
PACKAGES = ("puppeteer-core@24", "axe-core@4")
BROWSERS = {
    "chrome": ("chromium", "chromium-browser", "google-chrome"),
    "firefox": ("firefox", "firefox-esr"),
}
NANO = "examples/nano"
WIDTHS, SCHEMES = (390, 768, 1280, 1920), ("light", "dark")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def supervised(name: str, *options: str, steps: int, launcher: str = sys.executable) -> list[str]:
    """Return the command of a run of the example."""
    return [
        *(sys.executable, "-m", "supervise", "-q", "--run-dir", str(RUNS / name), *options, "--"),
        *(*launcher.split(), f"{NANO}/train.py", "--steps", str(steps)),
        *("--checkpoint-every", "50", "--out", str(HERE / "out" / name)),
    ]


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start a command, whose output is kept."""
    HERE.mkdir(parents=True, exist_ok=True)
    with (HERE / "output.txt").open("a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRON, stdout=log, stderr=log, text=True)


def wait_for_step(name: str, step: int) -> None:
    """Wait until a run has made a step."""
    state = RUNS / name / "state.json"
    for _ in range(600):
        if state.exists() and json.loads(state.read_text()).get("step", -1) >= step:
            return
        time.sleep(0.2)
    sys.exit(f"{name} does not come to step {step}: see {HERE / 'output.txt'}")


def make_runs() -> None:
    """Make the runs that are over."""
    policy = f"{NANO}/policy.yaml"
    torchrun = str(Path(sys.executable).with_name("torchrun")) + " --nproc-per-node 2"
    slow = "slow_input:seconds=0.3,rank=1@60"
    for command in (
        supervised("finished", "-p", "nano", steps=150),
        supervised("rollback", "-p", policy, "--drill", "lr_spike@150", steps=300),
        supervised("crash", "-p", policy, "--drill", "crash@120", steps=200),
        supervised("ranks", "-p", policy, "--drill", slow, steps=120, launcher=torchrun),
    ):
        start(command).wait()
    killed = start(supervised("killed", "-p", "nano", steps=250))
    wait_for_step("killed", 80)
    killed.kill()
    killed.wait()
    collected = HERE / "gc" / "collected"
    shutil.copytree(RUNS / "finished", collected)
    gc = [sys.executable, "-m", "supervise", "gc", "--older-than", "0s", "--keep", "0"]
    start([*gc, str(collected.parent)]).wait()
    collected.rename(RUNS / "collected")


@contextmanager
def serving():
    """Serve the runs; yields the address without the page."""
    command = [sys.executable, "-m", "supervise", "web", str(RUNS), "--no-token"]
    command += ["--cache", str(HERE / "cache")]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = next(filter(None, (re.search(r"http://\S+/", line) for line in server.stderr)))
        yield address[0]
    finally:
        server.terminate()
        server.wait()


def is_run(path: Path) -> bool:
    return (path / "run.json").exists()


def pages() -> dict[str, str]:
    """Return name -> path of each page that is looked at."""
    incident = "run/rollback/incident/inc-1/"
    return {
        "runs": "",
        **{path.name: f"run/{path.name}/" for path in sorted(RUNS.iterdir()) if is_run(path)},
        "ranks-all": "run/ranks/?board=efficiency&rank=all&x=time",
        "board-data": "run/rollback/?board=data&x=tokens",
        "board-quality": "run/rollback/?board=quality",
        "board-all": "run/rollback/?board=all&q=norm&smooth=0",
        "incident": incident,
        "incident-crash": "run/crash/incident/inc-1/",
        "record": "run/rollback/record.html",
        "export": (HERE / "export.html").as_uri(),
        "compare": "compare/?a=rollback&b=crash&c=finished",
    }


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    installed = {
        name: path
        for name, programs in BROWSERS.items()
        if (path := next(filter(None, map(shutil.which, programs)), None))
    }
    if "chrome" not in installed or not shutil.which("npm"):
        sys.exit("this needs a browser and npm: apt install chromium nodejs npm")
    if options.again:
        shutil.rmtree(HERE, ignore_errors=True)
    SHOTS.mkdir(parents=True, exist_ok=True)
    if not (HERE / "node_modules").exists():
        install = ["npm", "install", "--no-audit", "--no-fund", "--no-save", *PACKAGES]
        subprocess.run(install, cwd=HERE, check=True)
    if not (RUNS / "collected").exists():
        make_runs()
    export = [sys.executable, "-m", "supervise", "web", str(RUNS / "rollback"), "--export"]
    start([*export, str(HERE / "export.html")]).wait()
    shutil.rmtree(RUNS / "live", ignore_errors=True)
    live = start(supervised("live", "-p", "nano", steps=100_000))
    try:
        wait_for_step("live", 30)
        jobs = [
            {"name": f"{name}-{width}-{scheme}", "path": path, "width": width, "scheme": scheme}
            for name, path in pages().items()
            for width in WIDTHS
            for scheme in SCHEMES
        ]
        jobs = [{**job, "browser": "chrome"} for job in jobs]
        for name in ("rollback", "incident", "live") if "firefox" in installed else ():
            job = {"path": pages()[name], "width": 1280, "scheme": "light", "browser": "firefox"}
            jobs.append({"name": f"{name}-firefox", **job})
        jobs = [job for job in jobs if options.only in str(job["name"])]
        with serving() as address:
            check = ["node", str(Path(__file__).with_name("check.mjs")), address, str(SHOTS)]
            environ = {**os.environ, "BROWSERS": json.dumps(installed)}
            found = subprocess.run(
                check, cwd=HERE, env=environ, input=json.dumps(jobs), text=True, check=False
            )
    finally:
        live.terminate()
        live.wait()
    print(f"screenshots: {SHOTS}")
    return found.returncode


if __name__ == "__main__":
    sys.exit(main())
