"""An optimizer's step that raised, and that the job makes again."""

import math
import re

ALWAYS = {"gradients": 1, "weights": 0, "share": 1e6}
OF_THE_MACHINE = re.compile("time|share|per_sec|probe|mem|load|temp")

MADE_AGAIN = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batch():
    x = torch.randn(16, 8)
    return x, x.sum(1, keepdim=True)
import supervise_probe

class Raises(torch.optim.Adam):
    soon = False

    def step(self, closure=None):
        if self.soon:
            self.soon = False
            raise torch.OutOfMemoryError("no memory")
        return super().step(closure)

first = torch.optim.SGD(model[0].parameters(), lr=0.05)
second = Raises([{"params": [p]} for p in model[2].parameters()], lr=0.05)
for step in range(12):
    first.zero_grad()
    second.zero_grad()
    total = 0.0
    for part in range(2):
        x, y = batch()
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        total += loss.item()
    supervise_probe.report(tokens_per_update=32)
    true = norm(p.grad for p in model.parameters())
    if step % 3:            # at first over both optimizers, later of one alone
        nn.utils.clip_grad_norm_((model if step < 2 else model[2]).parameters(), 1.0)
    first.step()
    second.soon = AGAIN and step % 4 < 3
    try:
        second.step()
    except torch.OutOfMemoryError:
        second.step()
    emit(train_loss_raw=total, grad_global_norm=true)
"""


def test_a_step_that_is_made_again_counts_once(probed):
    """The frame holds what the script computes; nothing tells that the first attempt raised."""
    jobs = [
        probed.run(MADE_AGAIN.replace("AGAIN", how), sampling=ALWAYS) for how in ("False", "True")
    ]
    once, again = (
        [{k: v for k, v in f.items() if not OF_THE_MACHINE.search(k)} for f in job.frames]
        for job in jobs
    )
    assert once == again and len(again) == 12
    for frame, row in zip(again, jobs[1].output, strict=True):
        for metric, value in row.items():
            assert math.isclose(frame[metric], value, rel_tol=1e-6), (metric, frame, value)
    assert {"grad_noise_scale", "grad_global_norm.1", "adam_rms_ratio"} <= set(once[-1])
