"""The samples of each rank: a step has the same samples under every plan, and each sample is read once per
epoch.
"""

from collections import Counter

import pytest
import torch

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.data.byte_text import TextDataset
from meshwright.run.data.data_loader import (
    ExampleDataset,
    LocalBatches,
    count_tokens,
    open_dataset,
    open_local_batches,
)
from meshwright.run.data.documents_to_samples import PackedTexts
from meshwright.run.data.token_dataset import TokenCount
from tests.paper_model import SyntheticModel
from tests.run.data.corpora import jsonl

BATCH, ROWS = 12, 31
EXAMPLE = {"x": torch.arange(ROWS * 2.0).view(ROWS, 2), "labels": torch.arange(ROWS)}


def plan(ranks: int, micro_batch: int = 0, epochs: int = 0) -> Plan:
    job = Job(
        ModelConfig("model.py:f"), DataConfig("example", epochs=epochs), TrainConfig(batch=BATCH, seed=5)
    )
    strategies = (BatchSplit(), DDP()) if ranks > 1 else ()
    return Plan.make(job, Mesh(dp_replicate=ranks), SyntheticModel().model_spec, strategies, micro_batch)


def test_tokens_and_labels_of_an_example_batch_are_counted_where_each_token_has_a_label():
    ids = torch.ones(2, 5, dtype=torch.long)
    labels, mask = ids.clone(), ids.clone()
    labels[0, :4], mask[1, 3:] = -100, 0
    tokens = {"input_ids": ids, "labels": labels}
    assert count_tokens(ExampleDataset(tokens)) == TokenCount(10, 10, 6)
    assert count_tokens(ExampleDataset({**tokens, "attention_mask": mask})) == TokenCount(10, 8, 6)
    assert count_tokens(ExampleDataset({**tokens, "labels": torch.tensor([0, 1])})) is None
    assert count_tokens(ExampleDataset(EXAMPLE)) is None


def batches_by_rank(ranks: int, micro_batch: int = 0, epochs: int = 0) -> list[LocalBatches]:
    made = plan(ranks, micro_batch, epochs)
    return [open_local_batches(ExampleDataset(EXAMPLE), made, rank) for rank in range(ranks)]


def played(rows: list[dict[str, torch.Tensor] | None]) -> list[int]:
    """The samples that all ranks play in one step."""
    return sorted(sample for batch in rows if batch is not None for sample in batch["labels"].tolist())


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 5 - 1), (2, 0), (2, 3), (3, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("step", [0, 1, 2, 7, 1000])
def test_a_step_has_the_same_samples_under_every_plan(ranks, micro_batch, step):
    mine = played([local_batches.batch(step) for local_batches in batches_by_rank(ranks, micro_batch)])
    assert mine == played([batches_by_rank(1)[0].batch(step)])
    assert len(mine) == BATCH


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("epochs", [1, 2])
def test_finite_data_is_played_to_the_end_each_sample_once_per_epoch(ranks, epochs):
    each = batches_by_rank(ranks, epochs=epochs)
    (steps,) = {local_batches.num_steps for local_batches in each}
    assert steps == -(-ROWS * epochs // BATCH)
    counts = Counter(
        sample
        for step in range(steps)
        for sample in played([local_batches.batch(step) for local_batches in each])
    )
    assert counts == dict.fromkeys(range(ROWS), epochs)
    assert (
        len(played([local_batches.batch(steps - 1) for local_batches in each]))
        == ROWS * epochs - (steps - 1) * BATCH
    )
    assert [local_batches.batch(steps) for local_batches in each] == [None] * ranks


def test_size_errors_are_reported_with_those_of_the_source_and_before_tokenizing(tmp_path):
    odd = Diagnostic("too many tokens", "take fewer")
    rows = jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(PlanError, match="too many tokens"):
        open_dataset(DataConfig(rows), None, tmp_path / "cache", lambda tokenizer: [odd])
    assert not (tmp_path / "cache").exists()
    with pytest.raises(PlanError) as caught:
        open_dataset(
            DataConfig(str(tmp_path / "none.jsonl")), None, tmp_path / "cache", lambda tokenizer: [odd]
        )
    assert [fault.problem for fault in caught.value.diagnostics] == [
        "too many tokens",
        "there is no such file or folder",
    ]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_data_is_over_after_its_last_step(epochs):
    local_batches = batches_by_rank(3, epochs=epochs)[1]
    assert [
        local_batches.has_ended(step) for step in (0, local_batches.num_steps - 1, local_batches.num_steps)
    ] == [False, False, True]
    assert not batches_by_rank(1)[0].has_ended(10**6)


def test_data_without_end_has_no_last_step():
    assert batches_by_rank(2)[0].num_steps is None


def test_a_short_step_fills_the_first_micro_batches_first():
    """31 rows in steps of 12: the third step has 7. Four shares of 3: two ranks, two microbatches."""
    order = batches_by_rank(1, epochs=1)[0].batch(2)
    assert order is not None
    samples = order["labels"].tolist()
    left, right = (local_batches.batch(2) for local_batches in batches_by_rank(2, 3, epochs=1))
    assert left is not None
    assert right is not None
    assert left["labels"].tolist() == [*samples[0:3], samples[6]]
    assert right["labels"].tolist() == samples[3:6]


def test_samples_keep_all_their_keys():
    batch = batches_by_rank(3)[1].batch(4)
    assert batch is not None
    assert torch.equal(batch["x"], EXAMPLE["x"][batch["labels"]])


def test_the_digest_of_an_example_names_its_content():
    changed = {**EXAMPLE, "x": EXAMPLE["x"].clone()}
    assert ExampleDataset(changed).digest == ExampleDataset(EXAMPLE).digest
    changed["x"][3, 1] += 1
    others = [
        changed,
        {"x": EXAMPLE["x"]},
        {**EXAMPLE, "x": EXAMPLE["x"].double()},
        {**EXAMPLE, "x": EXAMPLE["x"].view(2, ROWS)},
    ]
    assert len({ExampleDataset(other).digest for other in [EXAMPLE, *others]}) == 5


def test_a_source_is_opened_as_what_it_is(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    assert isinstance(open_dataset(DataConfig(str(tmp_path)), None), TextDataset)
    assert isinstance(
        open_dataset(DataConfig(jsonl(tmp_path / "a.jsonl", [{"text": "x"}])), None, tmp_path / "cache"),
        PackedTexts,
    )
    assert isinstance(open_dataset(DataConfig("example"), EXAMPLE), ExampleDataset)
    with pytest.raises(ValueError, match="has to be tokenized, and no folder was given"):
        open_dataset(DataConfig(str(tmp_path / "a.jsonl")), None)
    with pytest.raises(
        PlanError, match=r"the model comes without an example batch(.|\n)*return meshwright.Model"
    ):
        open_dataset(DataConfig("example"), None)
