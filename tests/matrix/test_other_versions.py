"""A training library that is not made as its adapter thinks: the job must not notice."""

# A stand-in that comes first on the path, as a fork or an old version would.
STAND_IN = """
import pathlib, sys
home = pathlib.Path("lib/transformers")
home.mkdir(parents=True)
(home / "__init__.py").write_text("")
(home / "trainer.py").write_text('''{source}''')
sys.path.insert(0, "lib")
import transformers.trainer as library
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
{use}
step()
finish(model)
"""
COMPLETE = """
class CallbackHandler:
    def call_event(self, event, *rest, **kwargs):
        if event == "raise":
            raise KeyError(event)
        return event, rest, kwargs

class Trainer:
    def train(self, resume_from_checkpoint=None):
        return resume_from_checkpoint

    def _save_checkpoint(self, where):
        open(where, "w").close()
        return where
"""
USE = """
handler = library.CallbackHandler()
assert handler.call_event("on_step_begin", 1, None) == ("on_step_begin", (1, None), {})
assert library.Trainer()._save_checkpoint("here") == "here"
try:
    handler.call_event("raise")
except KeyError as error:
    emit(raised=str(error))
"""


def state_of(job):
    return job.segment().status()["collectors"]["framework"]


def test_a_version_without_the_place_to_listen_at(pair):
    source = "class Trainer: pass"
    script = STAND_IN.format(
        source=source,
        use="assert vars(library.Trainer).keys() <= "
        "{'__module__', '__dict__', '__weakref__', '__doc__'}",
    )
    job = pair.probed.run(script)
    assert job.err == "" and len(job.frames) == 2
    assert state_of(job).startswith("off: transformers.trainer: AttributeError")
    assert job.output == pair.bare.run(script).output


def test_a_version_that_calls_otherwise(pair):
    """Its own results and errors come through; the second time that we fail is the last."""
    script = STAND_IN.format(source=COMPLETE, use=USE)
    job = pair.probed.run(script)
    assert job.err == "" and len(job.frames) == 2
    assert state_of(job).startswith("off: ")
    assert job.output == pair.bare.run(script).output
    assert job.output[0] == {"raised": "'raise'"}
    assert job.kinds() == ["collector-off"]
