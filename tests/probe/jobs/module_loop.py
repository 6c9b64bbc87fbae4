"""The loop of a GPT trainer at module level: accumulation, dropout, prefetch, rate by hand."""

import hashlib
import json
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1337)
kind = sys.argv[1] if len(sys.argv) > 1 else "adamw"
max_iters, accumulation, warmup, base_lr = 30, 2, 5, 3e-3
data = torch.randint(0, 16, (4096,))


def get_batch():
    starts = torch.randint(len(data) - 9, (8,)).tolist()
    x = torch.stack([data[i : i + 8] for i in starts])
    return x, torch.stack([data[i + 1 : i + 9] for i in starts])


def get_lr():
    if iter_num < warmup:
        return base_lr * (iter_num + 1) / warmup
    return base_lr * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))


model = nn.Sequential(
    nn.Embedding(16, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)
)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
if kind == "tensor_lr":
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(base_lr), amsgrad=True)
elif kind == "lbfgs":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
else:
    optimizer = torch.optim.AdamW(groups, lr=base_lr, fused=kind == "fused")

iter_num, tokens, smooth, losses = 0, 0, None, []
X, Y = get_batch()


def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X).flatten(0, 1), Y.flatten())
    loss.backward()
    return loss


while True:
    for group in optimizer.param_groups:
        if kind == "tensor_lr":
            group["lr"].fill_(get_lr())
        elif kind != "lbfgs":
            group["lr"] = get_lr()
    if kind == "lbfgs":
        loss = optimizer.step(closure)
        X, Y = get_batch()
    else:
        for _ in range(accumulation):
            logits = model(X)
            loss = F.cross_entropy(logits.flatten(0, 1), Y.flatten()) / accumulation
            X, Y = get_batch()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
    losses.append(loss.item())
    tokens += X.numel()
    iter_num += 1
    if iter_num >= max_iters:
        break

weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(
    json.dumps({"losses": losses, "sha": weights.hexdigest(), "also": [smooth, tokens, iter_num]})
)
