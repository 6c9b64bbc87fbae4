"""What a script and its command say about how the job is started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from supervise.core import ScriptCode, recognise_recipe

ACCELERATE = """\
\"\"\"Fine-tunes a model without using a Trainer.\"\"\"
import transformers
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, get_scheduler
parser.add_argument(%s)
accelerator = Accelerator()
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
"""
FABRIC = """\
from lightning.fabric import Fabric
fabric = Fabric()
parser.add_argument(
    "-r", "--resume-from", default=None)
fabric.load(args.resume_from)
"""
NANOGPT = "out_dir = 'out-char'\nif init_from == 'resume':\n    load('ckpt.pt')\n"
OWN_TRAINER = """\
from transformers import AutoTokenizer
class Trainer:
    pass
Trainer().train()
"""
DERIVED = """\
import transformers as hf
class Base(hf.Trainer): pass
class Mine(Base): pass
Mine(model).train()
"""
ELSEWHERE = """\
from transformers import HfArgumentParser, TrainingArguments
from project.training import OurTrainer
arguments, = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
OurTrainer(args=arguments).train()
"""
RESUMES = """\
p.add_argument(%s)
state = torch.load(args.resume)
"""
NANO = (Path(__file__).parents[2] / "examples/nano/train.py").read_text()


TRAINER = "from transformers import Trainer, TrainingArguments\nTrainer(m).train()"
LIGHTNING = "import lightning as L\nL.Trainer(max_steps=9).fit(model)"
WITH_STATE = ACCELERATE % '"--resume_from_checkpoint", type=str, help="a (saved) one"'
OLMO = "from olmo_core.train import TrainerConfig\n"
NANOCHAT = 'from nanochat.gpt import GPT\nparser.add_argument("--resume-from-step", type=int)'
SWITCH = RESUMES % '"--resume", action="store_true"'
TITAN = "torchrun --nproc_per_node=8 -m torchtitan.train --dump_folder ./o"


@pytest.mark.parametrize(
    ("script", "command", "name", "glob", "args"),
    [
        (TRAINER, "python train.py", "Trainer", "", None),
        (DERIVED, "python t.py", "Trainer", "", None),
        (ELSEWHERE, "python t.py", "Trainer", "", None),
        (LIGHTNING, "torchrun --nproc-per-node 2 train.py", "Lightning", "", None),
        (WITH_STATE, "python t.py", "accelerate", "", "--resume_from_checkpoint={checkpoint}"),
        (FABRIC, "python train.py", "Fabric", "", "--resume-from={checkpoint}"),
        ("", "/venv/bin/litgpt pretrain p --out_dir=out/p", "litgpt", "", "--resume={checkpoint}"),
        ("", TITAN, "torchtitan", "o/checkpoint/step-*", ""),
        (OLMO, "torchrun t.py run --trainer.save_folder=/c/run", "OLMo-core", "/c/run/step*", ""),
        (NANOCHAT, "python -m scripts.base_train", "nanochat", "", "--resume-from-step={step}"),
        (NANOGPT, "python train.py config/x.py", "nanoGPT-like", "", "--init_from=resume"),
        (NANO, "python train.py", "a script with --resume", "", "--resume={checkpoint}"),
        (SWITCH, "python train.py", "a script with --resume", "", "--resume"),
    ],
)
def test_a_known_job_is_started_again_by_its_recipe(script, command, name, glob, args):
    found = recognise_recipe(ScriptCode(script), command.split())

    assert found is not None and found.works
    assert (found.name, found.glob, found.args) == (name, glob, (args,) if args else ())
    assert found.resume == ("library" if args is None else "args")


@pytest.mark.parametrize(
    ("script", "command", "why"),
    [
        ("", "litgpt finetune_lora x", "only litgpt pretrain and finetune_full"),
        (ACCELERATE % '"--lr"', "python t.py", "calls Accelerator.load_state"),
        ("import olmo_core", "python t.py", "name that folder"),
        ("import lightning\nlightning.Fabric()", "python t.py", "calls Fabric.load"),
    ],
)
def test_a_job_that_cannot_be_started_again_yet_says_what_it_lacks(script, command, why):
    found = recognise_recipe(ScriptCode(script), command.split())

    assert found is not None and not found.works and re.search(why, found.note)


@pytest.mark.parametrize("option", ['"--resume", type=int', '"--resume", choices=["a"]', '"--lr"'])
def test_an_unknown_job_has_no_recipe(option):
    assert recognise_recipe(ScriptCode(RESUMES % option), ["python", "t.py"]) is None


@pytest.mark.parametrize(
    "script",
    [
        '"""Trains without the Trainer( of transformers."""\nimport transformers\n',
        "import transformers  # Trainer(model).train()\n",
        OWN_TRAINER,
        "USAGE = 'p.add_argument(\"--resume\")'\ntorch.load(args.resume)\n",
        'p.add_argument("--resume")\ntorch.load("weights.pt")\n',
        'p.add_argument("--resume")\nprint(args.resume)\n',
        "def (:",
    ],
)
def test_prose_is_no_code(script):
    """A comment, a docstring, another text; a name of the script's own; an option without use."""
    assert recognise_recipe(ScriptCode(script), ["python", "t.py"]) is None
