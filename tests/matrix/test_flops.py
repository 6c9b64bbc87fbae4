"""The operations of a library's models, against torch's own counter."""

import pytest

COUNT = """
import warnings

import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from _supervise_probe.collectors.timing_and_mfu import count_operations

warnings.simplefilter("ignore")
ids = torch.randint(40, (2, 16))
sizes = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
sizes |= dict(bos_token_id=None, eos_token_id=None)
for name, config, further in (
    ("LlamaForCausalLM", "LlamaConfig", dict(intermediate_size=48, num_key_value_heads=2)),
    ("GPT2LMHeadModel", "GPT2Config", {}),
):
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **further))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(input_ids=ids, labels=ids).loss.backward()
    found = count_operations(torch, [model])
    needed = found.per_token * ids.numel() + found.per_pair * ids.numel() * ids.shape[1]
    emit(name=name, counted=counter.get_total_flops(), needed=needed)

sizes |= dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
sizes |= dict(num_key_value_heads=4)
mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
emit(name="Mixtral", found=count_operations(torch, [mixtral]))
"""


@pytest.mark.chaos
def test_models_of_a_library(library_pair):
    """Grouped heads, matrices stored the other way round, experts stacked in one tensor."""
    rows = library_pair.probed.run(COUNT).output

    for row in rows[:2]:
        assert row["needed"] == row["counted"] > 0, row["name"]
    attention, expert, router, head = 4 * 32 * 32, 3 * 32 * 48, 4 * 32, 32 * 40
    weights = 2 * (attention + 2 * expert + router) + head
    assert rows[2]["found"] == [6.0 * weights, 12.0 * 2 * 32, 2, ""]
