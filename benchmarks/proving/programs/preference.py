"""8: a preference loss (DPO) between a policy and its frozen copy."""

import copy

import torch
from common import ByteGPT, arguments, save, text, windows
from torch.nn import functional as F

options = arguments(400, rows=12, rate=5e-4, beta=0.2)
generator = torch.Generator().manual_seed(options.seed)
source, policy = text(), ByteGPT()
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=options.rate)


def log_likelihood(model, inputs, targets):
    """Return the summed log-likelihood of each row, shape (rows,)."""
    logits = model(inputs).log_softmax(-1)
    return logits.gather(-1, targets[..., None]).squeeze(-1).sum(-1)


def batch(generator):
    """Return prompts with the true next bytes (chosen) and with shuffled ones (rejected)."""
    inputs, targets = windows(source, options.rows, 32, generator)
    noise = torch.rand(options.rows, 32, generator=generator) < 0.15
    wrong = torch.where(noise, torch.randint(256, (1, 32), generator=generator), targets)
    return inputs, targets, wrong


def loss_of(generator):
    inputs, chosen, rejected = batch(generator)
    with torch.no_grad():
        base = log_likelihood(reference, inputs, chosen) - log_likelihood(
            reference, inputs, rejected
        )
    now = log_likelihood(policy, inputs, chosen) - log_likelihood(policy, inputs, rejected)
    return -F.logsigmoid(options.beta * (now - base)).mean()


for step in range(options.steps):
    for group in optimizer.param_groups:
        group["lr"] = options.rate * min(1.0, (step + 1) / 40)
    loss = loss_of(generator)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    optimizer.step()
    save(options, step, model=policy.state_dict(), optimizer=optimizer.state_dict())

with torch.no_grad():
    held_out = torch.Generator().manual_seed(12345)
    final = torch.stack([loss_of(held_out) for _ in range(16)]).mean()
print(f"final_loss {final:.5f}")
