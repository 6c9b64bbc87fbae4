"""Each metric of training data against one computed in another way."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections import Counter

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from supervise.data import divergence, find_pii, masked_excerpt

from .conftest import texts, write_lines

TEXTS = texts(400)


@pytest.fixture
def tokenizer(tmp_path):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(tmp_path / "tok.json"))
    return made, tmp_path / "tok.json"


def test_source_mix_share_is_that_of_the_bytes(tmp_path, check):
    rows = [{"text": t, "meta": {"source": "abc"[i % 5 % 3]}} for i, t in enumerate(TEXTS)]
    write_lines(tmp_path / "a.jsonl", rows)
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row["meta"]["source"]] += len(row["text"])

    metrics = check(tmp_path).metrics

    for source, size in sizes.items():
        share = 100.0 * size / sum(sizes.values())
        assert metrics[f"source_mix_share.{source}"] == pytest.approx(share, abs=1e-4)


def test_seq_len_p50_and_seq_len_p95_and_bytes_per_token_are_those_of_the_tokenizer(
    tokenizer, tmp_path, check
):
    made, path = tokenizer
    write_lines(tmp_path / "d/a.jsonl", TEXTS)
    encoded = [made.encode(text).ids for text in TEXTS]
    lengths = [len(ids) for ids in encoded]

    metrics = check(tmp_path / "d", "--tokenizer", path).metrics

    assert metrics["seq_len_p50"] == pytest.approx(numpy.percentile(lengths, 50), rel=0.02)
    assert metrics["seq_len_p95"] == pytest.approx(numpy.percentile(lengths, 95), rel=0.02)
    assert metrics["bytes_per_token"] == pytest.approx(sum(map(len, TEXTS)) / sum(lengths))


def test_tokens_are_those_of_the_whole_text_where_the_tokenizer_cuts_and_pads(
    tokenizer, tmp_path, check
):
    """As one is that was saved behind a call for batches."""
    made, path = tokenizer
    made.enable_truncation(8)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "cutting.json"))
    write_lines(tmp_path / "d/a.jsonl", TEXTS)

    whole, cut = (
        check(tmp_path / "d", "--level", "cheap", "--tokenizer", name).metrics
        for name in (path, tmp_path / "cutting.json")
    )

    assert cut == whole and cut["seq_len_p50"] > 8


def test_what_another_tokenizer_or_other_fields_counted_is_not_compared(tokenizer, tmp_path, check):
    made, path = tokenizer
    made.add_tokens([text[:30] for text in TEXTS[:100]])
    made.save(str(tmp_path / "other.json"))
    write_lines(tmp_path / "d/a.jsonl", [{"text": t, "content": t[::-1]} for t in TEXTS])
    base = tmp_path / "m.json"
    check(tmp_path / "d", "--tokenizer", path, "--manifest", base)
    argv = (tmp_path / "d", "--baseline", base, "--tokenizer")

    other = check(*argv, tmp_path / "other.json")
    field = check(*argv, path, "--text-field", "content")

    ids = [{"input_ids": made.encode(text).ids} for text in TEXTS[:200]]
    write_lines(tmp_path / "ids/a.jsonl", ids)
    check(tmp_path / "ids", "--tokenizer", path, "--manifest", tmp_path / "ids.json")
    argv = (tmp_path / "ids", "--baseline", tmp_path / "ids.json")
    decoded = check(*argv, "--tokenizer", tmp_path / "other.json").document["unknown"]

    assert "another tokenizer" in decoded["bytes_per_token_outside"]
    assert other.fired == field.fired == set()
    for metric in ("token_kl_drift", "token_kl_excess", "bytes_per_token_outside"):
        assert "another tokenizer" in other.document["unknown"][metric]
        assert "other fields" in field.document["unknown"][metric]
    assert other.metrics["seq_len_shift"] == other.metrics["doc_loss"] == 0
    assert "other fields" in field.document["unknown"]["doc_loss"]


def test_of_very_many_sources_the_smallest_are_one(tmp_path, check):
    rows = [{"text": TEXTS[i % 400], "source": f"s{i}"} for i in range(2500)]
    rows += [{"text": text, "source": "large"} for text in TEXTS]
    write_lines(tmp_path / "a.jsonl", rows[::2])
    write_lines(tmp_path / "b.jsonl", rows[1::2])

    metrics = check(tmp_path, "--level", "cheap").metrics

    shares = {name: v for name, v in metrics.items() if name.startswith("source_mix_share.")}
    assert len(shares) == 1000 and sum(shares.values()) == pytest.approx(100, abs=0.01)
    assert shares["source_mix_share.large"] == pytest.approx(100 * 400 / 2900, rel=0.05)
    assert shares["source_mix_share.others"] > 40


def test_token_kl_drift_is_the_divergence_less_its_bias(tmp_path, check):
    rng = numpy.random.default_rng(0)
    old, new = (numpy.array([0.5, 0.3, 0.2]), numpy.array([0.4, 0.3, 0.3]))
    for name, shares, count in (("old", old, 40_000), ("new", new, 30_000), ("same", old, 30_000)):
        rows = rng.choice(3, (count // 100, 100), p=shares)
        write_lines(tmp_path / name / "a.jsonl", [{"input_ids": row.tolist()} for row in rows])
    exact = float((new * numpy.log(new / old)).sum())
    base = tmp_path / "m.json"
    check(tmp_path / "old", "--manifest", base)

    moved = check(tmp_path / "new", "--baseline", base)
    same = check(tmp_path / "same", "--baseline", base)

    assert moved.metrics["token_kl_drift"] == pytest.approx(exact, rel=0.2)
    assert abs(same.metrics["token_kl_drift"]) < 0.001
    assert "drift" in moved.fired and "drift" not in same.fired


def test_the_bias_of_two_halves_of_one_text_is_taken_off():
    rng = random.Random(0)
    tokens = [min(999, int(rng.paretovariate(0.8))) for _ in range(20_000)]
    halves = Counter(tokens[::2]), Counter(tokens[1::2])
    n, m = (half.total() for half in halves)
    plain = sum(c / n * math.log(c / n / ((halves[1][t] or 0.5) / m)) for t, c in halves[0].items())

    assert abs(divergence(*halves)) < plain / 2


# ── language ──────────────────────────────────────────────────────────────────────────────────────

SENTENCES = {
    "en": "The weather was cold that morning, and nobody in the village wanted to leave the house.",
    "de": "Am nächsten Morgen war es kalt, und niemand im Dorf wollte das Haus verlassen.",
    "fr": "Le lendemain il faisait froid et personne au village ne voulait quitter la maison.",
    "es": "A la mañana siguiente hacía frío y nadie en el pueblo quería salir de su casa.",
    "it": "La mattina dopo faceva freddo e nessuno nel villaggio voleva uscire di casa.",
    "pt": "Na manhã seguinte fazia frio e ninguém na aldeia queria sair da sua casa.",
    "nl": "De volgende ochtend was het koud en niemand in het dorp wilde het huis verlaten.",
    "pl": "Następnego ranka było zimno i nikt we wsi nie chciał wychodzić z domu.",
    "cs": "Druhý den ráno byla zima a nikdo ve vesnici nechtěl vyjít z domu.",
    "fi": "Seuraavana aamuna oli kylmä, eikä kukaan kylässä halunnut lähteä kotoaan.",
    "hu": "Másnap reggel hideg volt, és a faluban senki sem akarta elhagyni a házát.",
    "tr": "Ertesi sabah hava soğuktu ve köyde kimse evinden çıkmak istemiyordu.",
    "ru": "На следующее утро было холодно, и никто в деревне не хотел выходить из дома.",
    "uk": "Наступного ранку було холодно, і ніхто в селі не хотів виходити з хати.",
    "el": "Το επόμενο πρωί έκανε κρύο και κανείς στο χωριό δεν ήθελε να βγει από το σπίτι.",
    "ar": "في صباح اليوم التالي كان الجو باردا ولم يرغب أحد في القرية في مغادرة منزله.",
    "hi": "अगली सुबह ठंड थी और गाँव में कोई भी अपने घर से बाहर नहीं निकलना चाहता था।",
    "ja": "翌朝は寒かったので、村の誰も家から出ようとしなかった。",
    "ko": "다음 날 아침은 추웠고 마을 사람들은 아무도 집을 나서려고 하지 않았다.",
    "zh": "第二天早上天气很冷，村子里没有人愿意离开自己的家。",
}


def test_language_share_is_right_for_twenty_languages(tmp_path, check):
    """By its bytes; a document of control characters has none."""
    rows = [{"text": text * 3, "source": code} for code, text in SENTENCES.items()]
    write_lines(tmp_path / "a.jsonl", [*rows, {"text": "\x01\x02\x00" * 30}])
    size = {code: len((text * 3).encode()) for code, text in SENTENCES.items()}
    whole = sum(size.values()) + 90

    metrics = check(tmp_path).metrics

    expected = {code: pytest.approx(100 * size[code] / whole, abs=1e-4) for code in size}
    wrong = [code for code in size if metrics.get(f"language_share.{code}") != expected[code]]
    assert len(wrong) <= 1, wrong
    assert metrics["language_share.und"] > 0


# ── copies ────────────────────────────────────────────────────────────────────────────────────────


def grams(text: str) -> frozenset[tuple[str, ...]]:
    terms = re.findall(r"\w+", text.lower())
    return frozenset(tuple(terms[i : i + 5]) for i in range(max(1, len(terms) - 4)))


def edited(text: str, share: float, rng: random.Random) -> str:
    return " ".join(t if rng.random() > share else f"v{rng.randrange(9**5)}" for t in text.split())


def copies_of(originals: list[str], seed: int) -> list[str]:
    """Return copies with none to a tenth of their terms changed: similar to any degree."""
    rng = random.Random(seed)
    return [edited(text, (i % 6) * 0.008, rng) for i, text in enumerate(originals)]


def test_near_dup_rate_is_that_of_all_pairs(tmp_path, check):
    """Documents that are no first one of a set joined by pairs of 0.8 or more: 97 % of them."""
    originals = texts(150, low=60, high=200)
    docs = [*originals, *copies_of(originals[:120], 1), *originals[:10]]
    random.Random(2).shuffle(docs)
    parents = [*range(len(docs))]

    def root(i: int) -> int:
        while parents[i] != i:
            i = parents[i]
        return i

    sets = [grams(text) for text in docs]
    for i, j in itertools.combinations(range(len(docs)), 2):
        if len(sets[i] & sets[j]) >= 0.8 * len(sets[i] | sets[j]):
            parents[root(j)] = root(i)
    exact = len(docs) - len({root(i) for i in range(len(docs))})
    write_lines(tmp_path / "a.jsonl", docs)

    done = check(tmp_path)

    found = round(done.metrics["near_dup_rate"] * len(docs) / 100)
    assert 0.97 * exact <= found <= exact
    identical = len(docs) - len({*docs})
    assert done.metrics["exact_dup_rate"] == pytest.approx(100 * identical / len(docs))
    assert identical < exact, "some are only similar"


def test_train_val_overlap_is_that_of_all_pairs(tmp_path, check):
    train, fresh = texts(120, low=60, high=200), texts(60, seed=9, low=60, high=200)
    near = copies_of(train[:40], 3)
    val = [*fresh, *near, *train[100:103]]
    write_lines(tmp_path / "train/a.jsonl", train)
    write_lines(tmp_path / "val/a.jsonl", val)
    sets = [grams(text) for text in train]
    leaked = sum(any(len(v & t) >= 0.8 * len(v | t) for t in sets) for v in map(grams, val))
    same = len({*val} & {*train})

    done = check(tmp_path / "train", "--val", tmp_path / "val")

    found = round(done.metrics["train_val_overlap"] * len(val) / 100)
    assert 0.97 * leaked <= found <= leaked
    assert done.metrics["train_val_overlap_exact"] == pytest.approx(100 * same / len(val))
    assert done.metrics["doc_count"] == len(train), "held-out documents are none of the corpus"
    assert done.code == 1 and "leak" in done.fired and "overlap" not in done.fired, "told once"


def test_doc_repeat_hotspots_counts_the_documents_with_a_paragraph(tmp_path, check):
    """One of 61 terms, in 37 of 300 documents which are otherwise different."""
    paragraph = texts(1, seed=5, low=61, high=61)[0]
    assert len(paragraph) > 200
    docs = texts(300)
    docs[:37] = [f"{text[:150]} {paragraph} {text[150:]}" for text in docs[:37]]
    write_lines(tmp_path / "a.jsonl", docs)

    done = check(tmp_path)

    assert done.metrics["doc_repeat_hotspots"] == 37
    assert done.metrics["doc_repeat_share"] == pytest.approx(100 * 37 / 300)
    assert "hotspots" in done.fired


def test_documents_without_content_are_no_copies_and_no_leak(tmp_path, check):
    empty = ["", " \n", "\t"]
    write_lines(tmp_path / "train/a.jsonl", [*TEXTS[:40], *empty, *empty])
    write_lines(tmp_path / "val/a.jsonl", [*TEXTS[50:60], *empty])

    done = check(tmp_path / "train", "--val", tmp_path / "val", "--manifest", tmp_path / "m.json")

    for metric in ("near_dup_rate", "train_val_overlap", "train_val_overlap_exact"):
        assert done.metrics[metric] == 0.0, metric
    manifest = json.loads((tmp_path / "m.json").read_text())
    assert manifest["duplicates"]["val_documents"] == 10
    assert manifest["counts"]["empty"] == 6


# ── personal data ─────────────────────────────────────────────────────────────────────────────────

PERSONAL = [
    ("email", "write to jane.doe@acme-corp.com today"),
    ("email", "mailto:r.feynman@caltech.edu"),
    ("email", "<bob+spam@sub.mail.co>"),
    ("email", "Kontakt: müller.k@firma.de"),
    ("email", "a_b@x1.io,"),
    ("card", "card 4111 1111 1111 1111 exp 12/27"),
    ("card", "5555555555554444"),
    ("card", "amex 378282246310005"),
    ("card", "6011-1111-1111-1117"),
    ("iban", "IBAN DE89 3704 0044 0532 0130 00"),
    ("iban", "GB82WEST12345698765432"),
    ("iban", "FR14 2004 1010 0505 0001 3M02 606"),
    ("ssn", "SSN: 536-90-4399"),
    ("ssn", "his number 219-09-9998?"),
    ("ipv4", "from 8.8.4.4 port 443"),
    ("ipv4", "client 93.184.216.34"),
    ("phone", "call +1 650-253-0000 now"),
    ("phone", "(212) 736-5000"),
    ("phone", "tel +49 30 227 32152"),
    ("phone", "+44 20 7219 4272"),
    ("phone", "212-736-5000"),
    ("phone", "+33 1 40 63 60 00"),
    ("key", "aws AKIAIOSFODNN7EXAMPLE key"),
    ("key", "token ghp_" + "a1B2" * 9),
    ("key", "-----BEGIN RSA PRIVATE " + "KEY-----"),
]
HARMLESS = [
    *("user@example.com", "a@b", "version 1.2.3.4.5", "numpy 1.21.0.1", "ip 192.168.1.10"),
    *("10.0.0.1", "127.0.0.1", "255.255.255.255", "date 2024-01-02-2024", "1234567890123456"),
    *("order 4111 1111 1111 1112", "id 0000000000000000", "3.14159265358979323846"),
    *("sha 9f86d081884c7d659a2f", "000-12-3456", "666-45-6789", "123-45-67890", "@decorator"),
    *("uuid 123e4567-e89b-12d3-a456-426614174000", "ISBN 978-3-16-148410-0", "x@y = z"),
    *("foo @ bar.baz", "git@github", "phone 555-0199", "+1 000-000-0000", "AKIA_NOT", "sk-learn"),
    *("range(1000000000000, 2000000000000)", "0x4111111111111111", "GB82WEST12345698765433"),
    *("DE00 0000 0000 0000 0000 00", "version 2.10.3.1 beta", "1.1 2.2 3.3", "000-000-0000"),
    *("timestamp 1700000000000", "4 5 6 7 8 9 10 11 12 13", "latitude 40.712776 -74.005974"),
    *("self.x@self.y", "python@3.11", "199-20-20", "8.8.8 chapter", "123-456-789", "tel: n/a"),
    "0123-4567-8901",
]


def test_pii_hit_rate_counts_what_was_labelled(tmp_path, check):
    """24 of 25 at least, and one false hit in 44 at most; every hit is masked where it is shown."""
    right = sum(kind in {hit for hit, _, _ in find_pii(text)} for kind, text in PERSONAL)
    false = [text for text in HARMLESS if any(find_pii(text))]
    assert right >= 24 and len(HARMLESS) == 44 and len(false) <= 1, false
    rows = [text for _, text in PERSONAL]
    write_lines(tmp_path / "d/a.jsonl", [*rows, *HARMLESS])
    page, manifest = tmp_path / "r.html", tmp_path / "m.json"

    metrics = check(tmp_path / "d", "--report", page, "--manifest", manifest).metrics

    kinds = Counter(kind for kind, _ in PERSONAL)
    for kind in ("email", "card", "iban", "ssn", "phone", "key"):
        assert metrics[f"pii_hit_rate.{kind}"] == pytest.approx(100 * kinds[kind] / 69)
    shown = page.read_text() + manifest.read_text()
    assert "jane.doe" not in shown and "4111 1111" not in shown and "j•" in shown
    assert masked_excerpt("x jane.doe@acme-corp.com y") == "x j••••••••••••••••••••m y"


@pytest.mark.parametrize(("hits", "kinds"), [(1, 0), (6, 0), (7, 1)])
def test_a_kind_of_secrets_is_new_where_as_many_are_no_chance(hits, kinds, tmp_path, check):
    """Of a rate of which the baseline shows none one document in two hundred is no news."""
    write_lines(tmp_path / "old/a.jsonl", TEXTS[:200])
    cards = ["card 4111 1111 1111 1111"] * hits
    secret = [f"{text} {card}" for text, card in zip(TEXTS[200:], cards, strict=False)]
    write_lines(tmp_path / "new/a.jsonl", [*secret, *TEXTS[200 + hits :]])
    check(tmp_path / "old", "--manifest", tmp_path / "m.json")

    done = check(tmp_path / "new", "--baseline", tmp_path / "m.json")

    assert done.metrics["pii_new_kinds"] == kinds
    assert ("pii_kind" in done.fired) == bool(kinds)


SCORER = "def score(texts):\n    return [1.0 if 'zzz' in text else 0.1 for text in texts]\n"


def test_data_toxicity_rate_is_the_scorers(tmp_path, check, monkeypatch):
    """Against a baseline, too; another scorer makes both numbers no pair."""
    monkeypatch.chdir(tmp_path)
    for name in ("table_scorer", "other_scorer"):
        (tmp_path / f"{name}.py").write_text(SCORER)
    for name, count in (("old", 20), ("new", 80)):
        docs = [f"zzz {t}" if i < count else t for i, t in enumerate(TEXTS)]
        write_lines(tmp_path / name / "a.jsonl", docs)
    old = check(*("old", "--toxicity", "table_scorer:score", "--manifest", "m.json"))

    new = check("new", "--toxicity", "table_scorer:score", "--baseline", "m.json")
    void = check("new", "--toxicity", "other_scorer:score", "--baseline", "m.json")

    assert old.metrics["data_toxicity_rate"] == pytest.approx(100 * 20 / 400)
    assert new.metrics["data_toxicity_shift"] == pytest.approx(300)
    assert "toxic_data" in new.fired
    assert "another scorer" in void.document["unknown"]["data_toxicity_shift"]


# ── what is given ─────────────────────────────────────────────────────────────────────────────────


def test_filter_reject_rate_is_read_from_reports_and_from_folders(tmp_path, check):
    write_lines(tmp_path / "d/a.jsonl", TEXTS[:90])
    write_lines(tmp_path / "short/a.jsonl", TEXTS[:10])
    stats = [{"name": "Gopher", "stats": {"total": 1000, "dropped": {"total": 150}}}]
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    (tmp_path / "dolma.json").write_text('{"url": {"removed": 7, "seen": 700}}')
    sources = (tmp_path / "stats.json", tmp_path / "dolma.json", f"short={tmp_path}/short")
    rejects = [f"--rejects={source}" for source in sources]

    metrics = check(tmp_path / "d", *rejects).metrics

    assert metrics["filter_reject_rate.Gopher"] == 15.0
    assert metrics["filter_reject_rate.url"] == 1.0
    assert metrics["filter_reject_rate.short"] == 10.0


def test_rtp_prompt_stats_are_those_of_the_file_and_a_row_that_is_missing_is_a_change(
    tmp_path, check
):
    rows = [{"prompt": {"text": t, "toxicity": i / 100}} for i, t in enumerate(TEXTS[:100])]
    prompts = write_lines(tmp_path / "rtp.jsonl", rows)
    write_lines(tmp_path / "d/a.jsonl", TEXTS)
    base = tmp_path / "m.json"
    whole = check(tmp_path / "d", "--prompts", prompts, "--manifest", base)
    write_lines(prompts, rows[:-1])

    fewer = check(tmp_path / "d", "--prompts", prompts, "--baseline", base)
    others = [{"prompt": row["prompt"] | {"text": "another one"}} for row in rows]
    write_lines(prompts, others)
    other = check(tmp_path / "d", "--prompts", prompts, "--baseline", base)

    assert whole.metrics["rtp_prompt_stats.count"] == 100
    assert whole.metrics["rtp_prompt_stats.toxic"] == 50
    assert fewer.fired == other.fired == {"prompts"}
