"""Position of a frame in its code: inside a `for`, inside a `while`, amid an expression.

Rule 1: the answer comes from the bytecode, never from the source, which may have changed on disk.
Rule 2: an undecidable case counts as the worse one: the rollback is refused, never guessed.

The value stack of a running frame cannot be read or written from Python. A `for` keeps its iterator
there, and an unfinished expression (`total += step()`) the operands loaded so far, so a frame can
be rolled back only while nothing but `with` and `try` bookkeeping lies on it. The stack is computed
by walking all paths to the instruction with `dis.stack_effect`, the compiler's own numbers.
"""

import bisect
import dis
import functools
import sys
from types import CodeType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple, TypeVar

_NEVER_FALLS_THROUGH = (
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_VARARGS",
    "RERAISE",
    "JUMP_FORWARD",
    "JUMP_ABSOLUTE",
    "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
)
_BLOCKS = ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")  # Python 3.10 and older
_SHUFFLES = ("SWAP", "COPY", "ROT_", "DUP_")
_NO_RESULT = ("POP_", "STORE_", "DELETE_", "NOP", "RESUME", "CACHE", "EXTENDED_ARG", "SETUP_")

_T = TypeVar("_T")
_CACHED_MAX = 256
_FOR = -1  # tag of a stack slot that holds the iterator of a `for`
_UNKNOWN = -2  # tag of a slot whose origin was lost in a shuffle


class PendingValue(NamedTuple):
    """A value on the stack below the current call, and the name it was loaded by, if any."""

    opname: str
    name: Optional[str]
    method_of: Optional[str]  # for a bound method of a variable: the variable's name


class CodePosition(NamedTuple):
    """The context of one instruction. Lines are those of the source file, or None."""

    reachable: bool  # False: only through an exception handler, or unknown
    for_line: Optional[int]
    in_loop: bool  # inside a `for` or `while`: a path leads back here
    pending: Tuple[PendingValue, ...]


class _State(NamedTuple):
    stack: Tuple[int, ...]  # per slot: offset of the instruction that pushed it, or a tag
    blocks: Tuple[int, ...]  # stack depth of each open block (Python 3.10 and older)
    fors: Tuple[int, ...]  # offsets of the open FOR_ITERs, outermost first


def _cached(function: Callable[[CodeType, int], _T]) -> Callable[[CodeType, int], _T]:
    """Cache results by identity of the code object; comparing two of them takes 10 us."""
    known: Dict[Tuple[int, int], Tuple[CodeType, _T]] = {}

    @functools.wraps(function)
    def wrapper(code: CodeType, lasti: int) -> _T:
        found = known.get((id(code), lasti))
        if found is None:
            if len(known) >= _CACHED_MAX:
                known.clear()
            found = known[id(code), lasti] = (code, function(code, lasti))
        return found[1]

    return wrapper


@_cached
def position(code: CodeType, lasti: int) -> CodePosition:
    """Return the context of the instruction at byte offset `lasti` of `code`."""
    instructions = list(dis.get_instructions(code))
    index = {instruction.offset: i for i, instruction in enumerate(instructions)}
    offset = instruction_offset(code, lasti)
    here = instructions[index[offset]]
    in_loop = _returns(instructions, index, index[offset])
    try:
        state = _states(instructions, index).get(index[offset])
    except ValueError:  # dis does not know the effect of an opcode
        state = None
    if state is None:
        return CodePosition(False, None, in_loop, ())
    fors = state.fors + ((here.offset,) if here.opname.startswith("FOR_ITER") else ())
    line = _line(code, fors[-1]) if fors else None
    if "CALL" in here.opname:
        base = len(state.stack) + _effect(here, False) - 1  # a call leaves exactly its result
    else:
        base = len(state.stack)
    level = _level(code, offset, state)
    pending = tuple(
        _describe(instructions, index, tag) for tag in state.stack[level:base] if tag != _FOR
    )
    return CodePosition(True, line, in_loop, pending)


@_cached
def instruction_offset(code: CodeType, lasti: int) -> int:
    """Offset of the instruction that `lasti` belongs to.

    From Python 3.11 on a frame inside a call reports the call's own offset or that of its inline
    cache, depending on how far the interpreter has specialised it.
    """
    offsets = [instruction.offset for instruction in dis.get_instructions(code)]
    return offsets[bisect.bisect_right(offsets, lasti) - 1]


def _states(instructions: List[Any], index: Dict[int, int]) -> Dict[int, _State]:
    """Return the stack before each instruction that is reachable without an exception."""
    seen: Dict[int, _State] = {}
    work = [(0, _State((), (), ()))]
    while work:
        i, state = work.pop()
        while i < len(instructions) and i not in seen:
            seen[i] = state
            instruction = instructions[i]
            target = _target(instruction)
            if target is not None and instruction.opname not in _BLOCKS:
                work.append((index[target], _after(instruction, state, True)))
            if instruction.opname in _NEVER_FALLS_THROUGH:
                break
            state = _after(instruction, state, False)
            i += 1
    return seen


def _returns(instructions: List[Any], index: Dict[int, int], start: int) -> bool:
    """Whether a path leads from an instruction back to itself."""
    seen: Set[int] = set()
    work = _next(instructions, index, start)
    while work:
        i = work.pop()
        if i == start:
            return True
        if i not in seen and i < len(instructions):
            seen.add(i)
            work += _next(instructions, index, i)
    return False


def _next(instructions: List[Any], index: Dict[int, int], i: int) -> List[int]:
    target = _target(instructions[i])
    after = [] if target is None or instructions[i].opname in _BLOCKS else [index[target]]
    if instructions[i].opname not in _NEVER_FALLS_THROUGH:
        after.append(i + 1)
    return after


def _after(instruction: Any, state: _State, jump: bool) -> _State:
    name = instruction.opname
    stack, blocks, fors = state
    depth = len(stack) + _effect(instruction, jump)
    if depth < 0:
        raise ValueError(name)
    if name in _BLOCKS:
        blocks = (*blocks, len(stack))
    elif name == "POP_BLOCK":
        blocks = blocks[:-1]
    elif name.startswith("FOR_ITER") and not jump:
        stack = (*stack[:-1], _FOR)
        fors = (*fors, instruction.offset)
    tags = list(stack[:depth]) + [instruction.offset] * (depth - len(stack))
    if name.startswith(_SHUFFLES):
        tags = [tag if tag == _FOR else _UNKNOWN for tag in tags]
    elif tags and tags[-1] != _FOR and not name.startswith(_NO_RESULT):
        tags[-1] = instruction.offset
        if name in ("LOAD_METHOD", "LOAD_ATTR") and depth > len(stack):
            tags[-2] = instruction.offset  # the method and its object, pushed as a pair
    open_fors = tags.count(_FOR)
    return _State(tuple(tags), blocks, fors[:open_fors])


def _effect(instruction: Any, jump: bool) -> int:
    if instruction.opname == "SETUP_WITH" and not jump:
        return 1  # dis reserves room for the handler as well
    return dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)


def _target(instruction: Any) -> Any:
    name = instruction.opname
    jumps = "JUMP" in name or name in _BLOCKS or name.startswith(("FOR_ITER", "SEND"))
    return instruction.argval if jumps else None


def _level(code: CodeType, offset: int, state: _State) -> int:
    """Depth of the stack between two statements here: what `with` and `try` keep on it."""
    if sys.version_info < (3, 11):
        return state.blocks[-1] if state.blocks else 0
    bytecode: Any = dis.Bytecode(code)  # type stubs do not know the exception table
    for entry in bytecode.exception_entries:
        if entry.start <= offset < entry.end:
            return int(entry.depth)
    return 0


def _describe(instructions: List[Any], index: Dict[int, int], tag: int) -> PendingValue:
    if tag == _UNKNOWN:
        return PendingValue("", None, None)
    here = instructions[index[tag]]
    name = here.argval if isinstance(here.argval, str) else None
    owner = None
    if here.opname in ("LOAD_METHOD", "LOAD_ATTR") and index[tag]:
        before = instructions[index[tag] - 1]
        is_variable = before.opname.startswith(("LOAD_FAST", "LOAD_N", "LOAD_GLOBAL", "LOAD_DEREF"))
        owner = before.argval if is_variable and isinstance(before.argval, str) else None
    return PendingValue(here.opname, name, owner)


def _line(code: CodeType, offset: int) -> Optional[int]:
    line = None
    for start, number in dis.findlinestarts(code):
        if start > offset:
            break
        line = number if number is not None else line
    return line
