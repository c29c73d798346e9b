"""Records all stored families again, and stores what each reader finds:

    python -m tests.model.recording.renew_recordings            all families, in about a minute
    python -m tests.model.recording.renew_recordings llama t5   some of them

Run it when torch or transformers changed, or when the recorder records something else. When a reader finds
something else in the same recordings, look at the difference of readings.json before you commit it.
"""

import json
import sys
from dataclasses import astuple

from meshwright.model.recording.recording_json import save_recording
from tests.model.recording.stored_recordings import (
    FOLDER,
    NAMES,
    READINGS,
    read,
    record,
    recording_path,
    to_text,
    versions,
)


def renew(names: list[str]) -> None:
    """Records families again; those that are no longer known are removed."""
    FOLDER.mkdir(exist_ok=True)
    known = json.loads(READINGS.read_text()) if READINGS.exists() else {}
    for name in names:
        recording, calls = record(name)
        save_recording(recording, recording_path(name))
        known[name] = {"layer calls": [astuple(call) for call in calls], **read(recording, calls)}
        sys.stdout.write(f"{recording_path(name).name}  {recording_path(name).stat().st_size} bytes\n")
    for path in {*FOLDER.glob("*.json.gz")} - {recording_path(name) for name in NAMES}:
        path.unlink()
    readings = {"versions": versions(), **{name: known[name] for name in NAMES if name in known}}
    READINGS.write_text(to_text(readings))


if __name__ == "__main__":
    renew(sys.argv[1:] or list(NAMES))
