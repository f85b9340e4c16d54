"""The checker reports exactly the planted errors."""

import time

import pytest

from shoal.testing.history import History, Journal


def written(rows):
    """A look at rows that are in a dictionary."""
    return lambda ids: [rows.get(row, 0) for row in ids]


@pytest.fixture
def history():
    """A writer who added to rows 101 to 105 and set row 1 to 1, 2, 3; the last of each was not acknowledged."""
    made = History()
    for number in range(1, 6):
        made.begin("w", number, 100 + number)
        if number < 5:
            made.acknowledge("w", number)
    for number in range(1, 4):
        made.begin("s", number, 1, "set")
        if number < 3:
            made.acknowledge("s", number)
    return made


GOOD = {101: 1, 102: 1, 103: 1, 104: 1, 1: 2}


@pytest.mark.parametrize("unknown", [{}, {105: 1}, {1: 3}, {105: 1, 1: 3}], ids=str)
def test_what_was_not_acknowledged_may_have_happened_or_not(history, unknown):
    assert history.check(written(GOOD | unknown)) == []
    assert history.acknowledged == 6


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({102: 0}, "missing", "row 102: w's update 2: acknowledged 1 time(s), but it is 0"),
        ({103: 2}, "doubled", "row 103: w's update 3: begun 1 time(s), but applied 2 times"),
        ({105: 2}, "doubled", "row 105: w's update 5: begun 1 time(s), but applied 2 times"),
        ({1: 1}, "out of order", "row 1: s set it to 2, acknowledged, but it is 1"),
        ({1: 4}, "nobody's", "row 1: s set it to 3 at most, but it is 4"),
    ],
)
def test_what_is_wrong_is_named(history, wrong, kind, text):
    (found,) = history.check(written(GOOD | wrong))
    assert (found.kind, str(found)) == (kind, text)


def test_rows_that_nobody_wrote_must_be_empty(history):
    (found,) = history.check(written(GOOD | {7: 3}), others=[7, 8, 101])
    assert str(found) == "row 7: nobody wrote to it, but it is 3"


def test_a_read_sees_what_was_acknowledged_before_it(history):
    began = time.monotonic()
    for value in (2, 3):
        history.read("r", 1, value, began)
    assert history.check(written(GOOD)) == []
    history.read("r", 1, 1, began)
    history.read("r", 1, 9, began)
    assert [str(found) for found in history.check(written(GOOD))] == [
        "row 1: r read 1 after 2 was acknowledged",
        "row 1: r read 9, but no more than 3 was written",
    ]


def test_a_writer_of_another_process_is_read_from_its_journal(tmp_path):
    journal = Journal(tmp_path / "w", "w")
    for number in (1, 2):
        journal.begin(number, 100 + number)
        journal.acknowledge(number)
    journal.begin(3, 103)
    journal.close()
    with open(tmp_path / "w", "a") as file:
        file.write('["begin", "w", 4')  # it was killed here
    history = History()
    history.load(tmp_path / "w")
    assert history.acknowledged == 2
    assert [found.kind for found in history.check(written({101: 1, 103: 2}))] == ["missing", "doubled"]
