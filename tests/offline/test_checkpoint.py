"""The verifier over real files, all of them in one process: importing torch takes most of it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
safetensors = pytest.importorskip("safetensors.torch")

PROGRAM = Path(__file__).parents[2] / "probes" / "supervise_offline" / "verify.py"

pytestmark = pytest.mark.slow


class Evil:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return open, ("ran", "w")


def state():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    mask = {"mask": torch.full((2, 2), float("-inf"))}
    return {
        "callbacks": {"ModelCheckpoint": {"kth_value": torch.tensor(float("inf"))}},
        "model": {**model.state_dict(), **mask},
        "optimizer": optimizer.state_dict(),
        "rng": [torch.get_rng_state()],
        "step": 7,
    }


def flip(source, target):
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)


def cut(source, target):
    data = source.read_bytes()
    target.write_bytes(data[: len(data) // 2])


def layouts():
    """Single files by name, as jobs write them."""
    whole = state()
    model, optimizer = whole["model"], whole["optimizer"]
    sgd = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1).state_dict()
    return {
        "gan.pt": {"net_g": model, "net_d": model, "opt_g": optimizer},
        "lightning.ckpt": {"state_dict": model, "optimizer_states": [optimizer], "global_step": 3},
        "sgd.pt": {"model": model, "optimizer": sgd},
        "list.pt": [model, [optimizer]],
        "flat.pt": model,
        "model.pt": {"model": model, "config": {"layers": 2}, "rng": whole["rng"], "step": 4},
        "weights-lightning.ckpt": {"state_dict": model, "callbacks": whole["callbacks"]},
        "optim_000100.pt": optimizer,
        "by-hand.pt": {"model": model, "averages": {"weight": torch.ones(4)}},
        "moments.pt": {"model": model, "adam_moments": [torch.ones(4)]},
    }


def distributed(folder, optimizer=True):
    model = torch.nn.Linear(8, 8)
    parts = {"model": model.state_dict(), "count": {"iter": 3}}
    parts |= {"optimizer.m": torch.ones(3)} if optimizer else {}
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save(parts, checkpoint_id=folder)


def trainer(folder):
    """As transformers lays it out, the weights in two shards."""
    folder.mkdir()
    first, second = {"a": torch.ones(4)}, {"b": torch.ones(4)}
    safetensors.save_file(first, folder / "model-00001-of-00002.safetensors")
    safetensors.save_file(second, folder / "model-00002-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "trainer_state.json").write_text('{"global_step": 30}')
    torch.save(state()["optimizer"], folder / "optimizer.pt")
    torch.save(Evil(), folder / "training_args.bin")


def weapons(folder):
    """Files of a few bytes that would start a process, or hold who reads them for ever."""
    distributed(folder / "dcp-process")
    process = (
        b"ctorch.distributed.checkpoint._async_process_executor\n_AsyncCheckpointProcess\n(NtR."
    )
    (folder / "dcp-process" / ".metadata").write_bytes(process)
    distributed(folder / "dcp-fifo")
    (folder / "dcp-fifo" / "__0_0.distcp").unlink()
    os.mkfifo(folder / "dcp-fifo" / "__0_0.distcp")
    os.mkfifo(folder / "fifo.pt")
    weights = torch.ones(8)
    torch.save(
        {"w": weights[:1].expand(2**40), "optimizer": state()["optimizer"]}, folder / "expanded.pt"
    )
    overlapping = torch.ones(1 << 22).as_strided((1 << 21, 1 << 21), (1, 1))
    torch.save({"w": overlapping, "optimizer": state()["optimizer"]}, folder / "overlapping.pt")
    lists = [weights]
    for _ in range(11):
        lists = [lists] * 99
    torch.save({"lists": lists, **state()}, folder / "lists.pt")
    trainer(folder / "nested-json")
    (folder / "nested-json" / "config.json").write_text("[" * 10**6)
    with zipfile.ZipFile(folder / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header |= {str(n): header["w"] for n in range(9)}
    raw = json.dumps(header).encode()
    overlap = len(raw).to_bytes(8, "little") + raw + bytes(4)
    (folder / "overlap.safetensors").write_bytes(overlap)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the verifier says of each file, by name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    whole, good = state(), folder / "good.pt"
    torch.save(whole, good)
    flip(good, folder / "flipped.pt")
    cut(good, folder / "cut.pt")
    torch.save(whole, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    cut(folder / "legacy.pt", folder / "legacy-cut.pt")
    (folder / "empty.pt").write_bytes(b"")
    torch.save({"model": whole["model"]}, folder / "weights.pt")
    torch.save({**whole, "more": Evil()}, folder / "code.pt")
    (folder / "pickle.pt").write_bytes(pickle.dumps({"x": 1}))
    for name, value in (("nan.pt", float("nan")), ("inf.pt", float("-inf"))):
        whole["model"]["weight"][3, 3] = value
        torch.save(whole, folder / name)
    tensors = {"optimizer.m": torch.ones(8)}
    safetensors.save_file(tensors, folder / "a.safetensors")
    cut(folder / "a.safetensors", folder / "a-cut.safetensors")
    tensors["optimizer.m"][5] = float("nan")
    safetensors.save_file(tensors, folder / "a-nan.safetensors")
    for name in ("dcp", "nested/model_and_optim", "dcp-lost", "dcp-cut", "dcp-evil"):
        distributed(folder / name)
    torch.save({"step": 20}, folder / "nested" / "rank0.pt")
    (folder / "dcp-lost" / "__0_0.distcp").unlink()
    cut(folder / "dcp-cut" / "__0_0.distcp", folder / "dcp-cut" / "__0_0.distcp")
    (folder / "dcp-evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    for name, content in layouts().items():
        torch.save(content, folder / name)
    distributed(folder / "dcp-weights", optimizer=False)
    safetensors.save_file({"a.weight": torch.ones(4)}, folder / "b.safetensors")
    for name in ("checkpoint-30", "checkpoint-31", "no-optimizer", "no-step", "other-state"):
        trainer(folder / name)
    (folder / "checkpoint-31" / "model-00002-of-00002.safetensors").unlink()
    (folder / "no-optimizer" / "optimizer.pt").unlink()
    (folder / "no-step" / "trainer_state.json").unlink()
    (folder / "other-state" / "optimizer.pt").rename(folder / "other-state" / "state.npz")
    weapons(folder)
    paths = [*sorted(map(str, folder.iterdir())), str(folder / "nowhere.pt")]
    request = json.dumps({"paths": paths, "load": True, "finite": True, "optimizer": True})
    command = [sys.executable, "-I", str(PROGRAM)]
    output = subprocess.check_output(command, input=request, text=True, cwd=folder)
    assert not (folder / "ran").exists(), "code in a checkpoint was run"
    environment, *verdicts = map(json.loads, output.splitlines())
    return environment | {Path(verdict["path"]).name: verdict for verdict in verdicts}


@pytest.mark.parametrize(
    "name", ["good.pt", "legacy.pt", "a.safetensors", "dcp", "nested", "checkpoint-30"]
)
def test_what_is_good(answers, name):
    """Of every format; a mask of minus infinity is no damage, nor a best score of none."""
    found = answers[name]

    assert (found["ok"], found["problems"], found["unread"]) == (True, [], [])
    assert found["optimizer"] and found["tensors"] and found["bytes"]
    assert all(len(file["sha256"]) == 64 for file in found["files"].values())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("flipped.pt", "has a wrong checksum"),
        ("cut.pt", "cannot be loaded: the archive is damaged"),
        ("legacy-cut.pt", "cannot be loaded"),
        ("empty.pt", "cannot be loaded"),
        ("weights.pt", "it contains no optimizer state"),
        ("nan.pt", "model.weight has NaN"),
        ("inf.pt", "model.weight has infinite values"),
        ("a-cut.safetensors", "the header is longer than the file"),
        ("a-nan.safetensors", "optimizer.m has NaN"),
        ("dcp-lost", "the shard __0_0.distcp is missing"),
        ("dcp-cut", "__0_0.distcp"),
        ("checkpoint-31", "the shard model-00002-of-00002.safetensors is missing"),
        ("nowhere.pt", "No such file"),
    ],
)
def test_what_is_bad(answers, name, problem):
    assert answers[name]["ok"] is False
    assert problem in "; ".join(answers[name]["problems"])


@pytest.mark.parametrize(
    ("name", "ok", "why"),
    [
        ("dcp-process", None, "_async_process_executor._AsyncCheckpointProcess"),
        ("dcp-fifo", False, "not a regular file"),
        ("fifo.pt", False, "not a regular file"),
        ("expanded.pt", True, ""),
        ("overlapping.pt", True, ""),
        ("lists.pt", True, ""),
        ("nested-json", False, "nested without end"),
        ("bomb.pt", False, "compressed or overlapping"),
        ("overlap.safetensors", False, "its tensors overlap"),
    ],
)
def test_what_is_made_to_harm_who_reads_it(answers, name, ok, why):
    """It neither runs code, nor waits, nor takes more time or memory than its bytes justify."""
    assert answers[name]["ok"] is ok
    assert why in "; ".join([*answers[name]["problems"], *answers[name]["unread"]])


def test_it_is_as_nice_as_who_starts_it():
    """While the job waits for its verdict it must not come last."""
    verifier = subprocess.Popen([sys.executable, "-I", str(PROGRAM)], stdin=subprocess.PIPE)
    score = Path(f"/proc/{verifier.pid}/oom_score_adj")
    while score.read_text() != "1000\n":
        time.sleep(0.01)

    assert os.getpriority(os.PRIO_PROCESS, verifier.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    verifier.kill()
    verifier.communicate()


@pytest.mark.parametrize("name", ["code.pt", "pickle.pt", "dcp-evil"])
def test_what_only_running_code_could_tell(answers, name):
    """It is not run, and the checkpoint is neither good nor bad."""
    assert answers[name]["ok"] is None
    assert "not loadable without running code" in answers[name]["unread"][0]


@pytest.mark.parametrize(
    ("resumable", "names"),
    [
        ("full", "good.pt legacy.pt dcp nested checkpoint-30 gan.pt lightning.ckpt sgd.pt list.pt"),
        ("weights only", "flat.pt model.pt weights-lightning.ckpt b.safetensors dcp-weights"),
        ("weights only", "no-optimizer"),
        ("unknown", "a.safetensors optim_000100.pt by-hand.pt moments.pt code.pt nowhere.pt"),
        ("unknown", "no-step other-state"),
    ],
)
def test_what_a_job_can_resume_from(answers, resumable, names):
    """Weights and an optimizer's state; what nobody knows is never called weights only."""
    verdicts = {name: answers[name]["resumable"] for name in names.split()}
    assert verdicts == dict.fromkeys(verdicts, resumable)


def test_what_is_inside(answers):
    assert (answers["good.pt"]["step"], answers["good.pt"]["rng"]) == (7, True)
    assert answers["checkpoint-30"]["step"] == 30
    assert answers["environment"]["torch"] == torch.__version__
    assert answers["environment"]["lock"].startswith("sha256:")
