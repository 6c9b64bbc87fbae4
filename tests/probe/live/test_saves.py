"""Which saves of a job the supervisor hears of."""

import sys

SAVES = """
import io, pathlib, warnings
from safetensors.torch import save_file, save_model
with warnings.catch_warnings(action="ignore"):
    import torch.distributed.checkpoint as dcp

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
state = model.state_dict
torch.save(state(), "before-training.pt")
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:                                   # checkpoints, each in its own way
        torch.save({"model": state(), "optimizer": optimizer.state_dict(), "step": 1}, "a.pt")
        torch.save({"model": state()}, "a.pt")      # the same again is told once
        torch.save(model, pathlib.Path("whole.pt"))
        with open("b.partial", "wb") as file:
            torch.save({"net": {"weights": state()}}, file)
        os.rename("b.partial", "b.pt")
        save_file(state(), "c.safetensors")
        save_model(model, "d.safetensors")
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"model": state()}, checkpoint_id="e")
    if step == 1:                                   # none of these is one
        torch.save(optimizer.state_dict(), "optimizer.pt")
        torch.save(torch.ones(1000), "tensor.pt")
        torch.save({"tokens": torch.ones(8, 8).long(), "cache": torch.ones(100)}, "cache.pt")
        torch.save({"bias": model[1].bias}, "little.pt")
        torch.save(state(), io.BytesIO())
        try:
            torch.save(state(), "no/such/folder.pt")
        except RuntimeError as error:
            emit(error=str(error))
    if step == 2:
        torch.save(state(), "a.pt")
emit(told=1)
"""


def test_checkpoints_are_told_and_nothing_else(probed):
    """By torch, safetensors and DCP, to a path or an open file; with the step that is in it."""
    job = probed.run(SAVES)
    saved = [notice for notice in job.notices if notice.kind == "checkpoint-saved"]
    heard = [(n.data["path"].rsplit("/", 1)[1], n.step, n.data["how"]) for n in saved]

    assert heard == [
        ("a.pt", 1, "torch.save"),
        ("whole.pt", 1, "torch.save"),
        ("b.partial", 1, "torch.save"),
        ("c.safetensors", 1, "safetensors"),
        ("d.safetensors", 1, "safetensors"),
        ("e", 1, "distributed checkpoint"),
        ("a.pt", 3, "torch.save"),
    ]
    renamed = (job.folder / "b.pt").stat()
    assert saved[2].data["file"] == {
        "device": renamed.st_dev,
        "inode": renamed.st_ino,
        "size": renamed.st_size,
        "mtime_ns": renamed.st_mtime_ns,
    }
    assert saved[0].data["python"] == sys.executable and saved[0].data["ranks"] == 1
    assert all(notice.data["seconds"] >= 0 and notice.data["attempt"] == 0 for notice in saved)
    assert [f["step"] for f in job.frames if f.get("checkpoint_time", 0) > 0] == [1]
    assert job.output[-1] == {"told": 1} and "no/such" in job.output[0]["error"]
