"""Bad batches in a `for` loop: what skipping their updates saves, and that little else changes."""

LOOP = """
def rows(count):
    found = [torch.randint(64, (count,), generator=chain)]
    for _ in range(8):
        noise = torch.rand(count, generator=chain) < 0.2
        other = torch.randint(64, (count,), generator=chain)
        found.append(torch.where(noise, other, following[found[-1]]))
    tokens = torch.stack(found, 1)
    return tokens[:, :-1], tokens[:, 1:].flatten()

def loss_of(inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets)

chain = torch.Generator().manual_seed(1)
following = torch.randperm(64, generator=chain)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(150):
    optimizer.zero_grad()
    loss_of(*rows(32)).backward()
    optimizer.step()
with torch.no_grad():
    emit(final=loss_of(*rows(512)).item())
"""
KEEP = {"every": 25, "keep": 4, "max_bytes": 10**8}
ORDER = {"skip_outliers": {"max": 32, "per": 2000}}


def test_thirty_bad_batches_are_skipped_and_the_weights_stay_good(probed):
    bad = [{"fault": "bad_batch", "step": 110, "params": {"steps": 30}}]
    undisturbed = probed.run(LOOP, safeguards=ORDER, savepoints=KEEP, probe_batch={})
    alone = probed.run(LOOP, drills=bad)
    job = probed.run(LOOP, drills=bad, safeguards=ORDER, savepoints=KEEP, probe_batch={})
    never, hit, skipped = (each.output[0]["final"] for each in (undisturbed, alone, job))
    assert sum(undisturbed.column("skipped_bad_steps")) == 0
    steps = [step for step, out in enumerate(job.column("skipped_bad_steps")) if out]
    assert steps == list(range(110, 140)) and set(job.column("guard_active")) == {1.0}
    assert [job.frames[step]["skip_reason"] for step in steps] == [4.0] * 30
    assert abs(skipped - never) < 0.1 * abs(hit - never)
