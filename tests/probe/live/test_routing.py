"""Where routers send tokens in a sampled step is where the script sees them go."""

import pytest

from .test_attention import compare

SAMPLING = {"attention": 0, "activations": 0, "routing": 3, "weights": 0, "share": 100}

EXPECTED = """
def entropy(p):
    return torch.special.entr(p).sum(-1)

def expected(routed, capacity=None):
    # routed: per layer, logits of all tokens and the experts they go to
    loads, balances, tokens, dropped, number = [], [], [], 0, 0
    for logits, chosen in routed:
        E = logits.shape[-1]
        counts = torch.bincount(chosen.flatten(), minlength=E).double()
        load, p = counts / counts.sum(), logits.double().softmax(-1)
        loads.append(entropy(load).item() / math.log(E))
        balances.append(E * (load * p.mean(0)).sum().item())
        tokens.append(entropy(p).mean().item() / math.log(E))
        if capacity is not None:
            dropped += (counts - capacity).clamp(min=0).sum().item()
            number += chosen.numel()
    found = dict(moe_util_entropy=min(loads), moe_load_balance_loss=max(balances),
                 router_token_entropy=sum(tokens) / len(tokens),
                 router_token_entropy_min=min(tokens), router_token_entropy_max=max(tokens),
                 **{f"router_token_entropy.{i}": entropy for i, entropy in enumerate(tokens)})
    if capacity is not None:
        found["moe_drop_rate"] = 100 * dropped / number
    return found
"""

CUSTOM = """
class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = 5, 2
        self.gate = nn.Linear(16, 5, bias=False)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])
        {capacity}

    def forward(self, x):
        logits = self.gate(x)
        weight, chosen = logits.softmax(-1).topk(2, -1)
        routed.append((logits.detach().reshape(-1, 5), chosen.reshape(-1, 2)))
        out = torch.stack([e(x) for e in self.experts], -2)
        picked = out.gather(-2, chosen[..., None].expand(*chosen.shape, 16))
        return x + (weight[..., None] * picked).sum(-2)

class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 64)  # of a gated unit, not of experts
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.gate(x)))

routed = []
model = nn.Sequential(Moe(), Dense(), Moe())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 10, 16) * 3 + 2).square().mean().backward()
    emit(step=step, **expected(routed, {room}))
    routed.clear()
    optimizer.step()
finish(model)
"""

LIBRARY = """
import transformers

torch.manual_seed(0)
config = transformers.MixtralConfig(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, num_local_experts=8)
model = transformers.MixtralForCausalLM(config)
with torch.no_grad():
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            p.normal_()  # as it starts, each expert gets the same
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(7):
    optimizer.zero_grad()
    ids = torch.randint(0, 100, (2, 16))
    got = model(input_ids=ids, labels=ids, output_router_logits=True)
    got.loss.backward()
    emit(step=step, **expected(
        [(l.detach(), l.detach().topk(config.num_experts_per_tok).indices)
         for l in got.router_logits]))
    optimizer.step()
emit(sha="none")
"""


@pytest.mark.parametrize(
    ("capacity", "room"),
    [("", None), ("self.expert_capacity = 12", 12), ("self.capacity_factor = 1.1", 18)],
)
def test_a_router_of_the_jobs_own_is_seen_with_what_it_drops(probed, bare, capacity, room):
    text = EXPECTED + CUSTOM.format(capacity=capacity, room=room)
    job = probed.run(text, sampling=SAMPLING)
    compare(job)
    assert job.frames[3].get("moe_drop_rate", 0) > 0 or not room
    assert room or job.output[-1] == bare.run(text).output[-1]


def test_a_model_of_a_library(probed):
    pytest.importorskip("transformers")
    everything = {"attention": 3, "activations": 3, "routing": 3, "routers": 3, "share": 100}
    job = probed.run(EXPECTED + LIBRARY, sampling=everything)
    compare(job, rel=1e-4)
    seen = job.frames[3]
    for name in ("max_attn_logit.1", "residual_rms.1", "logz_mean", "router_weight_similarity"):
        assert name in seen
