"""Readers of recordings find in those of 63 families what they found when these were stored."""

import json

import pytest

from tests.model.recording.stored_recordings import (
    FOLDER,
    NAMES,
    READINGS,
    RENEW,
    layer_calls,
    load,
    read,
    record,
    recording_path,
    versions,
)

STORED = json.loads(READINGS.read_text())
RECORDED_AGAIN = ("llama", "t5", "ResNetForImageClassification")


@pytest.mark.parametrize("name", NAMES)
def test_readers_find_in_a_recording_what_they_found_when_it_was_stored(name: str):
    stored = dict(STORED[name])
    calls = layer_calls(stored.pop("layer calls"))
    found = read(load(name), calls)
    differs = [reader for reader in stored if found[reader] != stored[reader]]
    message = f"if that is meant, store it: {RENEW}"
    assert {each: found[each] for each in differs} == {each: stored[each] for each in differs}, message
    assert found.keys() == stored.keys(), message


@pytest.mark.parametrize("name", RECORDED_AGAIN)
def test_a_family_recorded_again_equals_what_is_stored(name: str):
    made_with = STORED["versions"]
    message = f"recorded with {made_with}, and here are {versions()}: {RENEW}"
    recording, calls = record(name)
    stored = load(name)
    assert [str(event) for event in recording.events] == [str(event) for event in stored.events], message
    assert recording == stored, message
    assert calls == layer_calls(STORED[name]["layer calls"]), message


def test_every_stored_file_belongs_to_a_family():
    assert {path.name for path in FOLDER.glob("*.gz")} == {recording_path(name).name for name in NAMES}
    assert len(NAMES) == 63
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3_000_000
