"""A GradScaler on CPU autocast, in a trainer class; the scale grows and overflows on the way."""

import hashlib
import json
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Progress:
    step: int = 0
    scales: list = field(default_factory=list)


class Trainer:
    def __init__(self):
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
        self.progress = Progress()
        self.losses = []

    def next_batch(self):
        x = torch.randn(16, 8)
        return x, x.sum(1, keepdim=True)

    def run(self, steps):
        while self.progress.step < steps:
            x, y = self.next_batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (self.model(x) - y).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.progress.scales.append(self.scaler.get_scale())
            self.progress.step += 1


trainer = Trainer()
trainer.run(40)
parameters = [p.detach().numpy().tobytes() for p in trainer.model.parameters()]
digest = hashlib.sha256(b"".join(parameters)).hexdigest()
print(json.dumps({"losses": trainer.losses, "sha": digest, "also": trainer.progress.scales}))
