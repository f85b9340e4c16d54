"""Fixtures of the tests of status pages, logs and metrics."""

import pytest

from tests.observe.browser import Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()
