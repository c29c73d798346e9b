"""The sizes of a transformer: enough to plan for a model without its code or weights.

    "175b: layers 96 hidden 12288 heads 96"        a name, and sizes by their names
    defaults: ffn 4 x hidden, vocab 50304, sequence 2048, kv_heads = heads

Weights of a layer, h the hidden size, k / a the share of heads that keys and values have, f the FFN size:

    attention   h w (2 + 2 k / a)          MLP   2 h f,  or 3 h f with a gate (SwiGLU)

where w is the width of all heads together: h, unless `head` is wider or narrower than h / a.

Shapes are coarser than the analysis of a model: no convolutions, no experts, all layers alike. A plan made
from them says so.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import inf

from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name

SHAPE_FORMAT = (
    '"NAME: layers 96 hidden 12288 heads 96", and where you know them kv_heads, '
    "head, "
    "ffn, vocab, sequence, gated, tied"
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder.

    `gated`: the MLP has a gate; `tied`: the last matrix is the embedding; `ffn`, `kv_heads` 0: the default.
    `head`: the width of one attention head; 0: its share of the hidden size.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 50304
    sequence: int = 2048
    gated: bool = False
    tied: bool = False
    head: int = 0

    @property
    def head_dim(self) -> float:
        """The width of one head."""
        return self.head or self.hidden / self.heads

    @property
    def attention_dim(self) -> float:
        """The width of all heads together: of the queries, and of the attention output."""
        return self.heads * self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def ffn_dim(self) -> int:
        """The FFN size of one of its matrices."""
        return self.ffn or 4 * self.hidden

    @property
    def num_up_projections(self) -> int:
        """The number of MLP matrices from the hidden size to the FFN size."""
        return 2 if self.gated else 1

    @property
    def layer_numel(self) -> float:
        """The matrix elements of a layer."""
        attention = self.hidden * self.attention_dim * (2 + 2 * self.num_kv_heads / self.heads)
        return attention + (self.num_up_projections + 1) * self.hidden * self.ffn_dim

    @property
    def embedding_numel(self) -> int:
        """The elements of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def numel(self) -> float:
        """All elements, without norms and biases (less than one in a thousand)."""
        return self.layers * self.layer_numel + self.embedding_numel * (1 if self.tied else 2)

    def flops(self, num_tokens: float) -> float:
        """Returns the FLOPs of a step on `num_tokens`, forward and backward, as MFU counts them.

        6 per weight and token, and attention without a causal discount.
        """
        weights = self.layers * self.layer_numel + self.embedding_numel
        return num_tokens * (6 * weights + 12 * self.layers * self.attention_dim * self.sequence)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields what is wrong with the sizes."""
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if not 0 < vars(self)[name] < inf:
                yield Diagnostic(
                    f"{name} {vars(self)[name]}; needed is a whole number above 0",
                    f"write it: {SHAPE_FORMAT}",
                    self.name,
                )
        if self.heads > 0 and not self.head and self.hidden % self.heads:
            text = f"hidden {self.hidden} is no multiple of heads {self.heads}"
            yield Diagnostic(
                text, "every head has the same width: change one of the two, or say it: head", self.name
            )
        if self.heads > 0 and self.kv_heads and (self.kv_heads > self.heads or self.heads % self.kv_heads):
            text = f"kv_heads {self.kv_heads} do not divide heads {self.heads}"
            yield Diagnostic(
                text, "as many heads share each head of keys and values: change one of the two", self.name
            )


def parse_shape(text: str) -> ModelShape:
    """Returns the shape written in `text` (see the module).

    Raises PlanError with every word that is not understood and every size that is missing or wrong.
    """
    name, _, rest = text.partition(":")
    rest = re.sub(r"(?<=\d),(?=\d{3}\b)", "", rest)  # 4,096 is a number
    words = rest.lower().replace("=", " ").replace(",", " ").split()
    known = [field.name for field in fields(ModelShape) if field.name != "name"]
    faults, said = [], {}
    while words:
        word = words.pop(0)
        if word in said:
            faults.append(Diagnostic(f"{word} is said twice", "say it once", name))
        if word in ("gated", "tied"):
            said[word] = True
        elif word not in known:
            faults.append(Diagnostic(f"'{word}' is no size of a model", suggest_name(word, known), name))
        elif not words or not _is_integer(words[0]):
            given = f", but '{words.pop(0)}'" if words and words[0] not in known else ""
            faults.append(
                Diagnostic(
                    f"{word} without a whole number behind it{given}", f"write it: {SHAPE_FORMAT}", name
                )
            )
        else:
            said[word] = int(words.pop(0))
    missing = [word for word in ("layers", "hidden", "heads") if word not in said]
    if missing:
        faults.append(
            Diagnostic(f"nothing is said of {', '.join(missing)}", f"write it: {SHAPE_FORMAT}", name)
        )
    if not faults:
        shape = ModelShape(name.strip(), **said)
        faults += shape.diagnostics()
        if not faults:
            return shape
    raise PlanError.from_diagnostics(faults)


def _is_integer(word: str) -> bool:
    return (
        word.replace("_", "").isdecimal()
        and not word.startswith("_")
        and not word.endswith("_")
        and "__" not in word
    )
