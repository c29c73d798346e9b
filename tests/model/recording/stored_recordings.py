"""Recordings of the forwards of 63 model families, with what each reader of recordings finds in them.

    stored/NAME.json.gz     the recording, as `inspect --record` writes it; about 12 kB
    stored/readings.json    by name: the layer calls that the analysis found, and one reading per reader

A reader is tested on all of them without building a model. Files of the model's code are stored by their
names alone. `python -m tests.model.recording.renew_recordings` writes all of it again.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import benchmarks.models.custom_models as custom_models
from benchmarks.models.head_families import ALL_HEADS
from benchmarks.models.model_families import FAMILIES, SEQUENCE, Family
from meshwright.api import analyze
from meshwright.model.recording.forward_recording import AtenOp, FunctionCall, Recording
from meshwright.model.recording.model_operations import model_operations
from meshwright.model.recording.recording_json import load_recording
from meshwright.model.tensor_parallel.colwise_rowwise_groups import LayerGroup, find_layer_groups
from meshwright.model.tensor_parallel.feature_id_propagation import component_labels
from meshwright.model.tensor_parallel.residual_stream_trace import trace_residual_stream
from meshwright.model.tensor_parallel.shared_sum_trace import FusedAllReduces
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH, TrialFindings, read_trial
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall

FOLDER = Path(__file__).parent / "stored"
READINGS = FOLDER / "readings.json"
RENEW = "python -m tests.model.recording.renew_recordings"
FAMILIES_BY_NAME = {family.name: family for family in FAMILIES}
HEAD_NAMES = frozenset(
    (
        *("MarianMTModel", "PegasusForConditionalGeneration", "MBartForConditionalGeneration"),
        *("WhisperForConditionalGeneration", "Speech2TextForConditionalGeneration"),
        *("ASTForAudioClassification", "BertForSequenceClassification", "LlamaForSequenceClassification"),
        *("BartForSequenceClassification", "XLMRobertaForTokenClassification"),
        *("Qwen2ForTokenClassification", "DistilBertForQuestionAnswering", "BertForMultipleChoice"),
        *("BeitForImageClassification", "Dinov2ForImageClassification", "SwinForImageClassification"),
        *("ConvNextForImageClassification", "ResNetForImageClassification"),
    )
)
HEADS_BY_NAME = {head.name: head for head in ALL_HEADS if head.name in HEAD_NAMES}
NAMES = (*FAMILIES_BY_NAME, *HEADS_BY_NAME)
Reading = Any  # as JSON has it


def recording_path(name: str) -> Path:
    """Returns the file of a stored recording."""
    return FOLDER / f"{name.replace(' ', '_')}.json.gz"


def load(name: str) -> Recording:
    """Returns a stored recording."""
    return load_recording(recording_path(name))


def record(name: str) -> tuple[Recording, tuple[LayerCall, ...]]:
    """Returns a new recording of a family, and the layer calls that its analysis found."""
    torch.manual_seed(0)
    if name in HEADS_BY_NAME:
        head = HEADS_BY_NAME[name]
        analyzed = analyze(head.build, head.collate(head.build()))
    else:
        build, example, loss = _case(FAMILIES_BY_NAME[name])
        analyzed = analyze(build, example, loss=loss)
    recording = analyzed.record_forward()
    events = [_with_file_name(e) if isinstance(e, FunctionCall) else e for e in recording.events]
    calls = tuple(replace(call, norm_formula=None) for call in analyzed.model_spec.layer_calls)
    return replace(recording, events=events), calls


def _case(family: Family) -> tuple[Callable[[], Any], Any, Any]:
    if family.factory:
        factory = getattr(custom_models, family.factory)
        made = factory()
        return factory, made.example, made.loss
    fields = {key: value for key, value in family.config.items() if key != "architectures"}
    kind = getattr(transformers, family.architecture)
    ids = torch.randint(3, 250, (6, SEQUENCE))
    example = {"input_ids": ids, "labels": ids} if family.trains_on_text else custom_models.masked_text()
    return lambda: kind(transformers.AutoConfig.for_model(**fields)), example, None


def _with_file_name(call: FunctionCall) -> FunctionCall:
    if not call.by_model:  # it has the line of whoever called the library
        return replace(call, file="", line=0)
    return replace(call, file=call.file.rpartition("/")[2])


def read(recording: Recording, calls: Sequence[LayerCall]) -> dict[str, Reading]:
    """Returns what each reader of recordings finds in one; `calls` are the layer calls of its model, whose
    marks are found again.
    """
    found = read_trial(recording)
    bare = tuple(
        replace(call, takes_residual=False, outer_module="", outer_args=(), flops=0, saved_numel=0, sum_id=0)
        for call in calls
    )
    rowwise = [call.name for call in calls if call.role == "rowwise"]
    residual_calls, flows = trace_residual_stream(recording, bare)
    summed = FusedAllReduces(recording, rowwise).mark_calls(bare)
    costs = found.layer_ranges.add_costs(bare, found.layer_uses.uses, found.saved_storages, PROBE_BATCH)
    readings = {
        "blocks": _read_blocks(found),
        "value reads": _read_values(recording, found),
        "layer uses": [astuple(use) for use in found.layer_uses.uses],
        "draws": found.num_draws,
        "costs": [found.flops, found.saved_numel, [[each.flops, each.saved_numel] for each in costs]],
        "saved activations": [len(found.saved_storages), sum(each[2] for each in found.saved_storages)],
        "features": _read_features(found),
        "groups": [_group(group) for group in find_layer_groups(found.feature_flow, {})],
        "vocabulary": _read_vocabulary(found),
        "batch coupling": [found.table_uses, [astuple(each) for each in found.batch_norm_calls]],
        "writes in glue": [found.untracked_write_lines, found.written_buffers, found.writes_in_place],
        "residual stream": [
            [astuple(flow) for flow in flows],
            [[each.takes_residual, each.outer_module, each.outer_args] for each in residual_calls],
        ],
        "sums": [each.sum_id for each in summed],
        "operations": _read_operations(recording),
    }
    return json.loads(json.dumps(readings))


def _read_blocks(found: TrialFindings) -> Reading:
    users: dict[str, list[str]] = {}
    for name, each in found.param_users.items():
        users.setdefault(" ".join(sorted(each)), []).append(name)
    digests = {key: [len(names), _digest(names)] for key, names in users.items()}
    return [found.block_calls, found.output_numel, found.num_captured, digests]


def _read_values(recording: Recording, found: TrialFindings) -> Reading:
    reads = [event.name for event in recording.events if isinstance(event, AtenOp) and not event.outputs]
    checkpointed = found.user_checkpointed_calls
    return [sorted(found.layer_uses.value_dependent), found.attention_calls, checkpointed, len(reads)]


def _read_features(found: TrialFindings) -> Reading:
    flow = found.feature_flow
    ties = flow.features.ties
    heads = component_labels(np.arange(flow.num_features), ties.tied_pairs)
    units = component_labels(np.arange(flow.num_features), [*ties.tied_pairs, *ties.used_pairs])
    nodes = [
        [each.name, each.kind, each.block_call, each.width, each.arg, each.input_features is not None]
        for each in flow.nodes
    ]
    inputs = [each.input_features.tolist() for each in flow.nodes if each.input_features is not None]
    return [
        nodes,
        _digest(heads.tolist()),
        _digest(units.tolist()),
        _digest(inputs),
        _digest([each.tolist() for each in flow.unsplit_features]),
        {name: len(each) for name, each in sorted(flow.param_features.items())},
        sorted(flow.params_without_features),
    ]


def _group(group: LayerGroup) -> Reading:
    splits = (
        {f"{n.name} {n.arg}": str(s) for n, s in each.items()} for each in (group.sources, group.rowwise)
    )
    return [*splits, group.inner_params]


def _read_vocabulary(found: TrialFindings) -> Reading:
    flow = found.vocab_flow
    sizes = {name: sorted(each) for name, each in flow.first_dims.items()}
    return [sorted(flow.used_elsewhere), flow.not_shardable, flow.logits_modified_by, sizes]


def _read_operations(recording: Recording) -> Reading:
    operations = model_operations(recording)
    return [len(operations), _digest([list(each) for each in operations])]


def _digest(value: Any) -> str:
    """Returns eight digits that two equal values share, for readings that are too long to be stored."""
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def versions() -> dict[str, str]:
    """Returns the versions of the libraries whose operations and code a recording holds."""
    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def layer_calls(rows: Sequence[Sequence[Any]]) -> tuple[LayerCall, ...]:
    """Returns the layer calls that were stored as rows."""
    return tuple(
        replace(LayerCall(*row), outer_args=tuple(row[LayerCall.__match_args__.index("outer_args")]))
        for row in rows
    )


def to_text(readings: Mapping[str, Mapping[str, Reading]]) -> str:
    """Returns the JSON text of what was read, one reading per line."""
    families = []
    for name, each in readings.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in each.items())
        families.append(f"{json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(f" {family}" for family in families) + "\n}\n"
