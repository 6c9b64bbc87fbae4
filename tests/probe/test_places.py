"""The statement of a loop in front of which a job is ready to be saved."""

import importlib.util
import sys

import pytest

from supervise_probe.checkpoints.save_site import call_at, code_stack, find_save_site
from supervise_probe.context import Refused

BEGIN = "def run(saves, steps, n, first=0):\n    i = first\n"
LOOP = (
    BEGIN
    + """    while i < n:
        if i % 2 == 0:
            losses = {"val": i}
            best = min(best, i) if i else 0
            losses["train"] = 1
            saves()
        steps()
        i += 1
"""
)
INNER = (
    "def epoch(steps):\n    for _ in range(2):\n        steps()\n"
    + BEGIN
    + """    while i < n:
        epoch(steps)
        i += 1
        saves()
"""
)
ONE = BEGIN + "    while i < n:\n        i += 1\n        steps(), saves()\n"
LOCALS = LOOP.replace("i += 1", "i += len(locals()) > 0")


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "job.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("job_of_places", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def frames():
    """The frames of the job, outermost first, as seen from one of its callbacks."""
    found, frame = [], sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith("job.py"):
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def look(module):
    """Let it save and step once; return what `find` says behind the second step."""
    seen = {}

    def saves():
        seen["stack"] = code_stack(frames())

    def steps():
        if "stack" in seen and "place" not in seen:
            try:
                seen["place"] = find_save_site(seen["stack"], frames())[1]
            except Refused as refusal:
                seen["place"] = str(refusal)

    module.run(saves, steps, 4)
    return seen["place"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (INNER, "saves when its inner loop is over"),
        (ONE, "saves and steps in one statement"),
    ],
)
def test_a_place_that_not_every_round_passes_is_refused(load, text, why):
    assert why in look(load(text))


def test_a_source_that_was_changed_is_not_believed(load, tmp_path):
    module = load(LOOP)
    (tmp_path / "job.py").write_text("import os\n" + LOOP)
    assert "was changed since the job started" in look(module)


def arrive(module, over=lambda: False, n=4):
    """Wait behind the first step; return where `there` was called, with the loop's variables."""
    seen = {"at": []}

    def saves():
        seen.setdefault("stack", code_stack(frames()))

    def steps():
        if "begun" in seen or "stack" not in seen:
            return
        seen["begun"] = True
        frame, place = find_save_site(seen["stack"], frames())

        def there():
            seen["at"].append((frame.f_lineno, frame.f_locals["i"]))

        try:
            call_at(frame, place, there, on_exit=lambda: seen["at"].append("gone"), over=over)
        except Refused as refusal:
            seen["at"].append(str(refusal))

    module.run(saves, steps, n)
    assert sys.gettrace() is None
    return seen["at"]


@pytest.mark.skipif(sys.gettrace() is not None, reason="something traces the tests")
def test_it_is_called_once_in_the_next_round(load):
    """In front of the statement; or told that the loop is over, or that nobody waits any more."""
    assert arrive(load(LOOP)) == [(4, 1)]
    assert arrive(load(LOOP), n=1) == ["gone"]
    assert arrive(load(LOOP), over=lambda: True) == ["gone"]
    assert "calls locals()" in arrive(load(LOCALS))[0] or sys.version_info >= (3, 13)
