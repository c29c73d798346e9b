"""Small models of transformers with adapters of peft, shared by tests of adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import tqdm
import transformers
from torch import nn

from meshwright.api import analyze
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from tests.model.published_models import DECODER, published
from tests.tiny_model import token_samples

TARGETS = ["q_proj", "v_proj", "down_proj"]
# peft 0.21 asks transformers 5.23 by a name that is going
QUIET = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

tqdm.tqdm.monitor_interval = 0  # the bar that peft does not show would leave a thread behind


def base(**changes: object) -> nn.Module:
    """A Llama (or another `family`) of some thousand parameters, as its constructor leaves it."""
    fields: dict[str, Any] = {**DECODER, "use_cache": False, **changes}
    config = transformers.CONFIG_MAPPING[fields.pop("family", "llama")](**fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=fields.get("dtype", torch.float32))


def adapted(config: dict[str, object] | None = None, **lora: object) -> Callable[[], nn.Module]:
    """A factory of that Llama (`config` changes it) with low-rank adapters."""
    options = {"r": 3, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **lora}
    return lambda: peft.get_peft_model(base(**(config or {})), peft.LoraConfig(**options))


def adapted_reading(
    config: dict[str, object] | None = None, weights: Path | None = None, **lora: object
) -> AnalyzedModel:
    """Returns the analysis of `adapted`, on samples of `tests.tiny_model`; its base from `weights`."""
    return analyze(
        adapted(config, **lora),
        token_samples(2),
        loss=token_cross_entropy(),
        weights="" if weights is None else str(weights),
    )


def stored_base(folder: Path, **changes: object) -> nn.Module:
    """The same Llama as transformers has written it into `folder`, with other values."""
    return published(folder, **changes)


def stirred(module: nn.Module, seed: int = 4) -> nn.Module:
    """`module` with random B in its adapters, so that A has a gradient and the logits depend on it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module
