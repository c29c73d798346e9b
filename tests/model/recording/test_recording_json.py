"""A recording is the same after it was saved, and analyses find the same in it."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.api import analyze
from meshwright.model.recording.recording_json import load_recording, save_recording
from meshwright.model.tensor_parallel.residual_stream_trace import trace_residual_stream
from meshwright.model.tensor_parallel.shared_sum_trace import FusedAllReduces
from meshwright.model.trial.fake_tensor_forward import read_trial
from meshwright.plan.job.errors import PlanError
from tests.model.recording.recorded_functions import record_function
from tests.parallel.tensor.model_families import analyze_family


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_analyses_read_a_stored_recording_of_a_family(family: str, tmp_path: Path):
    analyzed = analyze_family(family, 6)
    recording, path = analyzed.record_forward(), tmp_path / "recording.json.gz"
    save_recording(recording, path)
    stored = load_recording(path)
    assert stored == recording
    found, spec = read_trial(stored), analyzed.model_spec
    assert tuple(found.block_calls) == spec.block_calls
    assert tuple(found.flops) == spec.flops
    assert tuple(found.saved_numel) == spec.saved_numel
    calls, flows = trace_residual_stream(stored, spec.layer_calls)
    rowwise = [call.name for call in calls if call.role == "rowwise"]
    assert FusedAllReduces(stored, rowwise).mark_calls(calls) == spec.layer_calls
    assert flows == spec.residual_flows


def test_equal_recordings_are_equal_files(tmp_path: Path):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    analyzed = analyze(build, {"input": torch.ones(2, 3)})
    for name in ("a.json.gz", "b.json.gz"):
        save_recording(analyzed.record_forward(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_every_kind_of_value_is_kept(tmp_path: Path):
    values = [None, True, 3, -1.5, float("inf"), 2j, "text", (1, [2]), {"a": (), 1: "b"}, torch.float16]
    values += [torch.device("cpu"), torch.Size([2, 3]), slice(1, None, 2), ..., torch.ones(2).to_sparse()]
    recording = record_function(lambda: values)
    save_recording(recording, tmp_path / "values.json")
    found = load_recording(tmp_path / "values.json").outputs
    assert found == recording.outputs
    assert [type(each) for each in found] == [type(each) for each in recording.outputs]
    assert not found[-1].is_strided


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"format": "meshwright recording", "version": 99}',
            "version is 99; this meshwright reads version 1",
        ),
        ('{"format": "meshwright plan", "version": 1}', "needed is 'meshwright recording'"),
        ("[1, 2]", "it names no format and version"),
        ('{"format": "meshwright recording", "version": 1}', "lacks its 'tensors', 'num_samples'"),
        ("{", "cannot be read"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_recording(path)


def test_a_compressed_file_is_plain_json_inside(tmp_path: Path):
    path = tmp_path / "recording.json.gz"
    save_recording(record_function(lambda: torch.ones(2) + 1), path)
    found = json.loads(gzip.decompress(path.read_bytes()))
    assert (found["format"], found["version"]) == ("meshwright recording", 1)
    assert [event[1] for event in found["events"] if event[0] == "FunctionCall"] == ["ones", "add"]
