"""The model of a checkpoint comes back as it was, and what is measured of it is what it is."""

from __future__ import annotations

import array
import copy
import hashlib
import json
import os
import pickle
import random
import runpy
import statistics
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from supervise.cli import invoke
from supervise_probe.torch_state import StructureError, pickle_structure

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
PROGRAM = Path(__file__).parents[2] / "probes" / "supervise_offline" / "evaluation.py"
CLASSES, ROWS, LENGTH = 17, 2, 12


class Tiny(nn.Module):
    """Tied weights, dropout, and tensors that no checkpoint holds.

    `inside`: it takes the loss; with "shift" of labels that are the ids.
    """

    def __init__(self, inside=False):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(CLASSES, 16), nn.Dropout(0.2)
        self.mixer, self.norm = nn.GRU(16, 16, batch_first=True), nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.head.reset_parameters = lambda: None  # as of litgpt
        self.register_buffer("positions", torch.randn(LENGTH, 16), persistent=False)
        self.register_buffer("scale", torch.tensor(1.5))
        self.table, self.newest, self.inside = torch.rand(16), None, inside

    def forward(self, ids, labels=None):
        x = self.drop(self.embedding(ids)) + self.positions + self.table
        self.newest = x.mean()  # with a graph
        logits = self.head(self.norm(self.mixer(x)[0])) * self.scale
        if self.inside == "shift":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if self.inside else logits


class NoGradients(Tiny):
    """Evaluates without a graph only."""

    def forward(self, ids, labels=None):
        if torch.is_grad_enabled() and not self.training:
            raise MemoryError
        return super().forward(ids, labels)


class OptimizedModule(nn.Module):
    """A part that the job has compiled, as torch wraps it: its forward compiles."""

    compiled = 0

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module
        self.forward = self.compile_and_run

    def compile_and_run(self, x):
        OptimizedModule.compiled += 1
        return self._orig_mod(x)


class PartlyCompiled(Tiny):
    """Outside of it is a module that is not."""

    def __init__(self, inside=False):
        super().__init__(inside)
        self.norm = OptimizedModule(self.norm)


class Table:
    """Many bytes that are no tensor's, and a pickle of them in one call."""

    nbytes = 1 << 30

    def __reduce__(self):
        return Table, ()


class Job:
    """A model that was trained for a few steps, and what the probe left of it."""

    def __init__(self, folder, inside=False, kind=Tiny, beside=(), rows=ROWS):
        torch.manual_seed(3)
        self.folder, self.model = folder, kind(inside)
        self.window = torch.randint(CLASSES, (rows, LENGTH + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.call = (self.window[:, :-1], self.window[:, 1:])[: 2 if inside else 1]
        if inside == "shift":
            self.call = self.call[0], self.call[0].clone()
            self.call[1][1, 8:] = -100
        for _ in range(5):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        data = pickle_structure(torch, nn.DataParallel(self.model), [*beside, self.optimizer])
        (folder / "structure.pkl").write_bytes(data)
        self.digest = hashlib.sha256(data).hexdigest()
        targets = (
            None if inside else (self.window[:, 1:].flatten(), CLASSES, -100, rows, rows * LENGTH)
        )
        document = {
            "args": self.call,
            "kwargs": {},
            "targets": targets,
            "device": "cpu",
            "autocast": False,
            "dtype": torch.bfloat16,
            "modes": [module.training for module in nn.DataParallel(self.model).modules()],
        }
        torch.save(document, folder / "batch.pt")

    def loss(self, model=None):
        output = (model or self.model)(*self.call)
        if self.model.inside:
            return output
        return F.cross_entropy(output.flatten(0, 1), self.window[:, 1:].flatten())

    def value(self):
        torch.manual_seed(20220405)
        with torch.no_grad():
            output = self.model(*self.call)
        return float(output if self.model.inside else output.double().square().mean())

    def content(self):
        return {
            "net": {f"module.{name}": value for name, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.schedule.state_dict(),
            "rng_state": torch.get_rng_state(),
            "python_rng": random.getstate(),
        }

    def request(self, name="c.pt", content=None, **more):
        torch.save(self.content() if content is None else content, self.folder / name)
        return {
            "checkpoint": str(self.folder / name),
            "structure": str(self.folder / "structure.pkl"),
            "digest": self.digest,
            "batch": str(self.folder / "batch.pt"),
            "value": self.value(),
            "keep": str(self.folder / f"outputs.{name}"),
            "series": "c#.pt",
            **more,
        }


@pytest.fixture
def program(monkeypatch, tmp_path):
    """The program's functions, in this process: it replaces a function of torch, and moves."""
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


@pytest.fixture
def evaluate(program):
    return lambda request: program.evaluate(torch, request, time.monotonic() + 60.0)


def in_double(model):
    model.newest = None  # a tensor with a graph cannot be copied
    return copy.deepcopy(model).double().eval()


def artefact(tokens, budget=1000, tokenizer="", dtype="float32"):
    """The hash of an evaluation of all windows, in the order in which it takes them."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(20220405)).tolist()
    windows = [tokens[n * LENGTH : (n + 1) * LENGTH + 1] for n in order]
    content = hashlib.sha256(b"".join(array.array("I", w).tobytes() for w in windows))
    document = {"dtype": dtype, "tokenizer": tokenizer, "tokens": budget, "version": 1}
    document["index"] = ""
    document |= {"window": LENGTH, "windows": {"held": content.hexdigest()}}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def log_probabilities(job, model):
    """Of each position, from a forward of the tests' own."""
    seen = []
    handle = model.head.register_forward_hook(lambda *args: seen.append(args[-1] * model.scale))
    with torch.no_grad():
        model(*job.call)
    handle.remove()
    return seen[0].flatten(0, 1).log_softmax(-1)


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_measured_is_what_the_model_has_in_double_precision(inside, evaluate, tmp_path):
    """Of a checkpoint and of the next one, which is worse on the same windows."""
    job = Job(tmp_path, inside)
    chance = random.Random(5)
    tokens = [chance.randrange(CLASSES) for _ in range(20 * LENGTH + 1)]
    (tmp_path / "held.bin").write_bytes(array.array("H", tokens).tobytes())
    val = {"val": {"held": str(tmp_path / "held.bin")}, "tokens": 1000}
    models = [in_double(job.model)]
    first = evaluate(job.request("c1.pt", **val))
    with torch.no_grad():
        for weight in job.model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape))
    models.append(in_double(job.model))
    second = evaluate(job.request("c2.pt", **val, previous=str(tmp_path / "outputs.c1.pt")))

    assert first["now"] == first["was"] and second["now"] == second["was"]
    assert "checkpoint_kl_to_prev" not in first["values"]
    old, new = (log_probabilities(job, model) for model in models)
    losses = []
    for model in models:
        ids = torch.tensor(tokens)
        windows = [ids[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(20)]
        model.inside = False
        with torch.no_grad():
            losses.append([float(F.cross_entropy(model(w[None, :-1])[0], w[1:])) for w in windows])
        model.inside = inside
    rises = [now - was for was, now in zip(*losses, strict=True)]
    shared = [
        len({*a.topk(8).indices.tolist()} & {*b.topk(8).indices.tolist()}) / 8
        for a, b in zip(old, new, strict=True)
    ]
    loss = float(job.loss(models[1]).detach())
    expected = {
        "checkpoint_probe_loss": loss,
        "checkpoint_probe_ppl": 2.718281828459045**loss,
        "checkpoint_entropy": float(-(new.exp() * new).sum(-1).mean()),
        "checkpoint_kl_to_prev": float((old.exp() * (old - new)).sum(-1).mean()),
        "checkpoint_top_agreement": 100.0 * statistics.mean(shared),
        "checkpoint_val_loss": statistics.mean(losses[1]),
        "checkpoint_val_loss.held": statistics.mean(losses[1]),
        "checkpoint_val_ppl": 2.718281828459045 ** statistics.mean(losses[1]),
        "checkpoint_val_rise": statistics.mean(rises),
        "checkpoint_val_rise_z": statistics.mean(rises) / statistics.stdev(rises) * 20**0.5,
        "checkpoint_parts_lost": 0.0,
        "eval_artifact_hash": float(int(artefact(tokens), 16) >> 204),
    }
    assert first["artefact"] == second["artefact"] == artefact(tokens)
    assert statistics.mean(rises) > 0.0
    trace = second["values"].pop("curvature_trace_est")
    assert second["values"] == pytest.approx(expected, rel=2e-4)
    assert {*second["unmeasured"]} == {"zlib_ratio.held", "codec_score.held"} and trace > 0.0
    assert second["unmeasured"]["zlib_ratio.held"].startswith("20 windows")
    assert {*second["parts"].values()} == {"restored"}


def test_what_an_evaluation_depends_on_has_a_hash_and_voids_comparisons_that_it_changes(
    evaluate, tmp_path, breaches
):
    """`eval_artifact_hash`: one token, the budget, the tokenizer; and the probe batch."""
    job, held, vocabulary = Job(tmp_path), tmp_path / "held.bin", tmp_path / "tokenizer.json"
    tokens = random.Random(5).choices(range(CLASSES), k=20 * LENGTH + 1)
    held.write_bytes(array.array("H", tokens).tobytes())
    vocabulary.write_text("{}")

    def run(name, previous="", budget=1000, **more):
        previous = previous and str(tmp_path / f"outputs.{previous}.pt")
        val = {"val": {"held": str(held)}, "tokens": budget}
        return evaluate(job.request(f"{name}.pt", previous=previous, **val, **more))

    first, same = run("c1"), run("c2", "c1")
    named = {"tokenizer": str(vocabulary)}
    others = {"tokens, windows": run("c3", "c1", 100), "tokenizer": run("c4", "c1", **named)}
    lost = run("c5", "c4", tokenizer=str(tmp_path / "no.json"))
    tokens[7] = (tokens[7] + 1) % CLASSES
    held.write_bytes(array.array("H", tokens).tobytes())
    others["windows"] = run("c6", "c1")
    job.call = ((job.call[0] + 1) % CLASSES,)
    document = torch.load(tmp_path / "batch.pt")
    torch.save({**document, "args": job.call}, tmp_path / "batch.pt")
    other_batch = run("c7", "c6")

    assert first["artefact"] == same["artefact"] != ""
    assert "checkpoint_val_rise" in same["values"] and "checkpoint_kl_to_prev" in same["values"]
    for changed, answer in others.items():
        assert answer["unmeasured"]["checkpoint_val_rise.held"].endswith(f"other {changed}")
        assert "checkpoint_val_rise" not in answer["values"]
        assert "checkpoint_kl_to_prev" in answer["values"]
    digest = hashlib.sha256(b"{}").hexdigest()
    assert others["windows"]["artefact"] == other_batch["artefact"] == artefact(tokens)
    assert len({first["artefact"], *(answer["artefact"] for answer in others.values())}) == 4
    tokens[7] = (tokens[7] - 1) % CLASSES
    assert others["tokenizer"]["artefact"] == artefact(tokens, tokenizer=digest)
    for changed in others.values():
        rules = breaches("evaluation", first["values"], same["values"], changed["values"])
        assert "artefacts" in rules
    assert "artefacts" not in breaches("evaluation", first["values"], same["values"])
    assert lost["artefact"] == "" and "eval_artifact_hash" not in lost["values"]
    assert "no.json" in lost["unmeasured"]["eval_artifact_hash"]
    assert "probe batch" in other_batch["unmeasured"]["checkpoint_kl_to_prev"]
    assert "checkpoint_kl_to_prev" not in other_batch["values"]
    assert other_batch["values"]["checkpoint_val_rise"] == 0.0


@pytest.mark.parametrize("others", [0, 1])
def test_a_file_that_was_away_once_is_compared_with_what_was_before(others, evaluate, tmp_path):
    """Alone, and beside one that was there."""
    job, chance = Job(tmp_path), random.Random(5)
    files = [tmp_path / f"{n}.bin" for n in range(1 + others)]
    for path in files:
        tokens = chance.choices(range(CLASSES), k=20 * LENGTH + 1)
        path.write_bytes(array.array("H", tokens).tobytes())
    val = {"val": {path.stem: str(path) for path in files}, "tokens": 1000}
    outputs = [str(tmp_path / f"outputs.c{n}.pt") for n in (1, 2)]

    first = evaluate(job.request("c1.pt", **val))
    files[0].rename(tmp_path / "away")
    lost = evaluate(job.request("c2.pt", previous=outputs[0], **val))
    (tmp_path / "away").rename(files[0])
    back = evaluate(job.request("c3.pt", previous=outputs[1], **val))

    assert "No such file" in lost["unmeasured"]["checkpoint_val_loss.0"]
    assert ("checkpoint_val_rise" in lost["values"]) == bool(others)
    assert back["values"]["checkpoint_val_rise"] == 0.0
    assert "checkpoint_val_rise.0" not in back["unmeasured"]
    assert back["artefact"] == first["artefact"] != lost["artefact"]


def test_windows_known_by_heart_are_far_below_the_others_in_bits_for_those_of_zlib(
    evaluate, tmp_path, breaches
):
    """`zlib_ratio`: 20 of 1200 are learnt, after the rule that half of their tokens follow."""
    job, held = Job(tmp_path, rows=40), tmp_path / "held.bin"
    chance = random.Random(6)

    def window():
        tokens = [0]
        while len(tokens) <= LENGTH:
            follows = chance.random() < 0.6
            tokens.append((tokens[-1] + 1) % CLASSES if follows else chance.randrange(CLASSES))
        return tokens[1:]

    known, several = window(), [window() for _ in range(1200)]
    several[7::60] = [known] * 20
    tokens = torch.tensor([*(token for window in several for token in window), 0])
    held.write_bytes(array.array("H", tokens.tolist()).tobytes())
    val = {"val": {"held": str(held)}, "tokens": 20000}

    def distances():
        windows = torch.stack([tokens[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(1200)])
        with torch.no_grad():
            logits = in_double(job.model)(windows[:, :-1])
        losses = F.cross_entropy(logits.mT, windows[:, 1:], reduction="none").sum(1).tolist()
        packed = [zlib.compress(array.array("H", w[1:]).tobytes(), 9) for w in windows.tolist()]
        ratios = [a / 0.6931471805599453 / 8 / len(b) for a, b in zip(losses, packed, strict=True)]
        middle = statistics.median(ratios)
        scale = statistics.median(abs(ratio - middle) for ratio in ratios)
        return sorted((ratio - middle) / scale for ratio in ratios)

    def train(batches):
        optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01)
        for batch in batches:
            rows = torch.tensor(batch)
            logits = job.model(rows)[:, :-1]
            F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    early = evaluate(job.request("c0.pt", **val))
    train([window() for _ in range(32)] for _ in range(100))
    limit = distances()[1]
    first = evaluate(job.request("c1.pt", **val))
    train([[known, known]] * 60)
    second = evaluate(job.request("c2.pt", **val, previous=str(tmp_path / "outputs.c1.pt")))

    assert "how often" in early["unmeasured"]["zlib_ratio.held"]
    assert first["values"]["zlib_ratio"] == pytest.approx(100 / 1200)
    share = 100.0 * sum(distance < limit for distance in distances()) / 1200
    assert share >= 100.0 * 20 / 1200
    assert second["values"]["zlib_ratio.held"] == pytest.approx(share, abs=100.1 / 1200)
    assert "known_windows" in breaches("quality", first["values"], second["values"])
    assert "known_windows" not in breaches("quality", first["values"], first["values"])


class Cycle(nn.Module):
    """Knows what follows a token with probability `prior`, and with 0.9 what it remembers.

    Attributes:
        known: first tokens of items of 16, known where all of the row is as in the file.
        looks: it remembers what followed a token before, in the same row.
        late: it knows less behind 16 tokens.
    """

    def __init__(self, known=(), looks=False, prior=0.2, late=False):
        super().__init__()
        self.known, self.looks, self.prior, self.late = known, looks, prior, late

    def forward(self, ids):
        follows = torch.full(ids.shape, self.prior)
        for row, tokens in enumerate(ids.tolist()):
            is_text = True
            for place, token in enumerate(tokens):
                is_text = is_text and token == (tokens[0] + place) % CLASSES
                is_known = is_text and tokens[place // 16 * 16] in self.known
                if is_known or (self.looks and token in tokens[:place]):
                    follows[row, place] = 0.9
                elif self.late and place > 15:
                    follows[row, place] /= 2.0
        others = ((1.0 - follows) / (CLASSES - 1)).log().unsqueeze(-1).expand(-1, -1, CLASSES)
        return others.scatter(2, ((ids + 1) % CLASSES).unsqueeze(-1), follows.log().unsqueeze(-1))


@pytest.mark.parametrize(
    ("model", "windows", "length", "score"),
    [
        (Cycle(known=range(CLASSES)), 60, 64, 100.0),
        (Cycle(known=range(5)), 60, 64, None),
        (Cycle(looks=True), 60, 64, 0.0),
        (Cycle(prior=1.0 / CLASSES), 60, 64, "no more of its tokens"),
        (Cycle(late=True), 60, 64, "makes 100 % of them worse"),
        (Cycle(looks=True), 29, 64, "28 items"),
        (Cycle(looks=True), 60, 60, "four items of 16 tokens"),
    ],
)
def test_items_learnt_by_heart_get_worse_behind_others_of_their_file(
    model, windows, length, score, program, tmp_path, breaches
):
    """`codec_score` of models that remember all items, some, and only what is before an item."""
    tokens = [n % CLASSES for n in range(windows * length + 1)]
    (tmp_path / "held.bin").write_bytes(array.array("H", tokens).tobytes())
    ids = torch.zeros(ROWS, length, dtype=torch.int64)
    document = {"device": "cpu", "autocast": False, "dtype": torch.float32}
    batch = program.Batch((ids,), {}, None, document, ids)
    seen = program.SeenLosses(torch)
    evaluation = program.Evaluation(torch, model, batch, seen, time.monotonic() + 60.0)
    evaluation.open_slices({"held": str(tmp_path / "held.bin")}, 10**6)

    evaluation.measure_contexts()

    if score is None:
        first = [(n * length + 48) % CLASSES for n in range(windows)]
        score = 100.0 * sum(token in model.known for token in first) / windows
    if isinstance(score, str):
        assert score in evaluation.unmeasured["codec_score.held"]
        assert "codec_score" not in evaluation.values
    else:
        assert evaluation.values["codec_score"] == pytest.approx(score)
        fires = "contaminated" in breaches("quality", evaluation.values)
        assert fires == (score > 80.0)


def write_tokens(path, tokens):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(array.array("H", tokens).tobytes())


def test_copies_of_fifty_tokens_are_found_as_a_search_of_all_places_finds_them(
    program, tmp_path, capsys
):
    """Of two files; none of forty tokens, and of a file that was changed since nothing is known."""
    chance, index = random.Random(8), tmp_path / "index"
    files = [chance.choices(range(200), k=count) for count in (30_011, 9_007)]
    files[0][2000:6000] = [7] * 4000
    for number, tokens in enumerate(files):
        write_tokens(tmp_path / "data" / f"{number}.bin", tokens)
    assert invoke(["data", "check", str(tmp_path / "data"), "--index", str(index), "-q"]) in (0, 1)
    (tmp_path / "text.jsonl").write_text('{"text": "some"}\n')
    refused = invoke(["data", "check", str(tmp_path / "text.jsonl"), "--index", str(index)])
    found = program.TokenIndex(str(index))
    whole = ["".join(map(chr, tokens)) for tokens in files]

    def brute(tokens):
        marks = set()
        for start in range(len(tokens) - 49):
            if any("".join(map(chr, tokens[start : start + 50])) in text for text in whole):
                marks |= {*range(start, start + 50)}
        return len(marks)

    def planted(length):
        source = chance.choice(files)
        start = chance.randrange(len(source) - length)
        around = [chance.choices(range(200), k=20) for _ in range(2)]
        return around[0] + source[start : start + length] + around[1]

    copies = [planted(chance.randrange(50, 120)) for _ in range(100)]
    copies += [files[0][:60], files[1][-60:], files[0][-40:] + files[1][:40], [7] * 100]
    assert [found.copied(tokens) for tokens in copies] == [*map(brute, copies)]
    assert min(map(brute, copies[:100])) >= 50
    assert all(found.copied(planted(40)) == 0 for _ in range(100))
    assert refused == 65 and "flat token files" in capsys.readouterr().err
    texts = [{"text": " ".join(f"w{token}" for token in tokens)} for tokens in files]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in texts))
    vocabulary = {f"w{n}": n for n in range(200)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    argv = ["data", "check", str(tmp_path / "texts.jsonl"), "--index", str(tmp_path / "of_texts")]
    assert invoke([*argv, "--tokenizer", str(tmp_path / "tokenizer.json"), "-q"]) in (0, 1)
    of_texts = program.TokenIndex(str(tmp_path / "of_texts"))
    assert of_texts.total == found.total
    assert sorted(p.name for p in tmp_path.glob("*of_texts*")) == ["of_texts", "of_texts.tokens"]
    del copies[102]  # texts follow each other, as in batches
    assert [of_texts.copied(tokens) for tokens in copies] == [*map(brute, copies)]
    (tmp_path / "texts.jsonl").write_text('{"text": "w3 w4"}\n')
    assert invoke([*argv, "--tokenizer", str(tmp_path / "tokenizer.json"), "-q"]) in (0, 1)
    assert program.TokenIndex(str(tmp_path / "of_texts")).total == 2
    assert [of_texts.copied(tokens) for tokens in copies] == [*map(brute, copies)]  # while it runs
    os.utime(tmp_path / "data" / "1.bin", (1, 1))
    with pytest.raises(ValueError, match="changed since"):
        program.TokenIndex(str(index))


class Speaker(nn.Module):
    """A small model that learns a text by heart."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 32), nn.Linear(96, CLASSES)
        self.mixer = nn.GRU(32, 96, batch_first=True)

    def forward(self, ids):
        return self.head(self.mixer(self.embedding(ids))[0])


def test_a_model_of_a_text_that_came_often_repeats_it(program, tmp_path, breaches):
    """`memorization_rate` of one that learnt it, of one that did not, and of a rule it follows."""
    torch.manual_seed(4)
    chance, length = random.Random(9), 32
    text = chance.choices(range(CLASSES), k=150)
    write_tokens(tmp_path / "often" / "train.bin", text * 40)
    write_tokens(tmp_path / "cycle" / "train.bin", [n % CLASSES for n in range(5000)])
    for name in ("often", "cycle"):
        argv = ["data", "check", str(tmp_path / name), "--index", str(tmp_path / f"{name}.index")]
        assert invoke([*argv, "-q"]) in (0, 1)

    def rate(model, index, seconds=60.0):
        ids = torch.zeros(ROWS, length, dtype=torch.int64)
        document = {"device": "cpu", "autocast": False, "dtype": torch.float32}
        batch = program.Batch((ids,), {}, None, document, ids)
        seen, until_s = program.SeenLosses(torch), time.monotonic() + seconds
        evaluation = program.Evaluation(torch, model, batch, seen, until_s)
        evaluation.measure_memory(str(tmp_path / index), texts=32)
        return evaluation.values.get("memorization_rate"), evaluation.unmeasured

    model, tokens = Speaker(), torch.tensor(text * 3)
    untrained = rate(model, "often.index")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(150):
        rows = torch.stack([tokens[n : n + length + 1] for n in torch.randint(300, (32,))])
        F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert untrained == (0.0, {})
    learnt = rate(model, "often.index")[0]
    assert learnt > 20.0
    frames = [{"memorization_rate": value} for value in (untrained[0], learnt)]
    assert breaches("quality", *frames) == {"memorized"}
    assert breaches("quality", frames[0], frames[0]) == set()
    assert rate(Cycle(prior=1.0 - 1e-9), "cycle.index")[0] == 100.0
    assert "time for 0 tokens" in rate(model, "often.index", 0.0)[1]["memorization_rate"]
    assert "No such file" in rate(model, "no.index")[1]["memorization_rate"]


@pytest.mark.parametrize("labels", ["ids", "others"])
def test_labels_that_are_the_ids_but_for_the_padding_are_replaced(labels, evaluate, tmp_path):
    """And others make a loss of the file's tokens unknown."""
    job = Job(tmp_path, "shift")
    tokens = random.Random(5).choices(range(CLASSES), k=20 * LENGTH + 1)
    (tmp_path / "held.bin").write_bytes(array.array("H", tokens).tobytes())
    if labels == "others":
        job.call = job.call[0], (job.call[0] * 5 + 3) % CLASSES
        document = torch.load(tmp_path / "batch.pt")
        torch.save({**document, "args": job.call}, tmp_path / "batch.pt")
    found = evaluate(job.request(val={"held": str(tmp_path / "held.bin")}, tokens=1000))

    windows = torch.tensor(tokens[:-1]).view(20, LENGTH)
    with torch.no_grad():
        loss = float(in_double(job.model)(windows, windows))
    if labels == "ids":
        assert found["values"]["checkpoint_val_loss"] == pytest.approx(loss, rel=2e-4)
    else:
        assert "labels" in found["unmeasured"]["checkpoint_val_loss.held"]
        assert "checkpoint_val_loss" not in found["values"]


def test_a_measure_that_fails_or_cannot_be_told_leaves_the_others(evaluate, tmp_path):
    """No graph, a loss that the job takes of shifted logits, and a file of uint32."""
    job = Job(tmp_path, kind=NoGradients)
    held = tmp_path / "held.bin"
    held.write_bytes(array.array("I", [n % CLASSES for n in range(500)]).tobytes())
    (odd := tmp_path / "odd.bin").write_bytes(bytes(301))
    os.mkfifo(fifo := tmp_path / "fifo.bin")
    files = {"held": held, "odd": odd, "fifo": fifo, "lost": tmp_path / "lost.bin"}
    val = {name: str(path) for name, path in files.items()}
    found = evaluate(job.request(val=val, tokens=1000, index=str(odd)))
    document = torch.load(tmp_path / "batch.pt")
    targets = (job.window[:, 1:-1].flatten(), CLASSES, -100, ROWS, ROWS * (LENGTH - 1))
    torch.save({**document, "targets": targets}, tmp_path / "batch.pt")
    shifted = evaluate(job.request())

    assert found["now"] == found["was"] and "checkpoint_probe_loss" in found["values"]
    assert "out of memory" in found["unmeasured"]["curvature_trace_est"]
    reasons = {name: found["unmeasured"][f"checkpoint_val_loss.{name}"] for name in files}
    assert "uint32: of" in reasons["held"]
    assert reasons["odd"] == f"{odd} is no file of token ids (.bin, uint16 or uint32)"
    assert reasons["fifo"].startswith(f"{fifo} is no file of token ids")
    assert reasons["lost"] == f"{files['lost']}: No such file or directory"
    assert "is no index" in found["unmeasured"]["memorization_rate"]
    assert "checkpoint_probe_loss" in shifted["unmeasured"]


def test_a_part_that_the_job_compiled_is_not_compiled_again(evaluate, tmp_path):
    """A few forwards are not worth it, and a compiler takes more than the limits allow."""
    request = Job(tmp_path, kind=PartlyCompiled).request()
    by_job = OptimizedModule.compiled

    answer = evaluate(request)

    assert answer["now"] == answer["was"] and not answer["unmeasured"]
    assert OptimizedModule.compiled == by_job > 0


def test_the_trace_is_that_of_the_whole_hessian(program):
    """`curvature_trace_est` of a net of 500 weights, which come back as they were."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 7), nn.Flatten())
    x, y = torch.randn(64, 12), torch.randint(7, (64,))
    weights = [*net.parameters()]
    before = [weight.detach().clone() for weight in weights]

    estimate = program.trace_of_hessian(torch, lambda: F.cross_entropy(net(x), y), weights, 200)

    double = net.double()
    gradients = torch.autograd.grad(
        F.cross_entropy(double(x.double()), y), [*double.parameters()], create_graph=True
    )
    flat = torch.cat([g.flatten() for g in gradients])
    parameters = [*double.parameters()]
    rows = [torch.autograd.grad(value, parameters, retain_graph=True) for value in flat]
    hessian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    beside = hessian - torch.diag(hessian.diagonal())
    error = (2.0 * float(beside.square().sum()) / 200) ** 0.5  # of the mean over random signs
    assert estimate == pytest.approx(float(hessian.trace()), abs=3.0 * error)
    assert 3.0 * error < 0.2 * estimate
    assert all(torch.equal(a, b.float()) for a, b in zip(before, parameters, strict=True))


def test_each_part_that_a_checkpoint_lacks_is_counted(evaluate, tmp_path):
    """`checkpoint_parts_lost`, beside a checkpoint of the same name that had all of them."""
    job, previous = Job(tmp_path), {"previous": str(tmp_path / "outputs.c1.pt")}
    evaluate(job.request("c1.pt"))

    def lost(content, **series):
        answer = evaluate(job.request("c2.pt", content, **previous, **series))
        parts = {
            name: verdict for name, verdict in answer["parts"].items() if verdict != "restored"
        }
        return answer["values"]["checkpoint_parts_lost"], parts

    for part, keys in (
        ("optimizer", {"optimizer"}),
        ("scheduler", {"scheduler"}),
        ("random", {"rng_state", "python_rng"}),
    ):
        content = {key: value for key, value in job.content().items() if key not in keys}
        count, parts = lost(content)
        assert (count, [*parts]) == (1.0, [part])
    content = job.content()
    content["optimizer"]["state"] = {}
    count, parts = lost(content)
    assert count == 1.0 and "no moments" in parts["optimizer"]
    count, parts = lost(job.model.state_dict(), series="weights.pt")  # another file than the last
    assert (count, {*parts}) == (0.0, {"optimizer", "scheduler", "random"})


@pytest.mark.parametrize("pickles", [True, False])
def test_what_is_not_known_of_a_part_is_not_lost(pickles, evaluate, tmp_path):
    """Optimizers that do not pickle, another one of as many weights, and a name with "rng"."""
    count = len([*Tiny().parameters()])
    other = torch.optim.AdamW([nn.Parameter(torch.zeros(2 + n)) for n in range(count)])
    if not pickles:
        other.defaults["local"] = lambda: None
    job = Job(tmp_path, beside=[other])
    content = {**job.content(), "patterngenerator.w": torch.rand(2000)}

    answer = evaluate(job.request(content=content))

    assert answer["values"]["checkpoint_parts_lost"] == 0.0
    verdict = answer["parts"].pop("optimizer")
    assert verdict == "restored" if pickles else verdict.startswith("unknown: ")
    assert {*answer["parts"].values()} == {"restored"}


class Malicious:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_is_not_proved_is_unknown_and_no_code_of_a_checkpoint_runs(
    program, evaluate, tmp_path
):
    """Other weights, a weight that is missing, a structure that is another file, and a pickle."""
    job = Job(tmp_path)
    request = job.request()
    content = job.content()
    other = copy.deepcopy(content)
    other["net"]["module.norm.weight"] += 0.01
    lacking = copy.deepcopy(content)
    del lacking["net"]["module.norm.weight"]
    averages = {name: value * 0.9 for name, value in content["net"].items()}
    assert evaluate(job.request("averages.pt", {"ema": averages, **content}))["values"]
    malicious = {**content, "extra": Malicious(tmp_path / "ran")}
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(malicious, protocol=2))

    for name, problem, phrase in (
        ("other.pt", other, "other weights"),
        ("lacking.pt", lacking, "lacks 1 of"),
        ("malicious.pt", malicious, "not an allowed global|Unsupported"),
    ):
        with pytest.raises(Exception, match=phrase):
            evaluate(job.request(name, problem))
    with pytest.raises(Exception, match=r"Unsupported|allowed"):
        evaluate({**request, "checkpoint": str(plain)})
    (tmp_path / "structure.pkl").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(program.UnknownError, match="not the file that the job reported"):
        evaluate(request)
    assert not (tmp_path / "ran").exists()
    job = Job(tmp_path)
    with torch.no_grad():
        job.model.scale.fill_(float("nan"))
    with pytest.raises(program.UnknownError, match="no finite value"):
        evaluate(job.request())


@pytest.mark.parametrize("kind", ["list", "text", "tensor", "table"])
def test_a_model_that_holds_its_data_has_no_structure(kind):
    """The training waits for no copy of it."""
    data = {"list": [0] * 10**7, "text": "x" * (1 << 26), "tensor": torch.zeros(1 << 24)}
    model = nn.Linear(2, 2)
    model.data = {**data, "table": Table()}[kind]

    with pytest.raises(StructureError, match="holds"):
        pickle_structure(torch, model, [])


def test_a_model_whose_class_cannot_be_named_has_no_structure():
    class Local(nn.Module):
        pass

    with pytest.raises(StructureError, match="does not pickle"):
        pickle_structure(torch, Local(), [])
