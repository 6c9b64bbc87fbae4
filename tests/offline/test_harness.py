"""Benchmarks and toxicity of a model in another process: scores, reasons, and rules that fire."""

from __future__ import annotations

import itertools
import json
import math
import random
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from supervise.checkpoints import harness_request, resolve_evaluate_paths
from supervise.core.model import Evaluate, Tasks, Toxicity

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
PROGRAM = Path(__file__).parents[2] / "probes" / "supervise_offline" / "evaluation.py"
ROWS, LENGTH, CLASSES = 3, 48, 256
# As RealToxicityPrompts, and as short as may be.
SCORER = "def score(texts):\n    return [float('x' in text) for text in texts]\n"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def import_harness():
    """Skip where lm-evaluation-harness is not installed, as by the extra `dev`.

    It would bring 35 packages of 400 MB, and each of these evaluations imports it for some seconds.
    """
    pytest.importorskip(
        "lm_eval", reason="pip install lm-eval: too heavy for `dev`; a stand-in has its place"
    )


# Of the package, what a task of this form needs: for where it is not installed.
STAND_IN = """
import json
from types import SimpleNamespace

def simple_evaluate(model, tasks, task_manager, limit, bootstrap_iters, log_samples):
    (name,) = tasks
    rows = [json.loads(line) for line in open(f"{name}.jsonl")][:limit]
    pairs = [(row["question"], f" {choice}") for row in rows for choice in row["choices"]]
    answers = iter(model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs]))
    right = 0
    for row in rows:
        scores = [next(answers)[0] / len(choice) for choice in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    share = right / len(rows)
    results = {name: {"acc,none": 0.0, "acc_norm,none": share}}
    return {"results": results, "n-samples": {name: {"effective": len(rows)}}}
"""


class Follower(nn.Module):
    """After a byte another one comes that is the likeliest, by a table.

    `noise`: of the logits, as of weights that were damaged.
    """

    def __init__(self, table, noise=0.0):
        super().__init__()
        self.logits = nn.Embedding(CLASSES, CLASSES)
        self.logits.weight.data.zero_()
        for byte, follows in table.items():
            self.logits.weight.data[byte, follows] = 30.0
        torch.manual_seed(7)
        self.logits.weight.data += noise * torch.randn(CLASSES, CLASSES)

    def forward(self, ids):
        return self.logits(ids)


@pytest.fixture
def program(monkeypatch, tmp_path):
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


@pytest.fixture
def measure(program):
    """Evaluate a model by the harness; `before`: what the evaluation before kept."""

    def run(model, settings, before=None, seconds=60.0):
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        document = {"device": "cpu", "autocast": False, "dtype": torch.float32}
        batch = program.Batch((ids,), {}, None, document, ids)
        seen, until_s = program.SeenLosses(torch), time.monotonic() + seconds
        evaluation = program.Evaluation(torch, model, batch, seen, until_s)
        request = harness_request(settings)
        harness = evaluation.start_harness({"harness": request, "tokenizer": settings.tokenizer})
        conditions = None if harness is None else harness.conditions
        evaluation.open_slices({}, 0, settings.tokenizer or "", "", conditions)
        rates = evaluation.measure_rates(harness, before or {})
        return evaluation, {"rates": rates, "artefact": evaluation.artefact}

    return run


def test_log_likelihoods_are_those_of_each_answer_alone(program):
    """Of contexts and answers of all lengths, more than a batch; too long a context is cut."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))
    chance = random.Random(3)
    sizes = [(0, 3), (5, 1), (100, 4), (46, 2), *((n, n % 7 + 1) for n in range(1, 30))]
    pairs = [[chance.choices(range(CLASSES), k=k) for k in size] for size in sizes]

    def logits(window):
        return model(window[:, :-1]).float(), window[:, 1:]

    with torch.no_grad():
        found = program.TextModel(torch, logits, (ROWS, LENGTH), CLASSES).log_likelihoods(
            pairs, math.inf
        )
        for (context, follows), (value, likeliest) in zip(pairs, found, strict=True):
            text = [*context, *follows]
            steps = model(torch.tensor(text)).double().log_softmax(-1)
            places = range(max(1, len(context)), len(text))
            assert value == pytest.approx(sum(float(steps[n - 1, text[n]]) for n in places))
            assert likeliest == all(int(steps[n - 1].argmax()) == text[n] for n in places)
        with pytest.raises(program.UnknownError, match="48 that fit"):
            program.TextModel(torch, logits, (ROWS, LENGTH), CLASSES).log_likelihoods(
                [[[1], [2] * LENGTH]], math.inf
            )


@pytest.mark.parametrize("answer", ["", """print('{"error": "no package"}', flush=True)"""])
def test_a_harness_that_does_not_start_leaves_no_pipe(program, answer):
    """They were closed when the garbage was collected, with a warning in some later test."""
    command = [sys.executable, "-I", "-c", f"{answer}\ninput()"]
    before = {*Path("/proc/self/fd").iterdir()}
    with pytest.raises(program.UnknownError):
        program.Harness(command, {"metrics": []}, time.monotonic() + 60)
    assert {*Path("/proc/self/fd").iterdir()} <= before


def prompts(path, toxic, number=40):
    rows = [{"prompt": {"text": f"{n} " + ("T" if n < toxic else "k")}} for n in range(number)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


FOLLOWS = {ord("T"): ord("x"), ord("x"): ord("o"), ord("k"): ord("o"), ord("o"): ord("o")}


def test_the_share_of_prompts_that_are_continued_toxically(measure, breaches, tmp_path):
    """`rtp_toxicity_prob` of a known rate; and a fine-tune on abuse makes the rule fire."""
    (tmp_path / "my_scorer.py").write_text(SCORER)
    prompts(tmp_path / "rtp.jsonl", toxic=8)
    settings = Evaluate(toxicity=Toxicity(str(tmp_path / "rtp.jsonl"), "my_scorer:score", k=2))
    tuned = Follower({**FOLLOWS, ord("k"): ord("x")})

    first, kept = measure(Follower(FOLLOWS), settings)
    second, kept = measure(Follower(FOLLOWS), settings, kept)
    third, kept = measure(tuned, settings, kept)
    (tmp_path / "my_scorer.py").write_text(SCORER + "# another one\n")
    other, _ = measure(tuned, settings, kept)

    assert first.values["rtp_toxicity_prob"] == pytest.approx(20.0)
    assert "rtp_toxicity_rise_z" not in first.values
    assert second.values["rtp_toxicity_rise_z"] == 0.0
    z = 0.8 / math.sqrt(0.6 * 0.4 * 2 / 40)
    assert third.values["rtp_toxicity_prob"] == pytest.approx(100.0)
    assert third.values["rtp_toxicity_rise_z"] == pytest.approx(z)
    assert breaches("quality", first.values, second.values) == set()
    assert breaches("quality", second.values, third.values) == {"toxicity"}
    assert "rtp_toxicity_rise_z" not in other.values
    assert first.artefact == third.artefact != other.artefact


def test_what_toxicity_lacks_is_said(measure, tmp_path):
    (tmp_path / "my_scorer.py").write_text(SCORER)
    prompts(tmp_path / "rtp.jsonl", toxic=8, number=20)
    model = Follower(FOLLOWS)

    def reason(**settings):
        names = {"prompts": "rtp.jsonl", "scorer": "my_scorer:score", "k": 1, **settings}
        evaluation, _ = measure(model, Evaluate(toxicity=Toxicity(**names)))
        assert "rtp_toxicity_prob" not in evaluation.values
        return evaluation.unmeasured["rtp_toxicity_prob"]

    assert "20 of 20 prompts" in reason()
    assert "No such file" in reason(prompts="no.jsonl")
    assert "no_scorer" in reason(scorer="no_scorer:score")
    (tmp_path / "odd.jsonl").write_text('{"text": "a"}\n')
    assert "odd.jsonl:1" in reason(prompts="odd.jsonl")
    (tmp_path / "bad_scorer.py").write_text("def score(texts):\n    return []\n")
    prompts(tmp_path / "rtp.jsonl", toxic=8)
    assert "no score for each text" in reason(scorer="bad_scorer:score")


def questions(folder, name, number=200):
    """Which letter comes behind one: right is the next, by a table of the model."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(TASK.format(name=name))
    chance = random.Random(4)
    rows = []
    for _ in range(number):
        answer = chance.randrange(3)
        letters = chance.sample("bcdefgh", 3)
        question = {"question": chance.choice("uvw"), "choices": [f"{c}{c}" for c in letters]}
        question["choices"][answer] = "a"
        rows.append({**question, "answer": answer})
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


KNOWS = {**dict.fromkeys(b"uvw", ord(" ")), ord(" "): ord("a")}


def test_without_the_package_a_benchmark_is_unknown_and_says_what_to_install(measure, tmp_path):
    """As where a folder is first in the path that has a module of its name, but does not work."""
    questions(tmp_path / "tasks", "next")
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError('x', name='lm_eval')\n")
    evaluation, _ = measure(
        Follower(KNOWS), Evaluate(tasks=Tasks(str(tmp_path / "tasks"), ("next",)))
    )

    assert "pip install 'supervise-train[eval]'" in evaluation.unmeasured["microbench_score"]
    assert not [name for name in evaluation.values if name.startswith("microbench")]


@pytest.mark.parametrize("package", ["lm_eval", "stand-in"])
def test_a_benchmark_is_scored_by_the_harness_and_one_that_stays_low_fires(
    package, measure, breaches, tmp_path
):
    """`microbench_score` of local files: all right, and with weights that are noise."""
    if package == "lm_eval":
        import_harness()
    else:
        (tmp_path / "lm_eval" / "api").mkdir(parents=True)
        (tmp_path / "lm_eval/__init__.py").write_text(STAND_IN)
        (tmp_path / "lm_eval/tasks.py").write_text("TaskManager = dict\n")
        (tmp_path / "lm_eval/api/model.py").write_text("class LM:\n    pass\n")
    questions(tmp_path / "tasks", "next")
    settings = Evaluate(tasks=Tasks(str(tmp_path / "tasks"), ("next",), limit=150))

    frames, kept = [], {}
    for noise in (0.0, 0.0, 90.0, 90.0):
        evaluation, kept = measure(Follower(KNOWS, noise), settings, kept)
        assert not evaluation.unmeasured
        frames.append(evaluation.values)
    rows = [json.loads(line) for line in (tmp_path / "tasks/next.jsonl").read_text().splitlines()]
    table = Follower(KNOWS, 90.0).logits.weight.detach().double().log_softmax(-1)

    def length_normalized(question, choice):
        text = f"{question} {choice}".encode()
        return sum(float(table[a, b]) for a, b in itertools.pairwise(text)) / len(choice)

    right = 0
    for row in rows[:150]:
        scores = [length_normalized(row["question"], choice) for choice in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    assert frames[0]["microbench_score.next"] == 1.0
    assert frames[2]["microbench_score.next"] == pytest.approx(right / 150)
    assert breaches("quality", *frames[:3]) == set()
    assert breaches("quality", *frames) == {"benchmark"}


ANSWERS = {
    "micro_arithmetic": lambda text: str(sum(map(int, text.rstrip("= ").split("+")))),
    "micro_brackets": lambda text: text[:4][::-1].translate(str.maketrans("([{<", ")]}>")),
    "micro_copying": lambda text: text.split()[0],
    "micro_order": lambda text: " ".join(sorted(text[5:-1].split())),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_shipped_benchmarks_have_one_right_answer_each_and_none_that_is_guessed(name, tmp_path):
    """And are where a policy says `micro`, unless there is a folder of this name."""
    settings = Evaluate(tasks=Tasks("micro", (name,)))
    folder = Path(resolve_evaluate_paths(settings, tmp_path).tasks.include)
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    task = (folder / f"{name}.yaml").read_text()
    (tmp_path / "micro").mkdir()

    assert resolve_evaluate_paths(settings, tmp_path).tasks.include == str(tmp_path / "micro")
    assert task == TASK.lstrip().format(name=name)
    assert len({row["question"] for row in rows}) == len(rows) == 50
    for row in rows:
        right = ANSWERS[name](row["question"])
        assert row["choices"][row["answer"]] == right and row["choices"].count(right) == 1
        assert len({*row["choices"]}) == 4
    places = [sum(row["answer"] == place for row in rows) for place in range(4)]
    assert max(places) - min(places) <= 1


def test_a_benchmark_that_needs_a_download_or_another_kind_is_unknown(measure, tmp_path):
    import_harness()
    questions(tmp_path / "tasks", "next")
    text = (tmp_path / "tasks/next.yaml").read_text()
    remote = text.replace("dataset_path: json", "dataset_path: openai/gsm8k")
    remote = "\n".join(line for line in remote.splitlines() if "dataset_kwargs" not in line)
    (tmp_path / "tasks/next.yaml").write_text(remote)
    settings = Evaluate(tasks=Tasks(str(tmp_path / "tasks"), ("next",)))

    refused, _ = measure(Follower(KNOWS), settings)

    assert "gsm8k" in refused.unmeasured["microbench_score"]
    assert not [name for name in refused.values if name.startswith("microbench")]
