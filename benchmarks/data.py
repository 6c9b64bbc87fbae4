"""How fast and how right is `supervise data check`? Measured on one core; writes `data.md`.

    python benchmarks/data.py [--only speed,recall,memory,stop] [--gigabytes 2]

The corpus is the standard library of this Python as JSON lines, with its tests. Speeds are bytes of
text over CPU time of the process; datasketch's MinHash is measured on the same documents in the
same run, and datatrove's where it can be imported: `pip install datatrove spacy 'xxhash<4'`. Recall
is over all pairs with a Jaccard similarity of 0.8 or more, by counting shared 5-grams. Memory is a
limit of the process (`RLIMIT_DATA`), half of a corpus made longer by changing terms. A check is
killed at ten moments and goes on each time, of a small corpus and of that one; its manifest must be
that of a check that was not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from supervise.data import BuildCheck, Request, judge_numbers

HERE = Path(__file__).resolve().parent
TABLE, RESULTS = HERE / "data.md", "data.json"
GOALS = {"cheap": 20.0, "full": 5.0, "recall": 0.97}
EDITS = (0.0, 0.005, 0.01, 0.02, 0.04)


def library_texts() -> list[str]:
    """Return the sources of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = (p for p in sorted(folder.rglob("*.py")) if "site-packages" not in p.parts)
    return [t for p in paths if len(t := p.read_text("utf-8", "replace")) > 200]


def write_corpus(path: Path, texts: Sequence[str]) -> int:
    """Write JSON lines; return the bytes of the texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    return sum(len(text.encode()) for text in texts)


def cpu_of(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def check(data: Path, level: str, work: Path) -> BuildCheck:
    request = Request(paths=(data,), level=level)
    checking = BuildCheck(request, work)
    checking.run(lambda done, total, note: None)
    return checking


def measure_speed(home: Path) -> dict[str, float]:
    texts = library_texts()
    size = write_corpus(home / "data/library.jsonl", texts) / 1e6
    result = {"corpus_mb": size, "documents": float(len(texts))}
    check(home / "data", "full", home / "warm")  # imports and tables are not its speed

    for level in ("cheap", "full"):
        result[level] = size / cpu_of(
            lambda level=level: judge_numbers(
                check(home / "data", level, home / level).manifest(), None
            )
        )
    result["near copies alone"] = 1.0 / (1.0 / result["full"] - 1.0 / result["cheap"])
    sample = texts[:: max(1, len(texts) // 300)]
    sample_size = sum(len(text.encode()) for text in sample) / 1e6
    result["datasketch"] = sample_size / cpu_of(lambda: sign_by_datasketch(sample))
    try:
        result["datatrove"] = sample_size / cpu_of(lambda: sign_by_datatrove(sample))
    except Exception as error:
        print(f"datatrove cannot be measured: {error}")
    return result


def shingles(text: str) -> list[str]:
    terms = re.findall(r"\w+", text.lower())
    return [" ".join(terms[i : i + 5]) for i in range(max(1, len(terms) - 4))]


def sign_by_datasketch(texts: Sequence[str]) -> None:
    from datasketch import MinHash

    for text in texts:
        MinHash(128).update_batch([shingle.encode() for shingle in shingles(text)])


def sign_by_datatrove(texts: Sequence[str]) -> None:
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    step = MinhashDedupSignature(output_folder=tempfile.mkdtemp(), config=MinhashConfig(n_grams=5))
    for text in texts:
        step.get_signature(step.get_shingles(text))


def measure_recall(home: Path) -> dict[str, float]:
    """Documents that are not the first of a set of near copies: found, of all there are."""
    rng = random.Random(0)
    texts = library_texts()[::3]
    for i, text in enumerate(texts[:500]):
        share = EDITS[i % len(EDITS)]
        terms = [t if rng.random() >= share else f"v{rng.randrange(9**5)}" for t in text.split(" ")]
        texts.append(" ".join(terms))
    rng.shuffle(texts)
    write_corpus(home / "recall/data.jsonl", texts)
    manifest = check(home / "recall", "full", home / "recall-work").manifest()
    sets = [{*shingles(text)} for text in texts]
    owners: dict[str, list[int]] = {}
    for number, grams in enumerate(sets):
        for gram in grams:
            owners.setdefault(gram, []).append(number)
    shared: Counter[tuple[int, int]] = Counter()
    for numbers in owners.values():
        if len(numbers) <= 60:  # of a gram in more documents: licences; pairs share others
            shared.update(itertools.combinations(numbers, 2))
    parents = [*range(len(texts))]

    def root(number: int) -> int:
        while parents[number] != number:
            number = parents[number]
        return number

    pairs = 0
    for (a, b), common in shared.items():
        if common >= 0.5 * max(len(sets[a]), len(sets[b])):
            both = len(sets[a] & sets[b])
            if both >= 0.8 * (len(sets[a]) + len(sets[b]) - both):
                pairs += 1
                parents[root(b)] = root(a)
    exact = len(texts) - len({root(number) for number in range(len(texts))})
    found = manifest.duplicates.near or 0
    return {
        "pairs": float(pairs),
        "copies": float(exact),
        "found": float(found),
        "recall": found / exact,
    }


def command(data: Path, *argv: object) -> list[str]:
    return [sys.executable, "-m", "supervise", "data", "check", *map(str, (data, *argv)), "-q"]


def measure_memory(home: Path, gigabytes: float) -> dict[str, float]:
    rng = random.Random(1)
    texts, size, number = library_texts(), 0, 0
    (home / "large").mkdir()
    while size < gigabytes * 1e9:
        with (home / f"large/part-{number:03d}.jsonl").open("w") as file:
            for text in texts:
                terms = text.split(" ")
                for position in rng.sample(range(len(terms)), len(terms) // 8):
                    terms[position] = f"v{rng.randrange(9**6)}"
                changed = " ".join(terms)
                size += len(changed)
                file.write(json.dumps({"text": changed}) + "\n")
        number += 1
    start, limit = time.monotonic(), int(size / 2)
    whole = home / "large.json"
    returncode = start_limited(home / "large", whole, limit).wait()
    took_s = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert returncode in (0, 1), f"exit code {returncode}"
    stops = compare_stopped(home / "large", whole, took_s / 16.0, limit)
    return {
        "gigabytes": size / 1e9,
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
        "minutes": took_s / 60,
        "cpu_mb_per_s": size / 1e6 / (usage.ru_utime + usage.ru_stime),
        **stops,
    }


def start_limited(data: Path, manifest: Path, limit: int) -> subprocess.Popen[bytes]:
    """Start a check that may use so many bytes of memory."""
    return subprocess.Popen(
        command(data, "--manifest", manifest),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def compare_stopped(data: Path, whole: Path, mean_s: float, limit: int) -> dict[str, float]:
    """Kill a check after about `mean_s` each time, ten times at most; compare the manifests."""
    resumed, rng, kills = whole.with_name("resumed.json"), random.Random(3), 0
    while True:
        job = start_limited(data, resumed, limit)
        try:
            returncode = job.wait(timeout=rng.uniform(0.3, 1.7) * mean_s if kills < 10 else None)
            break
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGKILL)
            job.wait()
            kills += 1
    assert returncode in (0, 1), f"exit code {returncode}"
    return {"kills": float(kills), "same": float(whole.read_bytes() == resumed.read_bytes())}


def measure_stops(home: Path) -> dict[str, float]:
    texts = library_texts()
    for number in range(12):
        write_corpus(home / f"stop/part-{number:02d}.jsonl", texts[number::12])
    subprocess.run(command(home / "stop", "--manifest", home / "whole.json"))
    return compare_stopped(home / "stop", home / "whole.json", 3.5, resource.RLIM_INFINITY)


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the page."""
    lines = [
        "# Training data: speed, recall, memory",
        "",
        "Written by `python benchmarks/data.py`: one core, CPU time, the standard library of",
        "Python as JSON lines. The machine was shared with other work.",
        "",
        "| what | value | goal |",
        "|---|---:|---:|",
    ]
    speed = results.get("speed", {})
    names = {
        "cheap": "`--level cheap`, MB/s",
        "full": "`--level full`, MB/s",
        "near copies alone": "what near copies and stretches cost in it, MB/s",
        "datasketch": "datasketch 128 signatures alone, same documents, MB/s",
        "datatrove": "datatrove signatures alone, same documents, MB/s",
    }
    for key, name in names.items():
        if key in speed:
            lines.append(f"| {name} | {speed[key]:.1f} | {GOALS.get(key, '')} |")
    if recall := results.get("recall"):
        text = f"near copies found, of {recall['copies']:.0f} in {recall['pairs']:.0f} exact pairs"
        lines.append(f"| {text} | {recall['recall']:.4f} | {GOALS['recall']} |")
    if memory := results.get("memory"):
        gigabytes = memory["gigabytes"]
        text = f"peak memory on {gigabytes:.2f} GB under a limit of half of it, MB"
        lines.append(f"| {text} | {memory['peak_mb']:.0f} | {gigabytes * 500:.0f} |")
        lines.append(f"| the same, MB/s | {memory['cpu_mb_per_s']:.1f} | |")
    for stops, what in ((results.get("stop"), ""), (memory, " under this limit")):
        if stops:
            same = "the same" if stops["same"] else "another"
            text = f"manifest after {stops['kills']:.0f} kills{what}"
            lines.append(f"| {text} | {same} | the same |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="speed,recall,memory,stop")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / RESULTS)
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    measures = {
        "speed": measure_speed,
        "recall": measure_recall,
        "memory": lambda home: measure_memory(home, options.gigabytes),
        "stop": measure_stops,
    }
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measures[name](Path(folder))
        print(name, results[name], flush=True)
        options.results.write_text(json.dumps(results))
    TABLE.write_text(table(results))


if __name__ == "__main__":
    main()
