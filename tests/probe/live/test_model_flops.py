"""How many operations a model needs: against torch's own counter, and by hand where it has none."""

from pathlib import Path

NANO = Path(__file__).parents[3] / "examples" / "nano"

COUNT = """
import sys
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, {nano!r})
import train
from _supervise_probe.collectors.timing_and_mfu import count_operations, peak_flops_of

IDS = torch.randint(40, (2, 16))

def compare(name, model, *args):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*args).sum().backward()
    found = count_operations(torch, [model])
    needed = found.per_token * 2 * 16 + found.per_pair * 2 * 16 * 16
    emit(name=name, counted=counter.get_total_flops(), needed=needed, why_not=found.why_not)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.top_k, self.num_experts = 2, 8
        self.gate = nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.shared_expert = nn.Linear(16, 16)

def table():
    return nn.Embedding(40, 16)

nano = train.GPT(train.Shape(vocabulary=40, context=16, layers=2, width=32))
compare("tied", nano, IDS, IDS)
frozen = nn.Sequential(table(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 40))
frozen[2].requires_grad_(False)
compare("frozen", frozen, IDS)

mixture = nn.Sequential(table(), Mixture(), nn.Linear(16, 40))
emit(name="experts", found=count_operations(torch, [mixture]))
for model in (nn.Conv2d(3, 3, 3), table()):
    emit(name="none", found=count_operations(torch, [model]))
emit(peaks={{name: peak_flops_of(name) for name in {names}}})
"""
PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb": None,
    "NVIDIA A10G": 70e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "AMD Instinct MI300X": 1307.4e12,
    "cpu": None,
}


def test_a_models_operations_are_those_that_torch_counts(probed):
    """A tied head, positions that are looked up, packed projections, weights without a gradient; of
    experts two of eight, the router, and the one that all share; what has no count says why."""
    rows = probed.run(COUNT.format(nano=str(NANO), names=[*PEAKS])).output

    assert [row["name"] for row in rows[:2]] == ["tied", "frozen"]
    for row in rows[:2]:
        assert row["needed"] == row["counted"] > 0, row["name"]
    weights = 16 * 8 + 2 * 16 * 16 + 16 * 16 + 16 * 40
    assert rows[2]["found"] == [6.0 * weights, 0.0, 0, ""]
    assert rows[3]["found"][3] == "convolutions use a weight many times"
    assert rows[4]["found"][3] == "no weight matrix is to be seen"
    assert rows[5]["peaks"] == PEAKS  # a slice or a slower edition has another, which nobody tells
