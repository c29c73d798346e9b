"""The models of `random_plans`: unmodified classes of transformers in sizes that divide by hardly anything,
and for grids.

    llama, gpt2, t5      6 heads, 3 keys where keys are grouped, 61 words, a width of 29 between; 9 tokens (of
                         T5: 9 and 6)
    t5, alike            the same with 9 tokens on either side
    .., even             24 heads, 12 keys, 72 words: what grids of 2 x 2 and 3 x 3 ranks divide; 12 tokens
                         (of T5: 12 and 8)
    gpt2, dropout        the odd one, with masks; its head is its embedding, as in the others
    two inputs           CLIP: words and images, two chains that meet in the loss

Each has four layers (T5 two and two, CLIP two and two), so that a pipeline can have several parts. Of the
labels some count and some do not, in every row another number, and in every seventh row none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.pipeline.pipeline_models import Rows, clip, named
from benchmarks.tensor_parallel.tensor_families import model_of
from benchmarks.tensor_parallel.tensor_families import named as family_named
from meshwright.api import analyze
from meshwright.engine.runtime.loss import IGNORE_INDEX, Loss, token_cross_entropy
from meshwright.model.analysis.analyze import AnalyzedModel

WORDS = 61
LAYERS = {"num_hidden_layers": 4}
DROPS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@dataclass(frozen=True)
class Known:
    """One model: how it is made, its rows and loss, and what a drawer must know so as not to ask for what is
    plainly impossible.

    `tokens`: lengths that a strategy divides; `parts`: into how many it can be cut; `ranks`: among how many
    its heads can be dealt; `words`: whether table and head divide by words; `even`: whether squares and cubes
    divide it; `heads`: among how many tokens can be exchanged, 0 where those of a sample are not dealt out.
    """

    name: str
    make: Callable[[], nn.Module]
    rows: Callable[[int, torch.Generator], Rows]
    tokens: tuple[int, ...]
    parts: int
    ranks: int
    loss: Callable[[], Loss] = token_cross_entropy
    words: bool = True
    even: bool = False
    random: bool = False
    heads: int = 0

    def batches(self, count: int, rows: int) -> list[Rows]:
        """Global batches of random numbers, `rows` samples each."""
        generator = torch.Generator().manual_seed(0)
        return [self.rows(rows, generator) for _ in range(count)]


def _text(tokens: int, decoded: int, rows: int, generator: torch.Generator) -> Rows:
    """Rows of so many tokens; with `decoded`, those of a decoder too, whose labels they are."""
    drawn = {"input_ids": torch.randint(3, WORDS, (rows, tokens), generator=generator)}
    if decoded:
        drawn["decoder_input_ids"] = torch.randint(3, WORDS, (rows, decoded), generator=generator)
    labels = torch.randint(3, WORDS, (rows, decoded or tokens), generator=generator)
    for row in range(rows):
        labels[row, : labels.shape[1] if row % 7 == 3 else row % 4] = IGNORE_INDEX
    return {**drawn, "labels": labels}


def _odd(name: str, family: str, tokens: tuple[int, ...], *, random: bool = False, **more: Any) -> Known:
    decoded = tokens[1] if len(tokens) > 1 else 0
    make = partial(model_of, family_named(family), **more)
    return Known(name, make, partial(_text, tokens[0], decoded), tokens, 6, 6, random=random, heads=6)


def _even(family: str, tokens: tuple[int, ...], **more: Any) -> Known:
    decoded = tokens[1] if len(tokens) > 1 else 0
    make = partial(model_of, family_named(family), even=True, **more)
    heads = 24
    return Known(
        f"{family}, even", make, partial(_text, tokens[0], decoded), tokens, 6, 6, even=True, heads=heads
    )


KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        known.name: known
        for known in (
            _odd("llama", "llama", (9,), **LAYERS),
            _odd("gpt2", "gpt2", (9,), n_layer=4),
            _odd("gpt2, dropout", "gpt2", (9,), n_layer=4, random=True, **DROPS),
            _odd("t5", "t5", (9, 6), num_layers=2),
            _odd("t5, alike", "t5", (9, 9), num_layers=2),
            Known(
                "two inputs",
                partial(clip, 4),
                named("two inputs").rows,
                (8, 10),
                4,
                2,
                named("two inputs").loss,
                words=False,
            ),
            _even("llama", (12,), **LAYERS),
            _even("gpt2", (12,), n_layer=4),
            _even("t5", (12, 8), num_layers=2),
        )
    }
)


@cache
def reading_of(name: str) -> AnalyzedModel:
    """What the model of that name is made of, learnt from two rows."""
    known = KNOWN[name]
    transformers.utils.logging.set_verbosity_error()
    return analyze(known.make, known.batches(1, 2)[0], loss=known.loss())
