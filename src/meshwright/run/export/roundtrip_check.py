"""Compares an exported folder with the model here: the same tokens through both, and the largest difference
of the logits.

Both compute in float32 on the CPU. If the folder has a narrower dtype, the values here are rounded to it
first, so the tolerance stays small; the difference that rounding itself makes is reported too. Only one of
the two models is in memory at a time. A model whose inputs are unknown (audio, several modalities) is
compared tensor by tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging as transformers_logging

from meshwright.model.hf.declared_tp_plan import is_transformers_model
from meshwright.model.hf.hub import resolve_path
from meshwright.model.hf.peft_name_map import import_peft
from meshwright.model.loading.deferred_init import DeferredInit
from meshwright.model.loading.loader import load_model
from meshwright.model.loading.safetensors_reader import list_tensors, read_tensor
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig

NUM_SAMPLES, NUM_TOKENS = 2, 8
TOLERANCE = (
    1e-6  # of float32 logits whose largest is at most 1; larger ones carry their rounding in proportion
)

ReadValue = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class RoundTripResult:
    """The result of a round trip: what was compared, the largest difference and the tolerance;
    `rounding_difference` is the effect of a narrower dtype.
    """

    description: str
    max_difference: float
    tolerance: float
    rounding_difference: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        rounded = (
            ""
            if self.rounding_difference is None
            else f"; rounding changed them by {self.rounding_difference:.2g}"
        )
        return (
            f"{self.description} differ by {self.max_difference:.2g} at most (allowed: "
            f"{self.tolerance:.2g}){rounded}"
        )


def compare_logits(
    deferred_init: DeferredInit, read_value: ReadValue, folder: Path, dtype: torch.dtype | None = None
) -> RoundTripResult:
    """Compares the transformers model with the values `read_value(name)` with the model that transformers
    loads from `folder`.

    `dtype` is the dtype to which the folder's floating-point tensors were rounded; None: they were not.
    """
    module = deferred_init.instantiate()
    inputs = probe_inputs(module)
    if inputs is None:
        theirs = dict(_load_with_transformers(type(module), folder).state_dict())
        rounded = {name: read_value(name) for name in deferred_init.logical_params}
        pairs = ((_round_to(mine, dtype).float(), theirs[name].float()) for name, mine in rounded.items())
        return RoundTripResult(
            "all parameters", max((_distance(mine, other) for mine, other in pairs), default=0.0), 0.0
        )
    load_values(module, deferred_init, read_value)
    exact = _outputs(module, inputs)
    mine, rounding = exact, None
    if dtype is not None and dtype.itemsize < 4:
        for parameter in module.parameters():  # its memory may be that of the model in training
            parameter.data = _round_to(parameter.detach(), dtype)
        mine = _outputs(module, inputs)
        rounding = _distance(exact, mine)
    kind = type(module)
    del module
    other = _outputs(_load_with_transformers(kind, folder), inputs)
    scale = max(1.0, mine.abs().max().item()) if mine.numel() else 1.0
    bound = TOLERANCE * scale if isfinite(scale) else 0.0
    return RoundTripResult(
        f"the outputs for {NUM_SAMPLES} x {NUM_TOKENS} tokens", _distance(mine, other), bound, rounding
    )


def compare_adapter(
    deferred_init: DeferredInit,
    read_value: ReadValue,
    folder: Path,
    dtype: torch.dtype | None,
    names: Mapping[str, str],
) -> RoundTripResult:
    """Compares the adapted model with the values `read_value(name)` with its base plus the adapter that peft
    loads.

    `names` maps the adapter's tensors in the file to names here. The base has the values of the model here,
    but zeros for the adapter's tensors.
    """
    module: Any = deferred_init.instantiate()
    inputs = probe_inputs(module.get_base_model()) if is_transformers_model(module.get_base_model()) else None
    brought = set(names.values())
    mine = rounding = None
    if inputs is not None:
        load_values(module, deferred_init, read_value)
        exact = _outputs(module, inputs)
        load_values(
            module,
            deferred_init,
            lambda name: _round_to(read_value(name), dtype if name in brought else None),
        )
        mine = _outputs(module, inputs)
        rounding = None if dtype is None or dtype.itemsize >= 4 else _distance(exact, mine)
    del module
    bare: Any = deferred_init.instantiate()
    load_values(
        bare,
        deferred_init,
        lambda name: torch.zeros_like(read_value(name)) if name in brought else read_value(name),
    )
    adapter = next(iter(bare.peft_config))
    theirs = import_peft().PeftModel.from_pretrained(bare.unload(), str(folder), adapter, torch_device="cpu")
    if mine is None or inputs is None:
        state = theirs.state_dict()
        pairs = ((_round_to(read_value(name), dtype).float(), state[name].float()) for name in brought)
        return RoundTripResult(
            "the tensors of the adapter", max((_distance(*pair) for pair in pairs), default=0.0), 0.0
        )
    other = _outputs(theirs, inputs)
    scale = max(1.0, mine.abs().max().item()) if mine.numel() else 1.0
    bound = TOLERANCE * scale if isfinite(scale) else 0.0
    return RoundTripResult(
        f"the outputs for {NUM_SAMPLES} x {NUM_TOKENS} tokens", _distance(mine, other), bound, rounding
    )


def compare_files(folder: Path, dtypes: Mapping[str, torch.dtype], read_value: ReadValue) -> RoundTripResult:
    """Compares the tensors in the files of `folder` with `read_value(name)` in the dtype of each; every bit
    must agree.
    """
    stored = list_tensors(folder)
    wrong = [name for name, dtype in dtypes.items() if name not in stored or stored[name].dtype != dtype]
    worst = max(
        (
            _distance(read_tensor(stored[name], dtype).double(), read_value(name).to("cpu", dtype).double())
            for name, dtype in dtypes.items()
            if name not in wrong
        ),
        default=0.0,
    )
    return RoundTripResult(f"{len(dtypes)} tensors read back", worst if not wrong else float("inf"), 0.0)


def check_import(source: ModelConfig) -> tuple[RoundTripResult, int]:
    """Compares the model that `source.weights` gives here with the one transformers loads; returns the
    result and the parameter count.

    Raises PlanError when the weights do not fit, or the model is not one of transformers.
    """
    loaded = load_model(source, seed=0)
    module = loaded.deferred_init.instantiate()
    if not is_transformers_model(module):
        text = f"'{source.source}' builds a {type(module).__name__}, which is not a transformers model"
        raise PlanError(
            text,
            fix="compare with your own loading; model.weights takes it as it is",
            location="model.source",
        )
    folder = resolve_path(source.weights, source, "model.weights")
    numel = sum(torch.Size(entry.shape).numel() for entry in loaded.deferred_init.logical_params.values())

    def initial(name: str) -> torch.Tensor:
        return (
            loaded.deferred_init.initial_value(name)
            if name in loaded.deferred_init.logical_params
            else module.get_buffer(name)
        )

    return compare_logits(loaded.deferred_init, initial, folder), numel


def probe_inputs(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """Returns a small input batch for a transformers model of text or images; None for any other model."""
    model: Any = module
    config = model.config
    config_values, text = config.to_dict(), config.get_text_config()
    vocabulary = text.to_dict().get(text.attribute_map.get("vocab_size", "vocab_size"))
    if model.main_input_name == "input_ids" and isinstance(vocabulary, int) and config is text:
        tokens = (
            torch.arange(NUM_SAMPLES * NUM_TOKENS)
            .mul(7)
            .add(3)
            .remainder(vocabulary)
            .view(NUM_SAMPLES, NUM_TOKENS)
        )
        return {"input_ids": tokens} | (
            {"decoder_input_ids": tokens.flip(1)} if config_values.get("is_encoder_decoder") else {}
        )
    size, channels = config_values.get("image_size"), config_values.get("num_channels", 3)
    if model.main_input_name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        return {
            "pixel_values": torch.linspace(-1, 1, NUM_SAMPLES * channels * size * size).view(
                NUM_SAMPLES, channels, size, size
            )
        }
    return None


def load_values(module: nn.Module, deferred_init: DeferredInit, read_value: ReadValue) -> None:
    """Gives `module` (an instance) the values, in float32: the memory of those that are in float32."""
    for first, entry in deferred_init.logical_params.items():
        mine = read_value(first)
        parameter = nn.Parameter(
            mine.to("cpu", torch.float32 if mine.is_floating_point() else mine.dtype), requires_grad=False
        )
        for name in (first, *entry.aliases):
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._parameters[leaf] = parameter
    stored = set(deferred_init.logical_params) | {
        alias for entry in deferred_init.logical_params.values() for alias in entry.aliases
    }
    for name in module.state_dict().keys() - stored:
        module.get_buffer(name).copy_(read_value(name))


def _load_with_transformers(kind: type[nn.Module], folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder) if kind.__name__ in dir(transformers) else None
    names = [] if config is None else config.architectures or [kind.__name__]
    loader: Any = getattr(transformers, names[0]) if names else kind
    with _hide_progress_bars():
        return loader.from_pretrained(folder, dtype=torch.float32)


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _outputs(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        made: Any = module.eval()(**inputs)
    return (made["logits"] if "logits" in made else made[0]).float()


def _round_to(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype).to(tensor.dtype)


def _distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    if mine.shape != other.shape:
        return float("inf")
    return (mine - other).abs().max().item() if mine.numel() else 0.0
