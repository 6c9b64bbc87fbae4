"""Spectra are those of dense matrices in double precision, and tails have their exponents."""

from __future__ import annotations

import json
import math
import random
import runpy
import subprocess
import sys
from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace

import pytest

from supervise.core.model import LateFrame, Mechanisms
from supervise.runtime import MechanismMonitor, ReferenceCurves
from tests.support.waiting import wait_until

torch = pytest.importorskip("torch")
PROGRAM = Path(__file__).parents[2] / "probes" / "supervise_offline" / "mechanisms.py"
HEADS, SHARED, SIZE, WIDTH = 4, 2, 8, 48


@pytest.fixture(scope="module")
def spectra():
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


def rank(matrix):
    p = torch.linalg.svdvals(matrix.double()) ** 2
    p = p[p > 0] / p.sum()
    return math.exp(-float((p * p.log()).sum()))


def pairs(scale):
    """Queries of 4 heads and keys of 2, and what they become: name, layer, role, heads, both."""
    torch.manual_seed(1)
    rows = []
    for layer in range(2):
        for role, heads in (("query", HEADS), ("key", SHARED)):
            before = torch.randn(heads * SIZE, WIDTH) * 0.02
            after = before + torch.randn(before.shape) * scale
            rows.append((f"{layer}.{role}", layer, role, heads, before, after))
    rows.append(("other", -1, "", 1, torch.randn(64, 16), torch.randn(64, 16)))
    return rows


def dense(rows):
    """Return (rank, norm) of first and second order, of each head of each layer."""
    found = []
    for layer in range(2):
        (q, q2), (k, k2) = (
            next((b.double(), a.double()) for _, n, r, _, b, a in rows if (n, r) == (layer, role))
            for role in ("query", "key")
        )
        for head in range(HEADS):
            mine, its = slice(head * SIZE, (head + 1) * SIZE), head * SHARED // HEADS
            theirs = slice(its * SIZE, (its + 1) * SIZE)
            dq, dk = (q2 - q)[mine], (k2 - k)[theirs]
            first, second = dq.T @ k[theirs] + q[mine].T @ dk, dq.T @ dk
            whole = q2[mine].T @ k2[theirs] - q[mine].T @ k[theirs]
            torch.testing.assert_close(whole, first + second, rtol=0, atol=1e-12)
            found.append(tuple((rank(d), float(d.norm())) for d in (first, second)))
    return found


def test_a_pair_is_measured_as_dense_matrices_in_double_precision(spectra, tmp_path):
    """By the program as it is started, from a file as the probe writes it."""
    rows, path = pairs(scale=1e-6), tmp_path / "pair"
    names = ("name", "layer", "role", "heads", "rows", "columns")
    matrices = [dict(zip(names, (*row[:4], *row[4].shape), strict=True)) for row in rows]
    data = b"".join(m.numpy().tobytes() for *_, before, after in rows for m in (before, after))
    head = {"step": 124, "attempt": 3, "steps": 25, "python": "", "matrices": matrices}
    path.write_bytes(json.dumps(head).encode() + b"\n" + data)
    (tmp_path / "short").write_bytes(path.read_bytes()[:-8])

    command = [sys.executable, "-I", PROGRAM, "0"]
    requests = f"{path}\n{tmp_path}/short\n{path}\n"
    output = subprocess.check_output(command, input=requests, text=True)
    answer, damaged, again = map(json.loads, output.splitlines())

    assert (answer["step"], answer["attempt"]) == (124, 3)
    assert "ends too early" in damaged["error"]
    assert again["values"] == answer["values"] and again["cpu_s"] > answer["cpu_s"] > 0
    values, heads = answer["values"], dense(rows)
    for name, column, part in (
        ("qk_d2_spectral_entropy", 0, lambda head: head[0][0]),
        ("qk_d3_spectral_entropy", 0, lambda head: head[1][0]),
        ("qk_d2_norm", 1, lambda head: head[0][1]),
        ("qk_d3_ratio", 1, lambda head: head[1][1] / head[0][1]),
    ):
        members = [part(head) for head in heads]
        quartile = sorted(members)[5 if column else 2]
        assert values[name] == pytest.approx(quartile, rel=1e-4)
        assert values[f"{name}.1"] == pytest.approx(sum(members[HEADS:]) / HEADS, rel=1e-4)
    changes = [rank(a.double() - b.double()) for *_, b, a in rows[:4]]
    assert values["dw_spectral_entropy"] == pytest.approx(sorted(changes)[1], rel=1e-4)
    assert values["dw_spectral_entropy.0"] == pytest.approx(sum(changes[:2]) / 2, rel=1e-4)
    singular = [torch.linalg.svdvals(after.double()) for *_, after in rows]
    shares = [s / s.sum() for s in singular]
    flat = min(-float((p * p.log()).sum()) / math.log(len(p)) for p in shares)
    assert values["singular_entropy"] == pytest.approx(flat, rel=1e-5)
    radii = [
        float(s[0]) / (after.shape[0] / after.shape[1]) ** 0.5
        for s, (*_, after) in zip(singular, rows, strict=True)
    ]
    assert values["spectral_radius"] == pytest.approx(max(radii), rel=1e-5)
    tails = sorted(spectra.tail_exponent(torch, s.square()) for s in singular)
    assert values["ht_sr_alpha"] == pytest.approx(tails[1], rel=1e-3)


@pytest.mark.parametrize("exponent", [2.0, 4.5])
def test_a_tail_has_its_exponent(spectra, exponent):
    """Above a bulk of another law, which the fit leaves out."""
    draws = torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tail = 5.0 * (1.0 - draws) ** (-1.0 / (exponent - 1.0))
    bulk = torch.rand(1500, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 5.0

    fit = spectra.tail_exponent(torch, torch.cat((bulk, tail)))

    assert fit == pytest.approx(exponent, rel=0.05)


def test_routers_are_measured_each_by_its_own_rows(spectra):
    """And are no attention, though their layers have the same numbers."""
    torch.manual_seed(4)
    weights = [torch.randn(6, 20), torch.randn(6, 20) * 0.1 + 1.0, torch.randn(5, 20) + 0.5]
    matrices = [spectra.Matrix(f"{i}", *w.shape, i, "router") for i, w in enumerate(weights)]
    pairs = [spectra.Pair(m, w - 1.0, w) for m, w in zip(matrices, weights, strict=True)]

    values = spectra.measure_pairs(torch, pairs)

    cosines, conditions = [], []
    for weight in weights:
        rows = weight.double()
        n = len(rows)
        angles = [torch.cosine_similarity(rows[i], rows[j], 0) for i in range(n) for j in range(i)]
        cosines.append(float(sum(angles)) / len(angles))
        mean = rows.mean(0)
        conditions.append(max(float((row - mean).norm()) for row in rows) / float(mean.norm()))
    assert values["router_similarity_max"] == pytest.approx(max(cosines), rel=1e-6)
    assert values["router_similarity_max.2"] == pytest.approx(cosines[2], rel=1e-6)
    assert values["router_conditioning_max.0"] == pytest.approx(conditions[0], rel=1e-6)
    bounds = values["router_conditioning_min"], values["router_conditioning_max"]
    assert bounds == pytest.approx((min(conditions), max(conditions)), rel=1e-6)
    assert not any(name.startswith(("dw_", "qk_", "singular", "spectral")) for name in values)


def test_what_has_no_spectrum_has_no_values(spectra):
    """A weight that did not change, keys made in two products, too few values for a tail."""
    matrix = spectra.Matrix("q", 16, 8, 0, "query", 2)
    same = spectra.Pair(matrix, torch.ones(16, 8), torch.ones(16, 8))
    thin = torch.ones(16, 4)
    narrow = spectra.Pair(spectra.Matrix("k", 16, 4, 0, "key", 2), thin, thin)

    values = spectra.measure_pairs(torch, [same, narrow])

    assert values["dw_spectral_entropy"] == 0.0
    assert not any(name.startswith(("qk_", "ht_sr")) for name in values)


def test_a_distance_is_in_spreads_of_the_reference():
    """In logs, by the nearest results; none where the reference had none."""
    name = "dw_spectral_entropy"
    noise = random.Random(3)
    swing = [math.exp(noise.gauss(0.0, 0.2)) for _ in range(60)]
    rows = [SimpleNamespace(step=100 * n, values={name: 25.0 * s}) for n, s in enumerate(swing)]
    curves = ReferenceCurves(rows)

    near, low = (curves.distances(2000, {name: value}) for value in (25.0, 25.0 / math.e))

    assert bool(curves) and not ReferenceCurves(rows[:9])
    assert abs(near[f"{name}_band"]) < 2.0
    assert low[f"{name}_band"] == pytest.approx(near[f"{name}_band"] - 1.0 / 0.23, rel=0.3)
    assert curves.distances(6000, {name: 25.0}) == curves.distances(2000, {"other": 1.0}) == {}


ANSWERS = """#!/bin/sh
cpu=2
while read -r path; do
    echo '{"step": '$cpu', "values": {"dw_spectral_entropy": 1.0}, "cpu_s": '$cpu'}'
    cpu=$((cpu + 1))
done
"""


def test_the_next_pair_is_asked_for_when_it_fits_into_the_share(tmp_path):
    """Four fifths of it; the first answer has the start of the process in it."""
    python, pair = tmp_path / "python", tmp_path / "weight-pair"
    python.write_text(ANSWERS)
    python.chmod(0o755)
    monitor, began = MechanismMonitor(Mechanisms(share=0.5), tmp_path), monotonic_ns()
    for due_s in (2 / 0.4, (3 + 1) / 0.4):
        pair.write_text(json.dumps({"python": str(python)}) + "\n")
        events = []
        wait_until(lambda got=events: got.extend(monitor.poll(1)) or got, "an answer", every_s=0.02)
        assert isinstance(events[0], LateFrame)
        list(monitor.poll(began + int((due_s - 0.5) * 1e9)))
        assert pair.exists()
        list(monitor.poll(began + int((due_s + 0.5) * 1e9)))
        assert not pair.exists()
    monitor.close()
