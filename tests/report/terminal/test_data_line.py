"""The data line of `plan` and `train`, and its warning."""

from dataclasses import replace

from meshwright.report.terminal.data_line import DataSummary, data_view

TEXT = DataSummary(
    "llama",
    8,
    num_samples=1105,
    num_tokens=70_720,
    padding=0.001,
    ignored=0.25,
    epochs=(0.0362,),
    num_candidates=1105,
)


def test_the_line_says_tokenizer_samples_tokens_epochs_padding_and_ignored_labels():
    assert data_view(TEXT).plain == (
        "data  tokenizer llama, 1,105 samples, 70,720 tokens, 0.0362 epochs, 0.1 % padding, "
        "25 % of labels ignored"
    )


def test_samples_that_are_held_out_are_counted_apart():
    assert "1,105 samples (20 more held out), " in data_view(replace(TEXT, num_held_out=20)).plain


def test_a_mixture_has_epochs_by_source():
    assert "0.1 to 3.25 epochs by source" in data_view(replace(TEXT, epochs=(0.1, 3.25, 2.0))).plain


def test_what_cannot_be_counted_is_left_out():
    stream = data_view(DataSummary("llama", 8)).plain
    assert stream == "data  tokenizer llama, a stream: its samples are not counted"
    example = DataSummary("", 8, num_samples=8, epochs=(5.0,), num_candidates=8)
    assert data_view(example).plain == "data  8 samples, 5 epochs"


def test_a_sample_that_is_repeated_within_a_batch_is_a_warning():
    assert "warning" not in data_view(TEXT).plain
    alone = data_view(replace(TEXT, num_samples=1, num_repeats=8, num_candidates=1)).plain.splitlines()
    assert alone[1] == (
        "warning: one sample occurs 8 times in a batch of 8, because its data has 1 sample; "
        "use more data, or a smaller train.batch"
    )
    mixed = data_view(replace(TEXT, epochs=(1.0, 9.0), num_repeats=2, num_candidates=3)).plain
    assert "because its source of the mixture has 3 samples" in mixed
