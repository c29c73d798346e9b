"""Text from a model in training: repeatable, limited to its context, harmless on a terminal."""

import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.data.tokenizer import make_tokenizer
from meshwright.run.training.sample_text import sample_text
from tests.run.data.corpora import tokenizer
from tests.tiny_model import tiny_job


class Successor(nn.Module):
    """Says that each byte is followed by the next one; remembers how much it was shown."""

    def __init__(self, step: int = 1, sharpness: float = 50.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(sharpness))
        self.step, self.seen = step, []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append((input_ids.shape[1], self.training))
        return self.scale * nn.functional.one_hot((input_ids + self.step) % 256, 256)


def text_of(model: Successor, *prompt: object, training: bool = True, **how: object) -> tuple[str, list]:
    """The text, and what the model was shown for it."""
    ids = torch.zeros(2, 5, dtype=torch.int64)
    analyzed = analyze(model, {"input_ids": ids, "labels": ids})
    with parallelize(analyzed, make_plan(analyzed, tiny_job(), Mesh(), (), 2)) as trainer:
        module = trainer.module.train(training)
        module.seen.clear()
        text = sample_text(trainer, *prompt, **how)
        assert module.training is training
        return text, module.seen


def test_the_prompt_is_continued_by_what_the_model_says():
    assert text_of(Successor(), "ab", 4, context=8, seed=0)[0] == "abcdef"


def test_the_model_sees_its_context_and_is_left_in_its_mode():
    for training in (True, False):
        text, seen = text_of(Successor(), "abc", 5, context=4, seed=0, training=training)
        assert text == "abcdefgh"
        assert seen == [(3, False), (2, False), (3, False), (2, False), (3, False)]


def test_the_seed_decides_the_text():
    texts = [text_of(Successor(sharpness=0.0), "x", 40, context=4, seed=seed)[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_tokenizer_turns_the_tokens_into_text(tmp_path):
    codec = make_tokenizer(tokenizer(tmp_path))
    (start,) = codec.encode(["a"])[0].tolist()
    text, _ = text_of(Successor(), "a", 3, context=4, seed=0, tokenizer=codec)
    assert text == codec.decode([start, start + 1, start + 2, start + 3])
    assert text_of(Successor(), "", 1, context=4, seed=0, tokenizer=codec)[0].startswith("\n")


def test_an_empty_prompt_begins_a_line():
    assert text_of(Successor(step=87), "", 1, context=4, seed=0)[0] == "\na"


def test_control_characters_and_broken_utf8_are_shown_as_replacements():
    text, _ = text_of(Successor(), "", 255, context=4, seed=0)
    assert text[0] == "\n"
    assert "\x1b" not in text
    assert all(letter.isprintable() or letter in "\n\t" for letter in text)
    assert ' !"#' in text
    assert "\ufffd" in text
