"""The model's own forward on the tokens that it has not seen, with its own cache of keys and values.

    prefill    [ - - p p p ]   mask 0 0 1 1 1   positions . . 0 1 2     cache: 5 columns
               [ p p p p p ]        1 1 1 1 1             0 1 2 3 4
    decode     [ a ]                0 0 1 1 1 1           3             cache: 6 columns
               [ a ]                1 1 1 1 1 1           5

Prompts of unlike length are padded on the left and masked; positions count what is not padding, so the
numbers of a row are those of its prompt alone. The cache is the one that the model makes: of what lies on
this rank. Under tensor parallelism it has the heads of this rank, in a pipeline the layers of its stages.

A module that is no transformers model, or has no cache, runs on all tokens each time; without a mask, on rows
of equal length.
"""

import inspect
from typing import Any

import torch
from torch import nn

from meshwright.engine.generation.stage_forwards import StageForwards
from meshwright.model.hf.declared_tp_plan import generation_model
from meshwright.model.loss.token_cross_entropy import get_logits
from meshwright.plan.job.errors import PlanError

CACHE, MASK, POSITIONS, LAST_ONLY = "past_key_values", "attention_mask", "position_ids", "logits_to_keep"
ROUTER_LOGITS = "output_router_logits"


class CachedForward:
    """The forwards of one batch of rows of `module`, which grow by a token each time; `stages` run the
    blocks of a pipeline.

    On a rank of a pipeline without the last stage, logits are NaN.
    """

    def __init__(self, module: nn.Module, stages: StageForwards | None = None) -> None:
        self._module, self._model, self._stages = module, generation_model(module), stages
        called = module if self._model is None else self._model
        self._arguments = frozenset(inspect.signature(type(called).forward).parameters)
        self._cache: Any = None

    @property
    def takes_mask(self) -> bool:
        """Whether rows of unlike length may be padded: where there is a cache of keys and values, attention
        reads the mask; recurrent models may take one and ignore it.
        """
        return self._uses_cache and MASK in self._arguments

    def next_logits(self, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        """Returns the logits behind the last token of each row, (rows, this rank's part of the vocabulary).

        Args:
            ids_BL: (rows, tokens), all tokens so far, padded on the left.
            mask_BL: (rows, tokens), 0 for padding and 1 for tokens.
        """
        inputs = self._inputs(ids_BL, mask_BL)
        if self._stages is not None:
            self._stages.begin(inputs["input_ids"])
        outputs = self._module(**inputs)
        if self._uses_cache:
            self._cache = outputs.past_key_values
        if self._stages is not None:
            self._stages.end(self._cache, ids_BL.shape[1])
        logits = get_logits(outputs)
        if logits.ndim != 3 or len(logits) != len(ids_BL):
            shape = f"of shape {list(logits.shape)} for {len(ids_BL)} samples"
            text = f"{type(self._module).__name__} returns logits {shape}; needed are [samples, tokens, "
            text += "vocabulary]"
            raise PlanError(text, fix="generate with a model that predicts each next token", location="model")
        return logits[:, -1]

    @property
    def cache_nbytes(self) -> int:
        """The bytes of keys and values that are cached on this rank."""
        layers = [] if self._cache is None else self._cache.layers
        return sum(
            each.nbytes for layer in layers for each in vars(layer).values() if isinstance(each, torch.Tensor)
        )

    @property
    def _uses_cache(self) -> bool:
        return self._model is not None and CACHE in self._arguments

    def _inputs(self, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> dict[str, Any]:
        if self._model is None:
            return {"input_ids": ids_BL}
        positions = (mask_BL.cumsum(1) - 1).clamp(min=0)
        # an auxiliary loss is that of a step, and expects router logits of as many tokens as the mask has
        more = {MASK: mask_BL, POSITIONS: positions, ROUTER_LOGITS: False, LAST_ONLY: 1}
        more["use_cache"] = self._uses_cache
        accepted = {name: value for name, value in more.items() if name in self._arguments}
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids_BL,
            next_sequence_length=None if self._cache is None else 1,
            past_key_values=self._cache,
            is_first_iteration=self._cache is None,
            **accepted,
        )
        return {name: value for name, value in prepared.items() if name in self._arguments}
