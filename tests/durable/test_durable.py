"""`shoal.durable`: manifests, new folders, files replaced in a folder, series. Plain files, then processes."""

import json
import os
import subprocess
import sys
import threading

import pytest

from shoal.durable import (
    MANIFEST,
    BasenameSave,
    Draft,
    Series,
    digest_file,
    file_bases,
    find_saved,
    new_folder,
    read_folder,
    read_saved,
    replace_files,
    write_saved,
)
from shoal.errors import DataError
from shoal.testing.damage import damages

# --- manifests --------------------------------------------------------------------------------------------------------


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    fields = {"kind": "full", "content": {"best": 0.1 + 0.2, "name": "ü\udcff", "none": None, "big": 1 << 62}}
    write_saved(tmp_path / "m", fields, {"a": digest_file(tmp_path / "a")})
    saved = read_saved(tmp_path / "m")
    assert saved.fields == fields
    assert saved.files == {"a": digest_file(tmp_path / "a")}
    assert saved.read("a") == b"x" * 1000
    saved.verify()


def read_or_none(path, unsealed):
    try:
        return str(read_saved(path, unsealed=unsealed))  # only white space was changed
    except DataError:
        return None


def test_every_damage_of_a_manifest_is_noticed(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    write_saved(tmp_path / "m", {"kind": "full", "rows": 12}, {"a": digest_file(tmp_path / "a")})
    whole = read_saved(tmp_path / "m")
    text = (tmp_path / "m").read_bytes()
    for place in range(len(text)):
        for bit in range(8):
            (tmp_path / "m").write_bytes(text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :])
            assert {read_or_none(tmp_path / "m", sealed) for sealed in (False, True)} <= {None, str(whole)}
    for length in range(len(text)):
        (tmp_path / "m").write_bytes(text[:length])
        with pytest.raises(DataError):
            read_saved(tmp_path / "m", unsealed=True)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"files": 3}', "{}", '{"files": {"a": {"bytes": 1, "crc32c": "0"}}}', "\xff", "[" * 100_000],
)
def test_what_is_not_a_manifest_is_refused(tmp_path, text):
    (tmp_path / "m").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="m"):
        read_saved(tmp_path / "m")


def test_a_file_too_large_for_a_manifest_is_not_said_to_be_something_else(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.durable.manifest.MAX_BYTES", 10)
    (tmp_path / "m").write_text(json.dumps({"kind": "full"}))
    with pytest.raises(DataError) as caught:
        read_saved(tmp_path / "m")
    assert str(caught.value) == f"{tmp_path / 'm'} has more than 10 bytes, so it is not a manifest"


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", "a//b", "."])
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path, name):
    write_saved(tmp_path / "m", {}, {name: (1, 1)})
    with pytest.raises(DataError, match="names inside the folder"):
        read_saved(tmp_path / "m")
    write_saved(tmp_path / "m", {}, {"a": (1, 1)}, {"a": name})
    with pytest.raises(DataError, match="names inside the folder"):
        read_saved(tmp_path / "m")


def test_sizes_of_old_manifests_are_taken_only_where_they_are_asked_for(tmp_path):
    (tmp_path / "a").write_bytes(b"xyz")
    (tmp_path / "m").write_text(json.dumps({"kind": "full", "files": {"a": 3}}))
    with pytest.raises(DataError, match="has no digest"):
        read_saved(tmp_path / "m")
    read_saved(tmp_path / "m", unsealed=True).verify()
    (tmp_path / "a").write_bytes(b"xy")
    with pytest.raises(DataError, match="has 2 bytes, its manifest says 3"):
        read_saved(tmp_path / "m", unsealed=True).verify()


def test_a_field_cannot_have_a_name_of_the_manifest_itself(tmp_path):
    with pytest.raises(ValueError, match="'digest'"):
        write_saved(tmp_path / "m", {"digest": 1}, {})


@pytest.mark.parametrize(
    "names",
    [["u/a", "u:a", "u-a"], ["u-a", "u:a", "u/a"], ["a"], [], ["a/b", "a-b"]],
    ids=lambda names: "+".join(names),
)
def test_file_names_of_different_tables_differ(names):
    bases = file_bases(names)
    assert list(bases) == names
    assert len(set(bases.values())) == len(names)
    assert all("/" not in base and ":" not in base for base in bases.values())
    assert file_bases(reversed(names)) == bases


# --- folders ----------------------------------------------------------------------------------------------------------


def fill(folder, text="rows"):
    with new_folder(folder) as draft:
        os.makedirs(os.path.join(draft.path, "inner"))
        for name in ("a", "inner/b"):
            with open(os.path.join(draft.path, name), "w") as file:
                file.write(text + name)
        draft.seal({"kind": "full", "text": text})


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    fill(tmp_path / "f")
    assert sorted(read_folder(tmp_path / "f").files) == ["a", "inner/b"]
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "g") as draft:
        open(os.path.join(draft.path, "x"), "w").close() or 1 / 0
    with pytest.raises(FileExistsError):
        fill(tmp_path / "f")
    assert os.listdir(tmp_path) == ["f"]


def test_a_known_digest_of_a_file_that_was_not_written_is_refused(tmp_path):
    draft = Draft(tmp_path / "f").begin()
    with pytest.raises(DataError, match="x is missing although it was written"):
        draft.seal({}, {"x": (1, 1)})


def test_every_damage_of_every_file_of_a_folder_is_named(tmp_path):
    fill(tmp_path / "f")
    for name in ("a", "inner/b"):
        for _ in damages(tmp_path / "f" / name):
            with pytest.raises(DataError, match=name):
                read_folder(tmp_path / "f").verify()


# --- files replaced in a folder ---------------------------------------------------------------------------------------


def save(base, texts, *, stop_at=None):
    with BasenameSave(base) as writing:
        for end, text in texts.items():
            path = f"{base}{end}"
            temporary = writing.temporary(path)
            with open(temporary, "w") as file:
                file.write(text)
            writing.add(path, digest_file(temporary))
        if stop_at == "before":
            raise KeyboardInterrupt
        writing.commit({"what": "a test"})


def contents(base):
    saved = find_saved(base)
    return {name: saved.read(name).decode() for name in saved.files}


def test_a_second_save_replaces_the_first_and_removes_what_it_does_not_have(tmp_path):
    save(tmp_path / "t", {"-0": "old", "-1": "old", "-2": "old"})
    (tmp_path / "t-9").write_text("somebody else's")
    save(tmp_path / "t", {"-0": "new", ".x": "new"})
    assert contents(tmp_path / "t") == {"t-0": "new", "t.x": "new"}
    assert sorted(os.listdir(tmp_path)) == ["t-0", "t-9", "t.manifest", "t.x"]


def test_files_that_get_their_final_names_while_they_are_read_are_found(tmp_path, monkeypatch):
    def between_its_renames():
        (tmp_path / "t-0-tmp").write_text("new")
        write_saved(tmp_path / "t.manifest", {}, {"t-0": digest_file(tmp_path / "t-0-tmp")}, {"t-0": "t-0-tmp"})
        return read_saved(tmp_path / "t.manifest")

    real = os.path.exists

    def renamed_once_seen(path):
        seen = real(path)
        if str(path).endswith("t-0-tmp") and seen:
            os.replace(path, tmp_path / "t-0")
        return seen

    monkeypatch.setattr(os.path, "exists", renamed_once_seen)
    for use in (lambda saved: saved.has("t-0"), lambda saved: saved.read("t-0") == b"new"):
        assert use(between_its_renames())
    assert between_its_renames().missing() is None
    between_its_renames().verify()
    saved = between_its_renames()
    os.unlink(tmp_path / "t-0-tmp")
    os.unlink(tmp_path / "t-0")
    assert not saved.has("t-0")
    assert "t-0 is missing" in saved.missing()
    for use in (lambda: saved.read("t-0"), saved.verify):
        with pytest.raises(DataError, match="t-0 cannot be read: No such file"):
            use()


def test_a_save_that_is_given_up_leaves_the_one_before(tmp_path):
    save(tmp_path / "t", {"-0": "old", "-1": "old"})
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "t", {"-0": "new"}, stop_at="before")
    assert contents(tmp_path / "t") == {"t-0": "old", "t-1": "old"}
    assert sorted(os.listdir(tmp_path)) == ["t-0", "t-1", "t.manifest"]


CRASHING = """
import os, sys
from shoal.durable import BasenameSave, digest_file
base, renames = sys.argv[1], int(sys.argv[2])
real, done = os.replace, 0
def replace(source, target):
    global done
    done += 1
    if done > renames:
        os._exit(9)
    real(source, target)
os.replace = replace
with BasenameSave(base) as writing:
    for i in range(3):
        temporary = writing.temporary(f"{base}-{i}")
        open(temporary, "w").write("new")
        writing.add(f"{base}-{i}", digest_file(temporary))
    writing.commit()
"""


@pytest.mark.parametrize("renames", range(5))
def test_a_process_that_dies_in_a_save_leaves_the_old_one_or_the_new_one(tmp_path, renames):
    """Its renames are the manifest's, then one for each of three files."""
    base = tmp_path / "t"
    save(base, {f"-{i}": "old" for i in range(4)})
    done = subprocess.run([sys.executable, "-c", CRASHING, str(base), str(renames)], timeout=300)
    assert done.returncode == (0 if renames == 4 else 9)
    expected = {"t-0": "old", "t-1": "old", "t-2": "old", "t-3": "old"} if renames == 0 else dict.fromkeys(
        ("t-0", "t-1", "t-2"), "new"
    )  # fmt: skip
    assert contents(base) == expected
    save(base, {"-0": "third"})
    assert contents(base) == {"t-0": "third"}
    left = {name for name in os.listdir(tmp_path) if "-tmp-" in name}
    assert len(left) == (4 if renames == 0 else 0)  # three files and the manifest of the interrupted save


def test_saves_at_the_same_time_leave_one_that_is_whole(tmp_path):
    threads = [
        threading.Thread(target=save, args=(tmp_path / "t", {f"-{i}": str(n) for i in range(4)})) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(contents(tmp_path / "t").values())) == 1
    assert len(os.listdir(tmp_path)) == 5


def test_files_in_folders_below_are_moved_too(tmp_path):
    for text in ("old", "new"):
        (tmp_path / "draft" / "rank-0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "draft" / "rank-0" / text).write_text(text)
        digest = digest_file(tmp_path / "draft" / "rank-0" / text)
        name = f"rank-0/{text}"
        replace_files(tmp_path / MANIFEST, {}, {name: digest}, {name: f"draft/{name}"})
        assert read_saved(tmp_path / MANIFEST).read(name) == text.encode()
    assert os.listdir(tmp_path / "rank-0") == ["new"]


# --- series -----------------------------------------------------------------------------------------------------------


def series_of(folder, count):
    for number in range(1, count + 1):
        fill(folder / f"ckpt-{number:03d}", str(number))
    return Series(folder, "ckpt-", 3)


def load(found):
    found.saved.verify()
    return found.number


def test_the_newest_whole_folder_is_loaded_and_the_damaged_ones_are_named(tmp_path):
    series = series_of(tmp_path, 3)
    told = []
    assert series.load_newest(load, told.append) == 3
    assert told == []
    (tmp_path / "ckpt-003" / "a").write_text("4a")
    (tmp_path / "ckpt-002" / MANIFEST).unlink()
    assert series.load_newest(load, told.append) == 1
    assert len(told) == 2
    assert "ckpt-003 is damaged" in told[0]
    assert "CRC-32C" in told[0]
    assert "ckpt-002 is damaged: it has no manifest" in told[1]
    assert all(each.endswith(f"{tmp_path / 'ckpt-001'} is used instead") for each in told)


def test_a_series_without_a_whole_folder_is_an_error_and_an_empty_one_is_not(tmp_path):
    assert Series(tmp_path / "nowhere", "ckpt-", 3).load_newest(load, pytest.fail) is None
    series = series_of(tmp_path, 2)
    for number in (1, 2):
        (tmp_path / f"ckpt-{number:03d}" / "a").write_text("")
    with pytest.raises(DataError, match=r"no checkpoint in .* is complete: .*ckpt-002.*ckpt-001"):
        series.load_newest(load, pytest.fail)


def test_an_error_that_is_not_damage_is_raised_and_nothing_older_is_taken(tmp_path):
    def refuse(found):
        raise DataError("rows of another width")

    with pytest.raises(DataError, match="another width"):
        series_of(tmp_path, 2).load_newest(refuse, pytest.fail)


def test_pruning_counts_whole_folders_alone(tmp_path):
    series = series_of(tmp_path, 5)
    (tmp_path / "ckpt-005" / "a").unlink()
    (tmp_path / "ckpt-003" / "a").unlink()
    assert series.prune(2, pinned=[1]) == []
    (tmp_path / "other").mkdir()
    assert series.prune(1, pinned=[1]) == ["ckpt-003", "ckpt-002"]
    assert sorted(os.listdir(tmp_path)) == ["ckpt-001", "ckpt-004", "ckpt-005", "other"]
