"""The gate of a build: planted faults fail it, another build passes, a stopped check resumes."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy
import pytest

from supervise.cli import invoke
from supervise.data import manifest_schema
from tests.support.waiting import wait_until

from .conftest import texts, write_lines
from .test_corpus import megatron

ENGLISH = (
    "the committee met again in spring and talked about the old harbour",
    "people who had lived there for years remembered the storm very well",
    "it was not clear whether the new rules would apply to small boats",
    "most of them agreed that something should be done before winter came",
    "she wrote a long letter to her brother and asked him for advice",
    "nothing in the report explained how the money had been spent",
)


def prose(count: int, seed: int) -> list[str]:
    """Return English documents with terms of their own, no two alike."""
    drawn = texts(count, seed, 8, 26)
    return [
        " ".join(f"{ENGLISH[(i + n) % 6]} {term}," for n, term in enumerate(text.split()))
        for i, text in enumerate(drawn)
    ]


def corpus(folder: Path, seed: int, count: int = 420) -> Path:
    """Write two sources, one of them twice as large."""
    docs = prose(count, seed)
    write_lines(folder / "web/part-00.jsonl", docs[: count * 2 // 3])
    write_lines(folder / "books/part-00.jsonl", docs[count * 2 // 3 :])
    return folder


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A corpus with its held-out set and its manifest; checked once for all faults."""
    home = tmp_path_factory.mktemp("build")
    corpus(home / "data", 1)
    write_lines(home / "val/a.jsonl", prose(60, 77))
    (home / "scorer.py").write_text("def score(texts):\n    return ['idiot' in t for t in texts]\n")
    (home / "rejects.json").write_text('{"length": {"dropped": 300, "total": 3000}}')
    sys.path.append(str(home))
    yield home
    sys.path.remove(str(home))


def given(home: Path) -> list[object]:
    return ["--val", home / "val", "--toxicity", "scorer:score"]


@pytest.fixture
def base(build, check):
    path = build / "base.json"
    if not path.exists():
        rejects = ("--rejects", build / "rejects.json")
        done = check(build / "data", *given(build), *rejects, "--manifest", path)
        assert done.code == 0, done.document["findings"]
    return path


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("mix", "mix"),
        ("language", "language"),
        ("binary", "junk"),
        ("truncate", "length"),
        ("dup", "duplicates"),
        ("leak", "leak"),
        ("repeat", "hotspots"),
        ("pii", "pii_kind"),
        ("toxic", "toxic_data"),
        ("drop", "rows"),
        ("filter", "rejects"),
    ],
)
def test_a_planted_fault_fails_the_gate_by_its_rule(
    fault, rule, build, base, tmp_path, check, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    copy = "." if fault == "filter" else tmp_path / "copy"
    rejects = build / "rejects.json"
    argv = ["data", "drill", fault, build / "data", copy, "--val", build / "val"]
    assert invoke([*map(str, [*argv, "--rejects", rejects])]) == 0
    shown = capsys.readouterr().out
    assert f"expected: rule data_build.{rule}" in shown
    next_argv = shlex.split(shown.partition("next: supervise data check ")[2])
    next_argv = [str(base) if a == "MANIFEST" else a for a in next_argv]
    next_argv = ["scorer:score" if a == "MODULE:FUNCTION" else a for a in next_argv]

    done = check(*next_argv)

    assert done.code == 1
    assert rule in done.fired


@pytest.mark.parametrize(
    ("options", "fault", "rule"),
    [
        (("--text-field", "body", "--source-field", "origin"), "truncate", "length"),
        (("--eos", "7", "--dtype", "uint32"), "drop", "rows"),
        (("--pad", "0", "--eos", "7"), "drop", "rows"),
    ],
)
def test_a_copy_is_read_as_the_original(options, fault, rule, tmp_path, check, capsys):
    """What is meant by fields and ids is said in one way, and said again by the next command."""
    data, copy, base = tmp_path / "data", tmp_path / "copy", tmp_path / "base.json"
    if "--text-field" in options:
        rows = [{"body": text, "text": "x", "origin": "web"} for text in prose(300, 8)]
        write_lines(data / "a.jsonl", rows)
    else:
        ids = numpy.random.default_rng(1).integers(8, 5000, 60_000)
        ids[::150], ids[1::150] = 7, 0
        data.mkdir()
        ids.astype("<u4" if "--dtype" in options else "<u2").tofile(data / "a.bin")
    whole = check(data, *options, "--manifest", base)
    capsys.readouterr()
    assert invoke(["data", "drill", fault, str(data), str(copy), *options]) == 0
    argv = shlex.split(capsys.readouterr().out.partition("next: supervise data check ")[2])

    done = check(*[str(base) if argument == "MANIFEST" else argument for argument in argv])

    assert {*options} <= {*argv} and rule in done.fired
    if fault == "drop":
        assert done.metrics["doc_count"] < whole.metrics["doc_count"]
    if "--pad" in options:
        fractions = [outcome.metrics["pad_fraction"] for outcome in (done, whole)]
        assert fractions[0] == pytest.approx(fractions[1], rel=0.05) and fractions[1] > 0.5


def test_another_build_of_the_same_kind_passes_and_so_does_the_same(build, base, tmp_path, check):
    corpus(tmp_path / "data", 2, 441)

    same = check(build / "data", *given(build), "--baseline", base)
    other = check(tmp_path / "data", *given(build), "--baseline", base)

    assert (same.code, same.fired) == (0, set())
    assert (other.code, other.fired) == (0, set())


def test_a_mix_whose_sources_have_other_names_is_not_compared(build, base, tmp_path, check):
    """As a baseline of a check that took folders of shards for sources: the data is the same."""
    document = base.read_text().replace('"web"', '"000"').replace('"books"', '"001"')
    (tmp_path / "old.json").write_text(document)

    done = check(build / "data", *given(build), "--baseline", tmp_path / "old.json")

    assert "mix" not in done.fired and "source_mix_shift" not in done.metrics
    assert "they have other names" in done.document["unknown"]["source_mix_shift"]


def test_a_manifest_has_its_schema_and_no_path_of_the_machine(build, base):
    document = json.loads(base.read_text())

    jsonschema.validate(document, manifest_schema())
    assert str(build) not in base.read_text()


def test_open_files_do_not_grow_with_the_pieces(tmp_path, check):
    docs = prose(90, 6)
    for number, text in enumerate(docs):
        write_lines(tmp_path / f"d/{number}.jsonl", [text, docs[0]])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len([*Path("/proc/self/fd").iterdir()]) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        done = check(tmp_path / "d", "--level", "cheap")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert done.metrics["dup_cluster_max"] == 91


# ── stops ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_check_that_is_killed_and_one_in_parts_and_by_two_processes_give_one_manifest(
    tmp_path, check, capsys
):
    """Killed when the first results are there; what was measured is not read again."""
    data = tmp_path / "data"
    for source in range(4):
        write_lines(data / f"s{source}/a.jsonl", prose(200, source))
    whole, work = tmp_path / "whole.json", tmp_path / "work"
    assert check(data, "--manifest", whole).code == 0
    assert not whole.with_name("whole.json.parts").exists()

    argv = [sys.executable, "-m", "supervise", "data", "check", data, "--work", work]
    job = subprocess.Popen([*map(str, argv)], stdout=subprocess.DEVNULL)
    wait_until(lambda: list(work.glob("*.msgpack")))
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    ages = {path: path.stat().st_mtime_ns for path in work.glob("*.msgpack")}
    check(data, "--work", work, "--manifest", tmp_path / "resumed.json")
    assert {path: path.stat().st_mtime_ns for path in ages} == ages
    for part in ("1/2", "0/2"):
        argv = ["data", "check", data, "--work", tmp_path / "shared", "--part", part]
        assert invoke([*map(str, argv), "--manifest", str(tmp_path / "own.json")]) == 0
    printed = capsys.readouterr().out
    assert "next: supervise data check" in printed and printed.count("--manifest") == 1
    check(data, "--work", tmp_path / "shared", "--manifest", tmp_path / "parts.json")
    check(data, "--jobs", 2, "--manifest", tmp_path / "two.json")

    for name in ("resumed", "parts", "two"):
        assert (tmp_path / f"{name}.json").read_bytes() == whole.read_bytes(), name


@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads what it must not"
)
def test_what_could_not_be_read_is_read_again_by_the_next_check(tmp_path, check):
    """In the folder of results, also of a part; what was read is not."""
    data, work = tmp_path / "data", ("--work", tmp_path / "work", "--level", "cheap")
    docs = prose(40, 1)
    for name, lines in (("a", docs[:20]), ("b", docs[20:])):
        write_lines(data / f"{name}.jsonl", lines)
    argv = [sys.executable, "-m", "supervise", "data", "check", data, *work]
    as_user = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    argv = [*as_user, *map(str, argv)]
    (data / "b.jsonl").chmod(0)

    part = subprocess.run([*argv, "--part", "0/1"], check=False).returncode
    failed = subprocess.run(argv, check=False, capture_output=True, text=True)
    (data / "b.jsonl").chmod(0o644)
    results = [p for p in (tmp_path / "work").glob("*.msgpack") if ".passing" not in p.name]
    ages = [path.stat().st_mtime_ns for path in results]
    done = check(data, *work, "--manifest", tmp_path / "again.json")

    assert part == 0 and failed.returncode == 1 and "1 damaged records" in failed.stdout
    assert done.code == 0 and done.metrics["doc_count"] == 40
    assert len(ages) == 1 and ages == [path.stat().st_mtime_ns for path in results]
    check(data, "--level", "cheap", "--manifest", tmp_path / "whole.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_a_piece_is_measured_again_where_its_index_or_its_form_is_another(tmp_path, check):
    """The same bytes, as pairs of Megatron and as a flat file."""
    (tmp_path / "data").mkdir()
    megatron(tmp_path / "data")
    write_lines(tmp_path / "data/z.jsonl", prose(5, 1))
    work = ("--work", tmp_path / "work", "--level", "cheap")
    whole = check(tmp_path / "data", *work).metrics
    (index,) = (tmp_path / "data").glob("*.idx")

    index.write_bytes(index.read_bytes()[:40])
    broken = check(tmp_path / "data", *work).metrics
    index.unlink()
    flat = check(tmp_path / "data", *work).metrics

    assert whole["damaged_rate"] == 0 and broken["damaged_rate"] > 0
    assert flat["doc_count"] != whole["doc_count"]


def test_results_of_another_release_or_of_another_version_are_not_taken(
    tmp_path, check, monkeypatch
):
    write_lines(tmp_path / "d/a.jsonl", prose(9, 5))
    work = tmp_path / "work"
    check(tmp_path / "d", "--work", work)
    for name, version in (("__version__", "0.0.9"), ("RESULTS", 0)):
        count = len([*work.glob("*.msgpack")])
        with monkeypatch.context() as patch:
            patch.setattr(f"supervise.data.build_check.{name}", version)
            check(tmp_path / "d", "--work", work)
        assert len([*work.glob("*.msgpack")]) == count + 1, name
    check(tmp_path / "d", "--work", work)
    assert len([*work.glob("*.msgpack")]) == 3


def test_what_a_killed_process_was_writing_is_removed_by_a_later_check(tmp_path, check):
    """Not what another machine may be writing, nor what is no file of ours."""
    write_lines(tmp_path / "d/a.jsonl", prose(9, 5))
    check(tmp_path / "d", "--work", tmp_path / "work")
    (result,) = (tmp_path / "work").glob("*.npy")
    unfinished, fresh = (result.with_name(f".{result.name}.{digit * 16}") for digit in "ab")
    other = tmp_path / "work/.profile"
    for path in (unfinished, fresh, other):
        path.touch()
    for path in (unfinished, other):
        os.utime(path, (1e9, 1e9))

    check(tmp_path / "d", "--work", tmp_path / "work")

    assert {*(tmp_path / "work").glob(".*")} == {fresh, other}


# ── what people read ──────────────────────────────────────────────────────────────────────────────

HOSTILE = "<script>alert(1)</script>\x1b[31m \u202eevil\u2066 <b>"


def test_a_text_of_others_is_text_on_the_page_and_in_the_terminal(tmp_path, capsys):
    docs = [f"{HOSTILE} {text}" for text in prose(8, 3)] * 3
    write_lines(tmp_path / "d/a.jsonl", [{"text": t, "source": HOSTILE} for t in docs])
    page, junit = tmp_path / "r.html", tmp_path / "j.xml"

    code = invoke(
        ["data", "check", *map(str, (tmp_path / "d", "--report", page, "--junit", junit))]
    )

    shown, text = capsys.readouterr().out, page.read_text()
    assert code == 1 and "data_build.duplicates" in shown
    assert "<script>" not in text and "&lt;script&gt;" in text
    for page_or_terminal in (text, shown):
        assert not {"\x1b", "\u202e", "\u2066"} & {*page_or_terminal}
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == str(shown.count("  SEV")) != "0"
    assert int(suite.get("skipped", "0")) > 3, "what is not judged is no success"


def test_only_what_is_grave_enough_fails_the_gate_and_a_policy_may_move_a_bound(tmp_path, check):
    docs = prose(60, 4)
    write_lines(tmp_path / "d/a.jsonl", [*docs, *docs[:20]])
    policy = tmp_path / "p.yaml"
    text = "version: supervise/v1\nuse: [data_build]\noverride:\n"
    policy.write_text(f"{text}  data_build.many_copies: {{gt: 60.0}}\n")

    assert check(tmp_path / "d").fired == {"duplicates"}
    assert check(tmp_path / "d", "--fail-on", "SEV1").code == 0
    assert check(tmp_path / "d", "--policy", policy).fired == set()
    assert check(tmp_path / "d", "--policy", "nano").code == 64


@pytest.mark.parametrize(
    "option", ["--rejects={0}/wrong.json", "--prompts={0}/wrong.txt", "--policy=nano"]
)
def test_what_is_given_is_read_before_the_pass(option, tmp_path, check):
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))
    (tmp_path / "wrong.json").write_text('{"length": 3}')
    (tmp_path / "wrong.txt").write_text("no JSON")

    done = check(tmp_path / "d", "--work", tmp_path / "work", option.format(tmp_path))

    assert done.code in (64, 65) and not (tmp_path / "work").exists()


def test_a_result_that_was_cut_short_is_an_error_and_no_failed_gate(tmp_path, check):
    write_lines(tmp_path / "d/a.jsonl", prose(9, 5))
    check(tmp_path / "d", "--work", tmp_path / "work")
    (path,) = (tmp_path / "work").glob("*.npy")
    path.write_bytes(path.read_bytes()[:-100])

    done = check(tmp_path / "d", "--work", tmp_path / "work")

    assert done.code == 64 and "and check again" in done.errors


def write_word_tokenizer(path: Path) -> None:
    """Write a tokenizer that fails on each other word: it has no token for the unknown."""
    model = {"type": "WordLevel", "vocab": {"harbour": 0}, "unk_token": "none"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


BAD_SCORER = """
import os
import sys
fails = lambda texts: 1 / 0
few = lambda texts: [0.5]
no_number = lambda texts: [float("nan")] * len(texts)
ends = lambda texts: os._exit(0)
leaves = lambda texts: sys.exit(0)
"""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("check {0}/d --baseline {0}/d/a.jsonl", "is no manifest"),
        ("check {0}/d --part 1/2", "add --work DIR"),
        ("check {0}/none", "no such file or folder"),
        ("check {0}/d --tokenizer {0}/d/a.jsonl", "is no tokenizer"),
        ("check {0}/d --toxicity nothing:here", "a function that takes a list of texts"),
        ("check {0}/d --rejects {0}/d/a.jsonl", "stats.json"),
        ("check {0}/d --rejects {0}/wrong.json", "a stage has none of dropped, rejected, removed"),
        ("check {0}/d --toxicity bad_scorer:fails", "ZeroDivisionError: division"),
        ("check {0}/d --toxicity bad_scorer:few", "1 scores of 5 texts"),
        ("check {0}/d --toxicity bad_scorer:no_number", "or one that is no number"),
        ("check {0}/d --toxicity bad_scorer:ends --jobs 2 --val {0}/d", "fewer --jobs"),
        ("check {0}/d --toxicity bad_scorer:ends", "by --toxicity bad_scorer:ends, or where"),
        ("check {0}/d --toxicity ending_at_once:score", "by --toxicity ending_at_once:score, or"),
        ("drill filter {0}/d {0}/out", "--rejects FILE"),
        ("drill pii {0}/ids {0}/out", "holds token ids"),
        ("drill flood {0}/d {0}/out", "one of mix"),
        ("drill dup:rate=2 {0}/d {0}/out", "up to 1"),
        ("drill mix {0}/d {0}/out", "two sources"),
        ("drill leak {0}/d {0}/out", "--val PATH"),
        ("drill dup {0}/d {0}/d", "is not empty"),
        ("drill dup {0}/d {0}/d/copy", "lies in"),
        ("drill dup {0}/d {0}/wrong.json", "is no folder"),
        ("drill dup {0}/d {0}/wrong.json/copy", "cannot write"),
        ("drill dup {0}/fifo {0}/out", "is a pipe or a device"),
        ("drill dup {0}/empty {0}/out", "no file of a known format"),
        ("drill dup {0}/damaged {0}/out", "no document could be read: no JSON"),
        ("check {0}/fifo", "write its data to a file first"),
        ("check {0}/damaged", "no document could be read: no JSON"),
        ("check {0}/d --rejects short={0}/none", "no folder"),
        ("check {0}/d --rejects {0}/none", "none: No such file"),
        ("check {0}/d --prompts {0}/empty", "has no prompt"),
        ("check {0}/d --prompts {0}/d", "a line without a prompt"),
        ("check {0}/d --tokenizer {0}/none", "a tokenizer.json"),
        ("check {0}/d --part 3/2 --work {0}/w", "0/100 to 100/100"),
        ("check {0}/d --index {0}/fifo", "is no file"),
        ("check {0}/d --toxicity bad_scorer:leaves", "bad_scorer:leaves: SystemExit: 0"),
        ("check {0}/d --toxicity bad_scorer:leaves --jobs 2 --val {0}/d", "SystemExit: 0"),
        ("check {0}/d --toxicity ending:score", "its module ends with 0"),
        ("check {0}/d --tokenizer {0}/words.json", "the tokenizer fails: WordLevel error"),
        ("check {0}/{1}", "File name too long"),
        ("check {0}/d --rejects short={0}/{1}", "File name too long"),
        ("drill dup {0}/d {0}/{1}", "File name too long"),
        ("check {0}/array.json", "JSON lines, a document each"),
    ],
)
def test_what_cannot_work_is_an_error_with_the_next_thing_to_try(
    argv, message, tmp_path, capsys, monkeypatch
):
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))
    write_lines(tmp_path / "ids/a.jsonl", [{"input_ids": [1, 2]}])
    (tmp_path / "wrong.json").write_text('{"length": {"gone": 3, "total": 30}}')
    (tmp_path / "bad_scorer.py").write_text(BAD_SCORER)
    (tmp_path / "ending.py").write_text("raise SystemExit(0)")
    (tmp_path / "ending_at_once.py").write_text("import os\nos._exit(0)")
    write_word_tokenizer(tmp_path / "words.json")
    with (tmp_path / "array.json").open("wb") as file:
        file.write(b"[")
        file.truncate((32 << 20) + 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.jsonl").write_bytes(b"\x00\xff" * 500)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged.jsonl").rename(tmp_path / "damaged/a.jsonl")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_scorer", raising=False)

    before = {*tmp_path.rglob("*")}

    code = invoke(["data", *argv.format(tmp_path, "n" * 300).split()])

    caught = capsys.readouterr()
    assert code in (64, 65)
    assert message in caught.err and len(caught.err.splitlines()) <= 4
    assert {p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts} == before


@pytest.mark.parametrize("option", ["manifest", "report", "junit", "index"])
def test_an_output_that_cannot_be_written_is_refused_before_the_data_is_read(
    option, tmp_path, check
):
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))
    path = tmp_path / "d/a.jsonl/none"

    done = check(tmp_path / "d", "--work", tmp_path / "work", f"--{option}", path)

    assert done.code == 64 and f"cannot write {path}" in done.errors
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("option", ["manifest", "report", "junit"])
def test_an_output_to_a_pipe_or_a_device_goes_through_it_and_replaces_nothing(
    option, tmp_path, check
):
    """A link as /dev/stdout is one to an open file: it was exchanged for a file, for everybody."""
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))
    pipe, copy = tmp_path / "pipe", tmp_path / "copy"
    os.mkfifo(pipe)
    with copy.open("wb") as target, subprocess.Popen(["cat", pipe], stdout=target):
        done = check(tmp_path / "d", f"--{option}", pipe)
    with copy.open("r+b") as target:
        again = check(tmp_path / "d", f"--{option}", f"/proc/self/fd/{target.fileno()}")

    assert done.code == again.code == 0 and pipe.is_fifo()
    assert copy.stat().st_size > 100 and not [*tmp_path.glob("*.parts")]


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "{0}/link"])
@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_manifest_to_stdout_is_all_that_is_there_and_removes_nothing(path, mode, tmp_path):
    """The file was opened again and cut, and the table went over it."""
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))
    (tmp_path / "link").symlink_to("/dev/stdout")
    (log := tmp_path / "log").write_text("earlier\n")
    argv = ["check", tmp_path / "d", "--manifest", path.format(tmp_path)]

    with log.open(mode) as out:
        job = start(*argv, stdout=out)
        errors = job.communicate()[1]

    text = log.read_text()
    assert job.returncode == 0 and "PASS: " in errors and "manifest: [" not in errors
    assert text.startswith("earlier\n") == (mode == "a")
    assert json.loads(text.removeprefix("earlier\n"))["counts"]["documents"] == 5
    assert (tmp_path / "link").is_symlink()


def test_a_stdout_that_is_a_pipe_and_a_descriptor_that_cannot_be_written(tmp_path):
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))

    job = start("check", tmp_path / "d", "--manifest", "/dev/stdout", stdout=subprocess.PIPE)
    document = json.loads(job.communicate()[0])
    for number in (0, 99):
        argv = ["check", tmp_path / "d", "--manifest", f"/dev/fd/{number}"]
        with (tmp_path / "d/a.jsonl").open() as stdin:
            refused = start(*argv, stdin=stdin)
        assert f"cannot write /dev/fd/{number}: " in refused.communicate()[1]
        assert refused.returncode == 64

    assert document["counts"]["documents"] == 5


def test_a_bug_is_no_failed_gate(tmp_path):
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))
    text = "import supervise.data.build_check as b\nb.PieceResult = None\n"
    text += "score = lambda texts: [0.0] * len(texts)\n"
    (tmp_path / "breaking.py").write_text(text)

    job = start("check", tmp_path / "d", "--toxicity", "breaking:score", cwd=tmp_path)

    assert "TypeError" in job.communicate()[1] and job.returncode == 70


def test_files_are_measured_whose_names_are_no_text(tmp_path, check):
    names = [os.fsdecode(b"caf\xe9.jsonl"), os.fsdecode(b"m\xe9/a.txt"), os.fsdecode(b"\xe9.xyz")]
    write_lines(tmp_path / "d" / names[0], prose(5, 5))
    for name in names[1:]:
        (path := tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        path.write_bytes(b"a text of a file\0" if name.endswith("xyz") else b"a text of a file")

    done = check(tmp_path / "d", "--manifest", tmp_path / "m.json")

    manifest = json.loads((tmp_path / "m.json").read_text())
    assert done.code == 0 and manifest["counts"]["documents"] == 6
    labels = {row["path"] for row in manifest["inputs"]}
    assert labels == {r"caf\udce9.jsonl", r"m\udce9/a.txt"}
    assert manifest["ignored"] == {r"\udce9.xyz": "no known format"}


# ── interruptions ─────────────────────────────────────────────────────────────────────────────────


def start(*argv: object, **options: Any) -> subprocess.Popen[str]:
    """Start `supervise data` in a group of its own, as a terminal does."""
    command = [sys.executable, "-m", "supervise", "data", *map(str, argv)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0, **options)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A corpus of six pieces, each of which takes a moment."""
    folder, docs = tmp_path_factory.mktemp("large"), prose(500, 3)
    for number in range(6):
        write_lines(folder / f"{number}.jsonl", [f"{text} {number}" for text in docs * 5])
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_ends_whose_scorer_does_not_look_at_signals(number, tmp_path):
    """In a call of C its process runs no handler: it is killed."""
    write_lines(tmp_path / "d/a.jsonl", prose(5, 5))
    text = (
        "from pathlib import Path\nwait = lambda _: Path('begun').touch() or sum(range(10**12))\n"
    )
    (tmp_path / "waiting.py").write_text(text)
    job = start("check", tmp_path / "d", "--toxicity", "waiting:wait", cwd=tmp_path)
    wait_until((tmp_path / "begun").exists)
    os.killpg(job.pid, number)

    assert "supervise: interrupted; next: " in job.communicate(timeout=60)[1]
    assert job.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_drill_that_is_interrupted_leaves_no_part_of_a_copy(number, large, tmp_path):
    job = start("drill", "dup", large, tmp_path / "copy")
    wait_until(lambda: [*tmp_path.glob("copy/*.jsonl")])
    os.killpg(job.pid, number)

    assert "supervise: interrupted; next: " in job.communicate()[1]
    assert job.returncode == 130 and not (tmp_path / "copy").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_check_by_several_processes_that_is_interrupted_leaves_none(number, large, tmp_path):
    """Killed, they waited for work for ever; by Ctrl-C, each of them printed where it was."""
    job = start("check", large, "--jobs", 3, "--work", tmp_path / "work")
    wait_until(lambda: [*tmp_path.glob("work/*.msgpack")])
    (os.kill if number == signal.SIGKILL else os.killpg)(job.pid, number)
    errors = job.communicate()[1]  # all of them have it open

    assert job.returncode == (-9 if number == signal.SIGKILL else 130)
    assert "Traceback" not in errors
    assert number == signal.SIGKILL or not [*tmp_path.glob("work/.*")]
    assert errors.count("supervise: interrupted; next: ") == (number != signal.SIGKILL)
