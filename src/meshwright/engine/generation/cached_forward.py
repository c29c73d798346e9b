"""The model's own forward on the tokens that it has not seen, with its own cache of keys and values.

    prefill    [ - - p p p ]   mask 0 0 1 1 1   positions . . 0 1 2     cache: 5 columns
               [ p p p p p ]        1 1 1 1 1             0 1 2 3 4
    decode     [ a ]                0 0 1 1 1 1           3             cache: 6 columns
               [ a ]                1 1 1 1 1 1           5

Prompts of unlike length are padded on the left and masked; positions count what is not padding, so the
numbers of a row are those of its prompt alone. The cache is the one that the model makes: of what lies on
this rank. Under tensor parallelism it has the heads of this rank, in a pipeline the layers of its stages.

A module that is no transformers model, or has no cache, runs on all tokens each time, and so does a pipeline
whose stages take slices of features (2-D tensor parallelism). Without a mask, or with
recurrent states, which padding would change, prompts of a forward have equal length.
"""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from meshwright.engine.generation.decode_context_parallel import CacheDivision
from meshwright.engine.generation.kv_cache import caches_keys_and_values, can_join
from meshwright.engine.generation.stage_forwards import StageForwards
from meshwright.model.hf.declared_tp_plan import generation_model
from meshwright.model.loss.token_cross_entropy import get_logits
from meshwright.plan.job.errors import PlanError

CACHES = "past_key_values", "cache_params"  # an argument and an output of the forward, of the same name
MASK, POSITIONS, LAST_ONLY = "attention_mask", "position_ids", "logits_to_keep"
ROUTER_LOGITS = "output_router_logits"


class CachedForward:
    """Forwards of `module` on batches of rows; `stages` run the blocks of a pipeline, and `division` divides
    the cache over ranks. Without `keeps_cache` each runs on all tokens.

    On a rank of a pipeline without the last stage, logits are NaN.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: StageForwards | None = None,
        division: CacheDivision | None = None,
        *,
        keeps_cache: bool = True,
    ) -> None:
        self._division = division
        self._module, self._model, self._stages = module, generation_model(module), stages
        called = module if self._model is None else self._model
        self._arguments = frozenset(inspect.signature(type(called).forward).parameters)
        has_cache = keeps_cache and self._model is not None
        known = [name for name in CACHES if has_cache and name in self._arguments]
        self._cache_name = known[0] if known else ""
        # attention reads the mask of padding; recurrent models may take one and ignore it
        self.takes_padding = bool(known) and MASK in self._arguments and caches_keys_and_values(module)

    def next_logits(
        self, ids_BL: torch.Tensor, mask_BL: torch.Tensor, cache: Any = None, running: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """Returns the logits behind the last token of each row, (rows, this rank's part of the vocabulary),
        and the cache of all tokens; None where rows of other forwards cannot join it.

        Args:
            ids_BL: (rows, tokens), all tokens so far, padded on the left.
            mask_BL: (rows, tokens), 0 for padding and 1 for tokens.
            cache: that of all tokens but the last; None for a prefill.
            running: the cache that the sequences of a prefill will join; None: they are alone.
        """
        inputs = self._inputs(ids_BL, mask_BL, cache)
        if self._division is not None and cache is None:
            inputs[self._cache_name] = self._division.empty_cache(ids_BL.shape[1], running)
        elif self._division is not None:
            self._division.add_column(cache)
        if self._stages is not None:
            self._stages.begin(inputs["input_ids"])
        with nullcontext() if self._division is None else self._division.forward():
            outputs = self._module(**inputs)
        if self._cache_name:
            cache = outputs[self._cache_name]
        if self._stages is not None:
            self._stages.end(cache, ids_BL.shape[1])
        logits = get_logits(outputs)
        if logits.ndim != 3 or len(logits) != len(ids_BL):
            shape = f"of shape {list(logits.shape)} for {len(ids_BL)} samples"
            text = f"{type(self._module).__name__} returns logits {shape}; needed are [samples, tokens, "
            text += "vocabulary]"
            raise PlanError(text, fix="generate with a model that predicts each next token", location="model")
        return logits[:, -1], cache if can_join(cache) else None

    def _inputs(self, ids_BL: torch.Tensor, mask_BL: torch.Tensor, cache: Any) -> dict[str, Any]:
        if self._model is None:
            return {"input_ids": ids_BL}
        positions = (mask_BL.cumsum(1) - 1).clamp(min=0)
        # an auxiliary loss is that of a step, and expects router logits of as many tokens as the mask has
        more = {MASK: mask_BL, POSITIONS: positions, ROUTER_LOGITS: False, LAST_ONLY: 1}
        more["use_cache"] = bool(self._cache_name)
        accepted = {name: value for name, value in more.items() if name in self._arguments}
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids_BL,
            next_sequence_length=None if cache is None else 1,
            is_first_iteration=cache is None,
            **{self._cache_name or CACHES[0]: cache},
            **accepted,
        )
        return {name: value for name, value in prepared.items() if name in self._arguments}
