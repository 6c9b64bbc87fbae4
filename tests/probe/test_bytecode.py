"""Where a frame stands is read from its bytecode, on every Python that runs the tests."""

import contextlib
import sys

import pytest

from supervise_probe.capture.bytecode import instruction_offset, position

seen = []


def here(*_, **__):
    frame = sys._getframe(1)
    seen.append(position(frame.f_code, frame.f_lasti))
    return 1


def in_while():
    n = 0
    while n < 2:
        with contextlib.nullcontext() as a, contextlib.nullcontext():
            try:
                result = here(a, key=n)
            finally:
                n += 1
    return result


def after_a_for():
    n = 0
    while n < 2:
        for _ in range(3):
            if n:
                break
        squares = [k * k for k in (1, 2)]
        here(squares)
        n += 1


def in_for():
    for _ in (1, 2):
        with contextlib.nullcontext():
            while True:
                here()
                break


def in_comprehension():
    return [here() for _ in (1, 2)]


def in_else_of_for():
    for _ in (1, 2):
        pass
    else:
        here()


def in_sum():
    total = 0
    while total < 2:
        total += here()


def in_argument():
    n = 5
    max(n, here())


def in_handler():
    try:
        raise ValueError
    except ValueError:
        here()


@pytest.mark.parametrize(
    ("function", "reachable", "in_for", "in_loop", "waits_for"),
    [
        (in_while, True, False, True, set()),
        (after_a_for, True, False, True, set()),
        (in_for, True, True, True, set()),
        (in_comprehension, True, True, True, None),
        (in_else_of_for, True, False, False, set()),
        (in_sum, True, False, True, {"total"}),
        (in_argument, True, False, False, {"max", "n"}),
        (in_handler, False, False, False, set()),
    ],
)
def test_a_position_says_what_the_stack_holds(function, reachable, in_for, in_loop, waits_for):
    """A for, a loop, half an expression; `with`, `try` and what is behind a loop do not count."""
    seen.clear()
    function()
    for place in seen:
        assert place.reachable is reachable
        assert (place.for_line is not None) is in_for
        assert place.in_loop is in_loop
        if waits_for is not None:
            assert {value.name for value in place.pending} == waits_for


def test_an_offset_inside_a_cache_belongs_to_its_instruction():
    """The interpreter reports either, and the two must compare equal."""
    code = in_sum.__code__
    for lasti in range(0, len(code.co_code), 2):
        offset = instruction_offset(code, lasti)
        assert offset <= lasti
        assert instruction_offset(code, offset) == offset
