"""Values that ranks exchange, between processes."""

import pytest

from shoal.comm.ranks.torch_ranks import start_ranks
from shoal.testing import run_ranks

pytestmark = pytest.mark.timeout(600)


def exchange(rank, world):
    ranks = start_ranks()
    mine = {"rank": rank, "text": "ü" * (1 + 1000 * rank), "none": None, "half": 0.5, "list": [1, [2]]}
    return ranks.gather(mine), ranks.from_first(mine if rank == 0 else None), ranks.gather(None)


def test_values_of_any_length_reach_every_rank():
    for gathered, first, nothing in run_ranks(2, exchange, timeout_s=300):
        assert [one["rank"] for one in gathered] == [0, 1]
        assert [len(one["text"]) for one in gathered] == [1, 1001]
        assert gathered[1]["list"] == [1, [2]]
        assert first == gathered[0]
        assert nothing == [None, None]


class Code:
    """What a pickle of it would run on every other rank."""

    def __reduce__(self):
        return print, ("run by a pickle",)


def tell_code(rank, world):
    ranks = start_ranks()
    said = []
    for call in (ranks.gather, ranks.from_first):
        try:
            call(Code())
        except TypeError as error:
            said.append(str(error))
            break
    return said


def test_values_that_are_not_json_are_refused_before_anything_is_sent():
    for said in run_ranks(2, tell_code, timeout_s=300):
        assert said
        assert "JSON" in said[0]
