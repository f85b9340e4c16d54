"""Fixtures of the trainer's tests."""

import pytest
import torch

from shoal import _core
from shoal.data import CriteoLike, write_criteo


@pytest.fixture(autouse=True)
def threads_are_given_back():
    threads, native = torch.get_num_threads(), _core.num_threads()
    yield
    torch.set_num_threads(threads)
    _core.set_num_threads(native)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criteo")
    write_criteo(folder / "train.tsv", CriteoLike(rows=4096, seed=1, scale=0.001))
    write_criteo(folder / "eval.tsv", CriteoLike(rows=1000, seed=1, scale=0.001, first_row=16384))
    return folder
