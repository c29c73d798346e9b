"""The sizes of a transformer: enough to plan for a model without its code or weights.

    "175b: layers 96 hidden 12288 heads 96"        a name, and sizes by their names
    defaults: ffn 4 x hidden, vocab 50304, sequence 2048, kv_heads = heads

Weights of a layer, h the hidden size, k / a the share of heads that keys and values have, f the FFN size:

    attention   h w (2 + 2 k / a)          MLP   2 h f,  or 3 h f with a gate (SwiGLU)

where w is the width of all heads together: h, unless `head` is wider or narrower than h / a. With experts
(E of them, each of FFN size e, k chosen for a token; shared ones of FFN size s together) and with latent
attention (MLA: queries through q, keys and values through c elements; d of a head without and r with
positions, v of its values):

    MLP         3 h s + E (3 h e + h)       of which a token passes 3 h s + k 3 h e + E h
    attention   h (q + c + r) + q a (d + r) + c a (d + v) + h a v

Shapes are coarser than the analysis of a model: no convolutions, all layers alike. If some layers have a
plain MLP instead of experts, each layer counts as the mean of both. A plan made from them says so.

Paper: latent attention and shared experts, DeepSeek-AI 2024, arXiv 2405.04434, section 2.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import inf

from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name

SHAPE_FORMAT = (
    '"NAME: layers 96 hidden 12288 heads 96", and if known kv_heads, head, ffn, vocab, sequence, gated, tied'
    ", experts, top_k, expert_ffn, shared_ffn, dense_layers, q_rank, kv_rank, rope_head, value_head"
)

EXPERT_SIZES = ("top_k", "expert_ffn", "shared_ffn", "dense_layers")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder.

    `gated`: the MLP has a gate; `tied`: the last matrix is the embedding; `ffn`, `kv_heads` 0: the default.
    `head`: the width of one attention head; 0: its share of the hidden size.

    `experts` of a layer (0: a plain MLP), each of FFN size `expert_ffn` (0: that of an MLP), `top_k` of them
    chosen for a token; `shared_ffn`: the FFN size of all shared experts together; `dense_layers`: layers with
    a plain MLP of size `ffn` instead. `kv_rank`: the width from which keys and values are made (0: plain
    attention), `q_rank` that of queries (0: the hidden size); then `head` is the part of a query's head
    without positions, `rope_head` the one with them, `value_head` the width of its values.
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
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_head: int = 0
    value_head: int = 0

    @property
    def head_dim(self) -> float:
        """The width of one head; of latent attention the mean of its keys and values."""
        each = self.head or self.hidden / self.heads
        return (each + self.rope_head + (self.value_head or each)) / 2 if self.kv_rank else each

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
    def mlp_dim(self) -> float:
        """The FFN size that every token of a layer passes: without the experts that are chosen for it."""
        if not self.experts:
            return self.ffn_dim
        return self.expert_layer_share * self.shared_ffn + (1 - self.expert_layer_share) * self.ffn_dim

    @property
    def expert_ffn_dim(self) -> int:
        """The FFN size of one expert."""
        return self.expert_ffn or self.ffn_dim

    @property
    def expert_layer_share(self) -> float:
        """The share of layers with experts."""
        return max(0, self.layers - self.dense_layers) / self.layers if self.experts else 0.0

    def latent_matrices(self, tp: int = 1) -> list[tuple[float, float]]:
        """Returns the matrices of latent attention, outputs and inputs, on one of `tp` ranks.

        A rank has its heads, and the narrow tensors whole.
        """
        a, each = self.heads / tp, self.head or self.hidden / self.heads
        values = self.value_head or each
        queries = [(self.q_rank, self.hidden)] if self.q_rank else []
        return [
            *queries,
            (a * (each + self.rope_head), self.q_rank or self.hidden),
            (self.kv_rank + self.rope_head, self.hidden),
            (a * (each + values), self.kv_rank),
            (self.hidden, a * values),
        ]

    @property
    def layer_numel(self) -> float:
        """The matrix elements of a layer, with all experts."""
        return self.layer_dense_numel + self.layer_expert_numel

    @property
    def layer_dense_numel(self) -> float:
        """The matrix elements of a layer without its experts."""
        if self.kv_rank:
            attention = float(sum(rows * columns for rows, columns in self.latent_matrices()))
        else:
            attention = self.hidden * self.attention_dim * (2 + 2 * self.num_kv_heads / self.heads)
        router = self.expert_layer_share * self.experts * self.hidden
        return attention + (self.num_up_projections + 1) * self.hidden * self.mlp_dim + router

    @property
    def layer_expert_numel(self) -> float:
        """The matrix elements of all experts of a layer."""
        return self.expert_layer_share * self.experts * self.expert_numel

    @property
    def expert_numel(self) -> float:
        """The matrix elements of one expert."""
        return (self.num_up_projections + 1) * self.hidden * self.expert_ffn_dim

    @property
    def embedding_numel(self) -> int:
        """The elements of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def numel(self) -> float:
        """All elements, without norms and biases (less than one in a thousand)."""
        return self.layers * self.layer_numel + self.embedding_numel * (1 if self.tied else 2)

    @property
    def active_numel(self) -> float:
        """The elements that compute for a token: `numel` without the experts that are not chosen for it."""
        unused = self.layers * self.layer_expert_numel
        return self.numel - unused * (1 - self.top_k / self.experts) if self.experts else self.numel

    def flops(self, num_tokens: float) -> float:
        """Returns the FLOPs of a step on `num_tokens`, forward and backward, as MFU counts them.

        6 per weight and token, of experts per chosen one, and attention without a causal discount.
        """
        layer = self.layer_dense_numel
        layer += self.layer_expert_numel * self.top_k / self.experts if self.experts else 0.0
        weights = self.layers * layer + self.embedding_numel
        return num_tokens * (6 * weights + 12 * self.layers * self.attention_dim * self.sequence)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields what is wrong with the sizes."""
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if not 0 < vars(self)[name] < inf:
                yield Diagnostic(
                    f"{name} is {vars(self)[name]}, and must be a whole number above 0",
                    f"write it: {SHAPE_FORMAT}",
                    self.name,
                )
        if self.heads > 0 and not self.head and self.hidden % self.heads:
            text = f"hidden {self.hidden} is not a multiple of heads {self.heads}"
            fix = "all heads have the same width: change one of the two, or write the width: head"
            yield Diagnostic(text, fix, self.name)
        if self.heads > 0 and self.kv_heads and (self.kv_heads > self.heads or self.heads % self.kv_heads):
            text = f"kv_heads {self.kv_heads} do not divide heads {self.heads}"
            yield Diagnostic(
                text, "each key/value head serves as many query heads: change one of the two", self.name
            )
        if self.experts and not 0 < self.top_k <= self.experts:
            text = f"top_k {self.top_k} of experts {self.experts}"
            yield Diagnostic(text, "a token goes to at least one of them, and to each once", self.name)
        if self.experts and not 0 <= self.dense_layers < self.layers:
            text = f"dense_layers {self.dense_layers} of layers {self.layers}, and experts {self.experts}"
            yield Diagnostic(
                text, "at least one layer has experts: leave experts out, or change one", self.name
            )
        if not self.experts and (given := [name for name in EXPERT_SIZES if vars(self)[name]]):
            text = f"{', '.join(given)} without experts"
            yield Diagnostic(text, "say how many there are in a layer: experts 64", self.name)


def parse_shape(text: str) -> ModelShape:
    """Returns the shape written in `text` (see the module).

    Raises PlanError with every word that is not understood and every size that is missing or wrong.
    """
    name, _, assignments = text.partition(":")
    assignments = re.sub(r"(?<=\d),(?=\d{3}\b)", "", assignments)  # 4,096 is a number
    words = assignments.lower().replace("=", " ").replace(",", " ").split()
    known = [field.name for field in fields(ModelShape) if field.name != "name"]
    diagnostics, sizes = [], {}
    while words:
        word = words.pop(0)
        if word in sizes:
            diagnostics.append(Diagnostic(f"{word} is given twice", "write it once", name))
        if word in ("gated", "tied"):
            sizes[word] = True
        elif word not in known:
            diagnostics.append(
                Diagnostic(f"'{word}' is not a size of a model", suggest_name(word, known), name)
            )
        elif not words or not _is_integer(words[0]):
            given = f", but '{words.pop(0)}'" if words and words[0] not in known else ""
            diagnostics.append(
                Diagnostic(
                    f"{word} without a whole number after it{given}", f"write it: {SHAPE_FORMAT}", name
                )
            )
        else:
            sizes[word] = int(words.pop(0))
    missing = [word for word in ("layers", "hidden", "heads") if word not in sizes]
    if missing:
        diagnostics.append(
            Diagnostic(f"no value for {', '.join(missing)}", f"write it: {SHAPE_FORMAT}", name)
        )
    if not diagnostics:
        shape = ModelShape(name.strip(), **sizes)
        diagnostics += shape.diagnostics()
        if not diagnostics:
            return shape
    raise PlanError.from_diagnostics(diagnostics)


def _is_integer(word: str) -> bool:
    return (
        word.replace("_", "").isdecimal()
        and not word.startswith("_")
        and not word.endswith("_")
        and "__" not in word
    )
