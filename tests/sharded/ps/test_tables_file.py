"""Files of tables for parameter servers (`load_tables`): what they may say, and errors that name the rule."""

import pytest

from shoal.errors import ConfigError
from shoal.sharded import load_tables
from shoal.table import HashTable


def write(tmp_path, text):
    path = tmp_path / "tables.toml"
    path.write_text(text)
    return path


def test_every_section_is_a_table(tmp_path):
    text = """
    seed = 7
    [tables.user]
    dim = 8
    [tables.item]
    dim = 16
    optimizer = { kind = "adagrad", lr = 0.05 }
    on_bad_gradient = "skip"
    """
    found = load_tables(write(tmp_path, text))
    made = {name: HashTable.from_config(config, name=name) for name, (config, _) in found.items()}
    assert {name: table.dim_size for name, table in made.items()} == {"user": 8, "item": 16}
    assert [options["seed"] for _, options in found.values()] == [7, 7]
    assert found["item"][1]["on_bad_gradient"] == "skip"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no [tables.NAME] section"),
        ("[tables.user", "tables.toml: "),
        ("tables.user = 3", "table 'user' must be a section, got 3"),
        ("[tables.user]\nlr = 1.0", "table 'user': dim must be given"),
        (
            "[tables.user]\ndim = 8\nlearning_rate = 0.1",
            "table 'user' has no option learning_rate; it has dim, evict, expire_after, initializer, lr, max_bytes, "
            "max_rows, on_bad_gradient, optimizer, seed",
        ),
        ('[tables.user]\ndim = 8\noptimizer = { kind = "sdg" }', "optimizer.kind must be one of adadelta, "),
        ('[tables.user]\ndim = 8\noptimizer = { kind = "sgd", rate = 1 }', "'rate'"),
        ('[tables.user]\ndim = 8\noptimizer = "sdg"', "tables.toml: table 'user': optimizer must be one of adadelta, "),
        ("[tables.user]\ndim = 0", "tables.toml: table 'user': segments[0].dim_size must be above 0, got 0"),
        ('seed = "a"\n[tables.user]\ndim = 8', "tables.toml: table 'user': seed must be an integer, got 'a'"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_allowed(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_tables(write(tmp_path, text))
    assert message in str(caught.value)
    assert "tables.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^cannot read the tables of .*absent\.toml. \(No such file or directory\)$"):
        load_tables(tmp_path / "absent.toml")
