"""Manifests: read back as written; hostile and corrupted ones are refused with a message."""

import json
from contextlib import suppress
from copy import deepcopy
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.run.checkpoint.manifest import (
    CheckpointError,
    Json,
    Manifest,
    ShardFile,
    StoredSlice,
    TensorEntry,
    canonical_json,
    seal_json,
)

FILE = "rank-00000.safetensors"


def example() -> dict[str, Json]:
    box = {"file": FILE, "key": "model/w", "start": [0, 0], "shape": [2, 3]}
    rest = {"file": FILE, "key": "model/w (2)", "start": [2, 0], "shape": [2, 3]}
    return {
        "format": "meshwright checkpoint",
        "version": 1,
        "step": 7,
        "entries": {"model/w": {"shape": [4, 3], "dtype": "float32", "slices": [box, rest]}},
        "files": {FILE: {"nbytes": 1000, "sha256": "0" * 64}},
        "meta": {"seed": 1, "plan": {"tp": 2}},
    }


def changed(path: str, value: Json) -> dict[str, Json]:
    """The example with the value at `path` (keys and indices joined by "|") replaced."""
    body = deepcopy(example())
    *steps, last = [int(step) if step.isdigit() else step for step in path.split("|")]
    place = body
    for step in steps:
        place = place[step]
    place[last] = value
    return body


def test_a_manifest_survives_the_round_trip_in_one_canonical_form():
    text = seal_json(example())
    manifest = Manifest.parse(text)
    assert manifest.dump() == text
    assert manifest.entries["model/w"].slices[1] == StoredSlice(FILE, "model/w (2)", (2, 0), (2, 3))
    assert manifest.meta == {"seed": 1, "plan": {"tp": 2}}
    assert Manifest.parse(manifest.dump()) == manifest
    assert text == canonical_json(json.loads(text))
    assert text.isascii()
    assert " " not in text.replace("meshwright checkpoint", "").replace("w (2)", "")


def test_every_single_flipped_bit_is_noticed():
    text = seal_json(example()).encode()
    for position in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[position] ^= 1 << bit
            try:
                words = flipped.decode()
            except UnicodeDecodeError:
                continue
            with pytest.raises(CheckpointError):
                Manifest.parse(words)


W = "entries|model/w"
HOSTILE = [
    ("version", 2, "its version is 2; this meshwright reads version 1 of it"),
    ("version", True, "its version is True; this meshwright reads"),
    ("format", "zip", "its format is 'zip'; needed is 'meshwright checkpoint'"),
    ("step", -1, "step: -1 is given; needed is a whole number from 0"),
    ("step", 1.0, "step: given is 1.0; needed is a whole number"),
    ("step", True, "step: given is true; needed is a whole number"),
    ("step", 10**30, "step: 10+ is given; needed is a whole number from 0"),
    ("entries", [], r"entries: given is \[\]; needed is a table of keys"),
    ("meta", "x", 'meta: given is "x"; needed is a table of keys'),
    ("extra", 1, "extra: there is no key 'extra' here"),
    (f"{W}|dtype", "float3", "the dtype 'float3' is unknown"),
    (f"{W}|dtype", ["float32"], "needed is a string in quotes"),
    (f"{W}|extra", 1, "extra: there is no key 'extra' here"),
    (f"{W}|shape", [5, 3], "slices are missing: 3 elements are in no file"),
    (f"{W}|shape", [3, 3], r"a slice at \(2, 0\) of \(2, 3\) leaves \(3, 3\)"),
    (f"{W}|shape", [12], "leaves"),
    (f"{W}|shape", "43", "needed is a list"),
    (f"{W}|shape", [2**50, 2**50], "at most 2\\^50 are accepted"),
    (f"{W}|shape", [2**51, 1], "is impossible"),
    (f"{W}|shape", [1] * 65, "65 dims; at most 64"),
    (f"{W}|slices", [], "slices are missing: 12 elements"),
    (f"{W}|slices|1|start", [1, 0], "slices overlap"),
    (f"{W}|slices|1|start", [0, 0], "slices overlap"),
    (f"{W}|slices|1|start", [-2, 0], "leaves"),
    (f"{W}|slices|1|key", "model/w", "two slices are the same tensor of the same file"),
    (f"{W}|slices|1|key", "", "cannot name a tensor"),
    (f"{W}|slices|1|key", "__metadata__", "cannot name a tensor"),
    (f"{W}|slices|1|key", "a\nb", "cannot name a tensor"),
    (f"{W}|slices|1|key", "x" * 2000, "cannot name a tensor"),
    (f"{W}|slices|1|file", "other.safetensors", "the file 'other.safetensors' is not listed"),
    (f"{W}|slices", [{}] * 3, "slices.0.file: this key is missing"),
    (f"files|{FILE}|nbytes", 47, "47 bytes cannot hold slices of 48 bytes"),
    (f"files|{FILE}|nbytes", 2**60, "needed are 0 to 2"),
    (f"files|{FILE}|nbytes", "1000", "nbytes: given is .1000.; needed is a whole number"),
    (f"files|{FILE}|sha256", "0" * 63, "is not a sha256"),
    (f"files|{FILE}|sha256", None, "given is null; needed is a string"),
    (f"files|{FILE.upper()[:-12]}.safetensors", {"nbytes": 0, "sha256": "0" * 64}, "differ only in case"),
]


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE)
def test_a_hostile_manifest_is_refused_with_its_reason(path: str, value: Json, message: str):
    with pytest.raises(CheckpointError, match=message) as caught:
        Manifest.parse(seal_json(changed(path, value)))
    assert "resume from another checkpoint" in caught.value.diagnostics[0].fix


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        "C:a",
        "C:\\a",
        "\\\\host\\share\\a",
        "a\0b",
        ".hidden",
        "a b",
        "a..b",
        "\u0430",
        "manifest.json",
        "x" * 200,
    ],
)
def test_only_plain_names_are_files(name: str):
    for full in (name, f"{name}.safetensors"):
        with pytest.raises(CheckpointError, match="is not a plain file name"):
            Manifest.parse(seal_json(changed(f"files|{full}", {"nbytes": 0, "sha256": "0" * 64})))


def test_sizes_of_all_slices_in_a_file_add_up():
    files = {FILE: ShardFile(30, "0" * 64)}
    entries = {
        name: TensorEntry((4,), "float32", (StoredSlice(FILE, name, (0,), (4,)),)) for name in ("a", "b")
    }
    with pytest.raises(CheckpointError, match="30 bytes cannot hold slices of 32 bytes"):
        Manifest(0, entries, files, {})


@pytest.mark.parametrize("key", ["format", "version", "step", "entries", "files", "meta", "sha256"])
def test_a_missing_key_is_named(key: str):
    body = json.loads(seal_json(example()))
    del body[key]
    words = {"sha256": "checksum differs"} | dict.fromkeys(
        ("format", "version"), "names no format and version"
    )
    with pytest.raises(CheckpointError, match=words.get(key, f"{key}: this key is missing")):
        Manifest.parse(canonical_json(body) if key == "sha256" else seal_json(body))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "7",
        '{"a":1,"a":1}',
        '{"step":NaN}',
        '{"step":1e999}',
        "[" * 100_000,
        '{"step":' + "9" * 5000 + "}",
        '{"a":1',
    ],
)
def test_text_that_is_no_manifest_is_refused(text: str):
    with pytest.raises(CheckpointError):
        Manifest.parse(text)


def test_an_edited_manifest_is_noticed_by_its_own_checksum():
    text = seal_json(example()).replace('"step":7', '"step":8')
    with pytest.raises(CheckpointError, match="the manifest's own checksum differs: bit-flipped or edited"):
        Manifest.parse(text)


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": object()}, {"a": b"x"}])
def test_meta_that_is_no_json_is_refused_when_written(meta: dict[str, Json]):
    with pytest.raises(CheckpointError, match=r"meta is not plain JSON.*\n.*pass numbers, strings"):
        Manifest(1, {}, {}, meta).dump()


def test_scalars_and_empty_tensors_are_entries_too():
    files = {FILE: ShardFile(8, "0" * 64)}
    scalar = TensorEntry((), "int64", (StoredSlice(FILE, "a", (), ()),))
    empty = TensorEntry((0, 3), "float32", (StoredSlice(FILE, "b", (0, 0), (0, 3)),))
    assert Manifest.parse(Manifest(1, {"a": scalar, "b": empty}, files, {}).dump()).entries == {
        "a": scalar,
        "b": empty,
    }
    twice = TensorEntry((), "int64", (StoredSlice(FILE, "a", (), ()), StoredSlice(FILE, "b", (), ())))
    with pytest.raises(CheckpointError, match="slices overlap"):
        Manifest(1, {"a": twice}, {FILE: ShardFile(16, "0" * 64)}, {})


@settings(deadline=None)
@given(
    cuts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    sizes=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    data=st.data(),
)
def test_a_grid_of_slices_covers_a_tensor_and_a_moved_or_missing_one_is_noticed(
    cuts: tuple[int, int], sizes: tuple[int, int], data
):
    def boundaries(size: int, num: int) -> list[tuple[int, int]]:
        ends = [size * i // num for i in range(num + 1)]
        return [(start, end - start) for start, end in pairwise(ends)]

    spans = [(a, b) for a in boundaries(sizes[0], cuts[0]) for b in boundaries(sizes[1], cuts[1])]
    boxes = [StoredSlice(FILE, str(i), (a[0], b[0]), (a[1], b[1])) for i, (a, b) in enumerate(spans)]
    files = {FILE: ShardFile(10_000, "0" * 64)}
    shuffled = data.draw(st.permutations(boxes))
    Manifest(0, {"w": TensorEntry(sizes, "float64", tuple(shuffled))}, files, {})
    with pytest.raises(CheckpointError, match="slices are missing"):
        Manifest(0, {"w": TensorEntry(sizes, "float64", tuple(shuffled[1:]))}, files, {})
    if len(boxes) > 1:
        moved = StoredSlice(FILE, "moved", shuffled[1].start, shuffled[1].shape)
        with pytest.raises(CheckpointError, match="overlap"):
            Manifest(0, {"w": TensorEntry(sizes, "float64", (moved, *shuffled[1:]))}, files, {})


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
PATHS = sorted({path for path, _, _ in HOSTILE if "|files" not in path and "extra" not in path})


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200) | JSON.map(json.dumps))
def test_the_parser_refuses_any_other_text_with_an_error_of_its_own(text: str):
    with pytest.raises(CheckpointError):
        Manifest.parse(text)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_the_parser_reads_or_refuses_any_value_in_any_place(path: str, value: Json):
    body = changed(path, value)
    try:
        text = seal_json(body)
    except ValueError:  # a number that JSON has no word for
        return
    with suppress(CheckpointError):  # any other error fails the test
        assert Manifest.parse(text).dump() == text
