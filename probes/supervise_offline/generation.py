"""Texts that a rebuilt model makes, copies in them, and likelihoods for a harness.

The harness is a process of the supervisor's interpreter, for what the job's may lack: benchmarks of
lm-evaluation-harness, a tokenizer, a scorer of toxicity. It asks and is answered by lines of JSON,
see `supervise.data.harness`.
"""

import json
import math
import random
import subprocess
import threading
import time
from typing import Any, Callable, Mapping, Sequence

from supervise_offline import TokenIndex
from supervise_offline.rebuild import UnknownError

SEED = 20220405
LARGEST = 1 << 24  # numbers of outputs at a time
# Of `memorization_rate`: texts, tokens of each, texts at a time, tokens at least; defaults.
TEXTS, GENERATED, TOGETHER, FEWEST_GENERATED = 256, 128, 32, 2000
EARLIER = 4  # evaluations whose mean a share is compared with; project default


class TextModel:
    """A model that makes texts, of as many rows at a time as it takes.

    Args:
        logits: of rows of tokens, each one longer than the model takes, by row and position, and
            their targets; both may lack the last positions.
        shape: of the job's batch, (rows, positions). classes: of the outputs.
    """

    def __init__(
        self,
        torch: Any,
        logits: Callable[[Any], tuple[Any, Any]],
        shape: Sequence[int],
        classes: int,
    ) -> None:
        self._torch, self._logits, self.classes = torch, logits, classes
        own, self.length = shape
        self._rows = max(own, min(TOGETHER, LARGEST // (self.length * classes)))
        began = time.monotonic()
        try:
            self.generate([[0]] * self._rows, 1)
        except Exception:  # it may take just as many rows as those of the job
            self._rows, began = own, time.monotonic()
            self.generate([[0]] * own, 1)
        self._step_s = time.monotonic() - began

    def generate(
        self, prompts: list[list[int]], count: int, until_s: float = math.inf
    ) -> list[list[int]]:
        """Return what follows each prompt at a temperature of 1; shorter or fewer if late."""
        texts: list[list[int]] = []
        for begin in range(0, len(prompts), self._rows):
            if time.monotonic() > until_s:
                break
            part = prompts[begin : begin + self._rows]
            padding = part[-1:] * (self._rows - len(part))
            texts += self._continue(part + padding, count, until_s)[: len(part)]
        return texts

    def _continue(self, prompts: list[list[int]], count: int, until_s: float) -> list[list[int]]:
        torch, rows = self._torch, range(len(prompts))
        chance = torch.Generator().manual_seed(SEED + sum(map(sum, prompts)))
        texts = [list(prompt) for prompt in prompts]
        for _ in range(count):
            if time.monotonic() > until_s:
                break
            newest = [text[1 - self.length :] for text in texts]
            padded = [tokens + tokens[-1:] * (self.length + 1 - len(tokens)) for tokens in newest]
            logits, _ = self._logits(torch.tensor(padded))
            ends = logits[list(rows), [len(tokens) - 1 for tokens in newest]]
            drawn = torch.multinomial(ends.softmax(-1), 1, generator=chance)
            for text, token in zip(texts, drawn[:, 0].tolist()):
                text.append(token)
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts)]

    def log_likelihoods(
        self, pairs: Sequence[Sequence[list[int]]], until_s: float
    ) -> list[tuple[float, bool]]:
        """Return of each (context, continuation) the log-likelihood, and if it is the likeliest.

        A context is cut at its begin. Without one, the first token of what follows is not counted.

        Raises:
            UnknownError: there is no time, or a continuation is longer than the model takes.
        """
        results: list[tuple[float, bool]] = []
        for begin in range(0, len(pairs), self._rows):
            if time.monotonic() > until_s:
                raise UnknownError(f"there was time for {begin:,} of {len(pairs):,} answers")
            part = list(pairs[begin : begin + self._rows])
            windows, spans = [], []
            for context, follows in part:
                tokens = [*context, *follows][-self.length :]
                if not follows or len(follows) >= self.length:
                    raise UnknownError(
                        f"an answer has {len(follows):,} tokens, of {self.length:,} that fit"
                    )
                spans.append((max(1, len(tokens) - len(follows)), len(tokens)))
                windows.append(tokens + tokens[-1:] * (self.length + 1 - len(tokens)))
            windows += windows[-1:] * (self._rows - len(part))
            logits, targets = self._logits(self._torch.tensor(windows))
            logs = logits.log_softmax(-1).gather(2, targets.unsqueeze(-1)).squeeze(-1).double()
            best = logits.argmax(-1) == targets
            for row, (start, end) in enumerate(spans):
                span = slice(start - 1, end - 1)
                results.append((float(logs[row, span].sum()), bool(best[row, span].all())))
        return results

    def copied_share(self, index: TokenIndex, texts: int, until_s: float) -> float:
        """Return the share of the tokens of texts without a prompt that are copies."""
        chance, copied, total = random.Random(SEED), 0, 0
        batch_s = GENERATED * self._step_s
        while total < texts * GENERATED and time.monotonic() + batch_s < until_s:
            # As for any text: with a token as often as the data has it.
            prompts = [[index.token(chance.randrange(index.total))] for _ in range(self._rows)]
            for text in self.generate(prompts, GENERATED, until_s):
                copied += index.copied(text)
                total += len(text)
        if total < FEWEST_GENERATED:
            raise UnknownError(f"there was time for {total} tokens, of {FEWEST_GENERATED:,}")
        return copied / total


class Harness:
    """A process that asks a model, and says what its answers come to.

    Args:
        command: that starts it. request: its first line.

    Attributes:
        metrics: that it measures. conditions: that they depend on besides the model.

    Raises:
        UnknownError, OSError: it does not start.
    """

    def __init__(self, command: Sequence[str], request: Mapping[str, Any], until_s: float) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._alarm = threading.Timer(max(0.0, until_s - time.monotonic()), self._process.kill)
        self._alarm.daemon = True
        self._alarm.start()
        self.metrics: list[str] = request["metrics"]
        try:
            self._send(request)
            self.conditions = self._read()["conditions"]
        except BaseException:
            self.close()
            raise

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise UnknownError(f"the harness ended with exit code {code}, or had no time")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise UnknownError(message["error"])
        return message

    def run(self, model: TextModel, until_s: float) -> dict[str, Any]:
        """Answer until it is done; return its last message."""
        self._send({"classes": model.classes, "seconds": until_s - time.monotonic()})
        while "rates" not in (message := self._read()):
            try:
                if "pairs" in message:
                    reply: Any = model.log_likelihoods(message["pairs"], until_s)
                else:
                    reply = model.generate(message["prompts"], message["tokens"], until_s)
            except Exception as error:  # of the job's code too
                text = str(error) if isinstance(error, UnknownError) else repr(error)[:300]
                reply = {"error": text}
            self._send(reply)
        return message

    def close(self) -> None:
        """End it. Safe to repeat."""
        self._alarm.cancel()
        self._process.kill()
        self._process.communicate()


def standard_errors_between(now: Sequence[float], earlier: Sequence[Sequence[float]]) -> float:
    """Return how far a share is above the mean of earlier ones, in standard errors.

    Both are (share, number). As of two proportions, the mean counting as one of them.
    """
    share, number = now
    mean = sum(row[0] for row in earlier) / len(earlier)
    before = sum(row[1] for row in earlier) / len(earlier)
    pooled = (share * number + mean * before) / (number + before)
    error = math.sqrt(pooled * (1.0 - pooled) * (1.0 / number + 1.0 / before))
    return (share - mean) / error if error else 0.0


def compare_rates(
    rates: Mapping[str, list[float]], earlier: Mapping[str, list[list[float]]]
) -> dict[str, float]:
    """Return how far benchmarks fell and toxicity rose, at most and in standard errors."""
    changes: dict[str, list[float]] = {}
    for name, rate in rates.items():
        if earlier.get(name):
            z = standard_errors_between(rate, earlier[name])
            is_score = name.startswith("microbench_score")
            metric = "microbench_fall_z" if is_score else "rtp_toxicity_rise_z"
            changes.setdefault(metric, []).append(-z if is_score else z)
    return {metric: max(0.0, *several) for metric, several in changes.items()}
