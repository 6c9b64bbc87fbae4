import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.model import NearMiss, decision_record, decode_numbers, plain_json
from supervise.errors import StoreError, TamperError
from supervise.store import Chain, read_audit, verify_audit

pytestmark = pytest.mark.slow  # each byte of a log, damaged in each way

RUN = "run-1"
FIELDS = {"run": RUN, "epoch": 1, "mono_ns": 5, "wall": "now", "step": 3}
FIELDS |= {"kind": "note", "actor": "app"}


def log(count: int = 4) -> list[bytes]:
    chain, lines = Chain(RUN), []
    for seq in range(count):
        fields = {**FIELDS, "seq": seq, "prev": chain.head, "reason": f"loss {seq}"}
        lines.append(chain.line(fields))
        chain.check_line(lines[-1])
    return lines


def check(tmp_path, data: bytes, **more):
    path = tmp_path / "audit.log"
    path.write_bytes(data)
    return verify_audit(path, RUN, **more)


def test_flipping_any_byte_names_the_record(tmp_path):
    lines = log()
    whole = b"".join(lines)
    owner = [seq for seq, line in enumerate(lines) for _ in line]

    for at in range(len(whole)):
        report = check(tmp_path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])

        last = at == len(whole) - 1  # without its line end the log is torn, not tampered
        status = "truncated" if last else "tampered"
        assert (report.status, report.bad_seq) == (status, owner[at]), at
        assert f"record {owner[at]}" in report.message


@settings(max_examples=100, deadline=None)
@given(picks=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_dropping_reordering_or_duplicating_records_shows(tmp_path_factory, picks):
    lines = log()

    report = check(tmp_path_factory.mktemp("log"), b"".join(lines[pick] for pick in picks))

    good = 0
    while good < len(picks) and picks[good] == good:
        good += 1
    status, bad_seq = ("good", None) if good == len(picks) else ("tampered", good)
    assert (report.status, report.bad_seq, report.records) == (status, bad_seq, good)


def test_cutting_at_every_byte_is_torn_or_a_shorter_log(tmp_path):
    lines = log()
    whole = b"".join(lines)
    ends = [sum(map(len, lines[: n + 1])) for n in range(len(lines))]

    for cut in range(len(whole)):
        report = check(tmp_path, whole[:cut])

        good = sum(end <= cut for end in ends)
        status = "good" if cut in ends else "truncated"
        assert (report.status, report.records) == (status, good), cut
        assert report.exit_code == (0 if status == "good" else 2)
        assert report.bad_seq == (None if status == "good" else good)


def test_a_zero_filled_tail_is_torn(tmp_path):
    whole = b"".join(log())

    assert check(tmp_path, whole + bytes(300)).exit_code == 2
    assert check(tmp_path, whole[:-20] + bytes(300)).exit_code == 2
    assert check(tmp_path, whole[:-300] + bytes(100) + whole[-200:]).exit_code == 1


def test_a_head_seen_elsewhere_shows_a_cut_and_a_rewritten_log(tmp_path):
    """The chain alone cannot show it, the receiver of a message can."""
    whole = b"".join(log())
    head = check(tmp_path, whole).head
    half = b"".join(log()[:2])

    assert check(tmp_path, whole, witness=(4, head)).exit_code == 0
    assert check(tmp_path, whole, witness=(2, check(tmp_path, half).head)).exit_code == 0
    cut = check(tmp_path, half, witness=(4, head))
    assert (cut.exit_code, cut.bad_seq) == (1, 2)
    assert check(tmp_path, whole, witness=(4, "0" * 64)).exit_code == 1


def test_a_log_belongs_to_its_run(tmp_path):
    whole = b"".join(log())
    report = check(tmp_path, whole)
    assert (report.exit_code, report.offset) == (0, len(whole))

    report = verify_audit(tmp_path / "audit.log", "run-2")
    assert (report.exit_code, report.bad_seq) == (1, 0)
    assert "belongs to the run 'run-1'" in report.message


@pytest.mark.parametrize("change", [{"seq": 2}, {"prev": "0" * 64}, {"epoch": 0}, {"epoch": 3}])
def test_a_record_with_a_good_digest_must_still_follow(tmp_path, change):
    lines = log(1)
    chain = Chain(RUN)
    chain.check_line(lines[0])
    fields = {"seq": 1, "prev": chain.head, "run": RUN, "epoch": 1, **change}

    report = check(tmp_path, lines[0] + chain.line(fields))

    assert (report.exit_code, report.bad_seq) == (1, 1)


def test_reading_stops_at_the_first_bad_record(tmp_path):
    path = tmp_path / "audit.log"
    lines = log()
    path.write_bytes(b"".join(lines)[:-5])
    assert [r["seq"] for r in read_audit(path)] == [0, 1, 2]

    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    seen = []
    with pytest.raises(TamperError) as caught:
        seen.extend(r["seq"] for r in read_audit(path))
    assert (seen, caught.value.seq) == ([0, 1], 2)

    with pytest.raises(StoreError, match="No such file"):
        list(read_audit(tmp_path / "none"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50)
@given(data=st.dictionaries(st.text(), JSON, max_size=4), reason=st.text())
def test_any_decision_is_stored_exactly_as_replay_will_compare_it(data, reason):
    """Non-finite numbers, lone surrogates, line ends: the bytes are one line of strict JSON."""
    decision = NearMiss(step=5, reason=reason, detector="d", details=data)
    data = {"detector": "d", "details": data}
    chain = Chain(RUN)
    fields = {"seq": 0, "prev": chain.head, "run": RUN, "epoch": 1}
    fields |= {"kind": "rule", "step": 5, "reason": reason, "data": data}

    line = chain.line(fields)
    stored, replayed = chain.check_line(line), decision_record(decision)

    assert line.count(b"\n") == 1
    assert (stored["reason"], stored["data"]) == (replayed["reason"], replayed["data"])


def test_non_finite_numbers_come_back():
    """JSON has no NaN: the log says "NaN", "+Inf", "-Inf", and `decode_numbers` takes them back."""
    coded = plain_json({"a": [float("nan"), float("inf")], "b": (float("-inf"), 1.5)})

    assert coded == {"a": ["NaN", "+Inf"], "b": ["-Inf", 1.5]}
    back = decode_numbers(coded)
    assert back["a"][0] != back["a"][0]
    assert back["b"] == [float("-inf"), 1.5]
