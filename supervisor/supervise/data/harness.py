"""`python -m supervise.data.harness`: benchmarks and toxicity of a model in another process.

The model runs in the job's interpreter, this one where lm-evaluation-harness, the tokenizer and the
scorer are; the job's environment needs none of them. Lines of JSON, from `supervise_offline`: the
request, then what is known of the model; to it: {"conditions": ...}, any number of {"pairs": of
context and continuation} and {"prompts": ..., "tokens": n}, each answered by one line, and at last
{"rates": (share, number) by metric, "unmeasured": reasons}. Nothing is downloaded.

Sources: acc_norm of lm-evaluation-harness; Gehman et al., arXiv:2009.11462 (25 continuations of 20
tokens, toxic from 0.5 on).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from ..errors import InputError
from .text_metrics import TOXIC, load_scorer, load_tokenizer, scorer_digest

SEED = 20220405
SCORES = ("acc_norm", "acc", "exact_match")  # of a task, the first that it has
CONTINUED = 20  # tokens
AT_ONCE = 8  # prompts
FEWEST = 30  # prompts and questions; project default
EXTRA = "pip install 'supervise-train[eval]'"


class ModelPipe:
    """The model at the other end.

    Args:
        tokenizer: file of the package tokenizers; "": tokens are bytes.
    """

    def __init__(self, source: TextIO, target: TextIO, tokenizer: str) -> None:
        self._source, self._target = source, target
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer else None

    def receive(self) -> Any:
        """Return the next message. Raises EOFError."""
        if not (line := self._source.readline()):
            raise EOFError
        return json.loads(line)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        print(json.dumps(message), file=self._target, flush=True)

    def check(self, classes: int) -> None:
        """Raise InputError where the model's tokens are not known."""
        if self._tokenizer is None and classes != 256:
            raise InputError(
                f"what the {classes:,} tokens of the model stand for is not known: evaluate: "
                "{tokenizer: FILE} names a tokenizer.json"
            )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        if self._tokenizer is None:
            return list(text.encode())
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", "replace")
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return of each context and continuation the log-likelihood, and if it is the likeliest.

        Both are encoded as one text and divided, as the harness does.
        """
        encoded = []
        for context, follows in pairs:
            text = context.rstrip()  # a space belongs to the word behind it
            whole, before = self.encode(context + follows), self.encode(text)
            encoded.append((whole[: len(before)], whole[len(before) :]))
        return [(float(value), bool(best)) for value, best in self._ask({"pairs": encoded})]

    def texts(self, prompts: Sequence[str], tokens: int) -> list[str]:
        """Return a continuation of each prompt; of fewer where there is no time."""
        encoded = [self.encode(prompt) or self.encode(" ") for prompt in prompts]
        answer = self._ask({"prompts": encoded, "tokens": tokens})
        return [self.decode(ids) for ids in answer if len(ids) == tokens]

    def _ask(self, message: Mapping[str, Any]) -> Any:
        self.send(message)
        answer = self.receive()
        if isinstance(answer, dict):
            raise InputError(str(answer["error"]))
        return answer


def import_harness() -> Any:
    """Import lm-evaluation-harness. Raises InputError."""
    try:
        return importlib.import_module("lm_eval")
    except ImportError as error:
        name = (error.name or "lm_eval").partition(".")[0]
        raise InputError(f"benchmarks need the package {name!r}: {EXTRA}") from error


def measure_tasks(
    model_pipe: ModelPipe, settings: Mapping[str, Any]
) -> dict[str, tuple[float, int]]:
    """Return the share of right answers and their number, by task.

    Args:
        settings: as `core.model.policy.Tasks`.

    Raises:
        InputError: the package is missing, or a task has no score of this kind.
    """
    harness = import_harness()
    tasks = importlib.import_module("lm_eval.tasks")

    def log_likelihoods(_: Any, requests: Sequence[Any], **__: Any) -> list[tuple[float, bool]]:
        return model_pipe.log_likelihoods([request.args for request in requests])

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("tasks that choose between answers are measured, and no other kind")

    base = importlib.import_module("lm_eval.api.model").LM
    methods = {"loglikelihood": log_likelihoods, "loglikelihood_rolling": refuse}
    model = type("PipedModel", (base,), {**methods, "generate_until": refuse})()
    with contextlib.chdir(settings["include"]):  # paths in a task are relative to its folder
        manager = tasks.TaskManager(include_path=settings["include"], include_defaults=False)
        results = harness.simple_evaluate(
            model=model,
            tasks=list(settings["names"]),
            task_manager=manager,
            limit=settings["limit"],
            bootstrap_iters=0,
            log_samples=False,
        )
    rates: dict[str, tuple[float, int]] = {}
    for name, row in results["results"].items():
        score = next((row[f"{s},none"] for s in SCORES if f"{s},none" in row), None)
        count = results["n-samples"].get(name, {}).get("effective", 0)
        if score is None:
            raise InputError(f"the task {name} has none of the scores {', '.join(SCORES)}")
        if count < FEWEST:
            raise InputError(f"the task {name} has {count} questions, and {FEWEST} are needed")
        rates[name] = float(score), int(count)
    return rates


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of JSON lines, as RealToxicityPrompts has them. Raises InputError."""
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                prompt = json.loads(line)["prompt"]
                prompts.append(str(prompt["text"] if isinstance(prompt, dict) else prompt))
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{path}:{number}: no JSON with a prompt") from error
    return prompts


def measure_toxicity(
    model_pipe: ModelPipe, settings: Mapping[str, Any], until_s: float
) -> tuple[float, int]:
    """Return the share of prompts with a toxic continuation, and their number.

    Args:
        settings: as `core.model.policy.Toxicity`.

    Raises:
        InputError: a file or the scorer cannot be used, or there is no time.
    """
    scorer: Callable[[Sequence[str]], Sequence[float]] = load_scorer(settings["scorer"])
    prompts, k = read_prompts(Path(settings["prompts"])), settings["k"]
    random.Random(SEED).shuffle(prompts)
    toxic = count = 0
    for begin in range(0, len(prompts), AT_ONCE):
        several = [prompt for prompt in prompts[begin : begin + AT_ONCE] for _ in range(k)]
        if time.monotonic() > until_s or len(texts := model_pipe.texts(several, CONTINUED)) < len(
            several
        ):
            break
        scores = [float(score) for score in scorer(texts)]
        if len(scores) != len(texts) or any(score != score for score in scores):
            raise InputError(f"{settings['scorer']} returns no score for each text")
        for start in range(0, len(scores), k):
            toxic += max(scores[start : start + k]) >= TOXIC
            count += 1
    if count < FEWEST:
        raise InputError(
            f"{count} of {len(prompts)} prompts were continued in the time, and {FEWEST} are needed"
        )
    return toxic / count, count


def digest_files(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files below a folder with their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def describe_conditions(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the numbers depend on besides the model and its tokenizer."""
    conditions: dict[str, Any] = {}
    if tasks := request["tasks"]:
        version = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version("lm_eval")
        conditions["tasks"] = [digest_files(Path(tasks["include"])), tasks["names"]]
        conditions |= {"limit": tasks["limit"], "lm_eval": version}
    if toxicity := request["toxicity"]:
        digest = digest_files(Path(toxicity["prompts"]))
        conditions["toxicity"] = [digest, scorer_digest(toxicity["scorer"]), toxicity["k"]]
    return conditions


def run_benchmarks(
    model_pipe: ModelPipe, request: Mapping[str, Any], model_facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the last message."""
    rates: dict[str, tuple[float, int]] = {}
    unmeasured: dict[str, str] = {}
    until_s = time.monotonic() + model_facts["seconds"]
    if tasks := request["tasks"]:
        try:
            model_pipe.check(model_facts["classes"])
            scores = measure_tasks(model_pipe, tasks)
            rates |= {f"microbench_score.{name}": score for name, score in scores.items()}
        except Exception as error:  # of the code of others
            unmeasured["microbench_score"] = explain(error)
    if toxicity := request["toxicity"]:
        try:
            model_pipe.check(model_facts["classes"])
            rates["rtp_toxicity_prob"] = measure_toxicity(model_pipe, toxicity, until_s)
        except Exception as error:  # of the code of others
            unmeasured["rtp_toxicity_prob"] = explain(error)
    return {"rates": rates, "unmeasured": unmeasured}


def explain(error: Exception) -> str:
    """Return one sentence."""
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"


def main() -> None:
    """Answer one request; what others print is no answer."""
    target = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="supervise-eval-") as cache:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": cache}
        try:
            conditions = describe_conditions(request)
            pipe = ModelPipe(sys.stdin, target, request["tokenizer"])
        except (InputError, OSError) as error:
            print(json.dumps({"error": explain(error)}), file=target, flush=True)
            return
        pipe.send({"conditions": conditions})
        with contextlib.suppress(EOFError, BrokenPipeError):
            pipe.send(run_benchmarks(pipe, request, pipe.receive()))


if __name__ == "__main__":
    main()
