"""fp8: linear layers of blocks multiply in float8, by torchao; parameters, gradients and states stay wide.

Why it works: a tensor core multiplies float8 at twice the speed of bfloat16. Eight bits hold a number to 1/16
(e4m3) or 1/8 (e5m2), if it is in their range; so each operand is first multiplied by a scale that takes its
largest magnitude to the end of the range. Errors of single numbers are rounding noise, and average out in a
sum of thousands of products, which is added up in more bits.

    F   x  --- scale, cast ---> x8 --+
        w  --- scale, cast ---> w8 --+--> y  = x8 w8^T / scales       w: the parameter, as it was
    B   dy --- scale, cast ---> dy8 -+--> dx = dy8 w8 / scales
        x  --- scale, cast ---> x8 --+--> dw = dy8^T x8 / scales      "rowwise_with_gw_hp": dy^T x

    scale = largest of float8 / max |t|       t: all of the tensor (tensorwise), or one row of it (rowwise)

    recipe                  scales                        products in float8      max |t| is over
    tensorwise              one per tensor                y, dx, dw               the microbatch of a rank
    rowwise                 one per row of an operand     y, dx, dw               a token; in dw: a feature of
                                                                                  the microbatch of a rank
    rowwise_with_gw_hp      as rowwise, w in dx: one      y, dx                   a token

Casts, scales and products are torchao's (`matmul_with_hp_or_float8_args`, under torchao's names of recipes):
this file says which layers call it. Weights are the parameters themselves, cast at each use: what ZeRO
gathers, `ddp` sums, an optimizer steps, and a checkpoint or an export holds is as it was without fp8.

`layers` selects by patterns of module names ("model.layers.*.mlp.*"; by default all) among linear layers
between the embedding and the head, and `exclude` leaves some of those out. Not selected are the head, experts
in one weight, layers of classes of their own, and layers whose weight something else reads.

Definition: the same layers in fp8 on one device. With "rowwise_with_gw_hp" the scales of a token are its own,
so any division of the batch computes the same. With the others each microbatch of each rank has scales of its
own: one device that takes the microbatches one after the other. `verify` plays that, to 1e-10: in float64 the
casts are torchao's, and products of the float8 values are taken in float64. `verify --curve` compares a run
with one without fp8.

Tolerance: of a cast, relative: 2^-4 (e4m3), 2^-3 (e5m2), and of numbers far below the largest that shares a
scale, 2^-10 / 448 of that.
Cost: no bytes sent. Casts read each operand twice: compiled (`compile`) they are fused with what is around
them, uncompiled they cost more than the products gain. Beside what is kept for the backward, which is as
without fp8, float8 copies of the operands of one product: 1 byte per element. Seconds that `plan` predicts
are those of the compute dtype.
Limits: both sizes of a layer are multiples of 16, as of the kernels; a GPU has float8 from compute capability
8.9 on, and none has run it yet. On a CPU torchao emulates: values are rounded to float8 and multiplied in
float32, so a curve can be seen there, and no speed. A rerun of activation_checkpointing computes its last
product too. Refused: tensor parallelism, as slices have other scales than the whole weight; zero bubble
schedules, as the backward of a product is one function; tiled_mlp and context parallelism, whose tokens are
parts of a microbatch (the latter goes with "rowwise_with_gw_hp"); gist; compute in float16.
Paper: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433; Or et al. 2025, "TorchAO:
PyTorch-Native Training-to-Serving Model Optimization", arXiv 2507.16099.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.device.local_device import float8_fault
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import Diagnostic, PlanError, suggest_name
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.model_spec import ModelSpec, ParamSpec
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.memory.early_stop import run_reruns_whole
from meshwright.plan.step.program import Program
from meshwright.plan.strategy_interface import Handler, Runtime, Strategy, StrategyPhase

LOCATION = "strategies.fp8"
MULTIPLE = 16  # of both sizes of a layer, for the kernels
RecipeName = Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"]
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
PER_TOKEN: RecipeName = "rowwise_with_gw_hp"  # whose scales of a token are its own
SLICED = "it slices layers over ranks, and a slice of a weight has other scales than the whole"


@dataclass(frozen=True)
class Float8Products(Strategy):
    """Multiplies in float8, by torchao and its `recipe`, in the linear layers between embedding and head that
    match one of `layers` (without `layers`: all), without those that match one of `exclude`.
    """

    name: ClassVar[str] = "fp8"
    phase: ClassVar[StrategyPhase] = "comm"  # once reruns of blocks are known
    exact: ClassVar[bool] = False
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tensor_parallel", "sequence_parallel", "vocab_parallel"), SLICED),
            "tiled_mlp": "a tile of tokens has other scales than the tokens of a microbatch",
            "gist": "casts to float8 enlarge what it rounds, beyond its tolerance",
        }
    )
    recipe: RecipeName = PER_TOKEN
    layers: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def check(self, job: Job, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if fault := torchao_fault():
            fix = 'install it: pip install "meshwright[fp8]"; or remove the strategy'
            yield Diagnostic(f"fp8 computes by torchao, {fault}", fix, LOCATION)
        if fault := float8_fault():
            yield Diagnostic(fault, "train on another device, or remove the strategy", LOCATION)
        if job.precision.compute == "float16":
            text = "fp8 with compute in float16, whose loss scale was not tried with scales of float8"
            yield Diagnostic(text, 'set precision.compute = "bfloat16"', LOCATION)
        yield from self._layer_diagnostics(sharding.model_spec)

    def check_combined(self, sharding: ShardingPlan) -> Iterator[Diagnostic]:
        if sharding.sequence_sharding is not None and self.recipe != PER_TOKEN:
            text = (
                f"{self.recipe} takes a scale over the tokens of a microbatch, and ranks along cp have parts"
            )
            yield Diagnostic(f"{text} of them", f'set recipe = "{PER_TOKEN}"', f"{LOCATION}.recipe")
        selected = set(self.selected(sharding.model_spec))
        for each in sharding.param_shardings:
            layer = next((layer for layer in each.param.layers if layer in selected), None)
            if layer is not None and each.sliced_dims:
                text = f"the weight of '{layer}' is sliced, and a slice has other scales than the whole"
                yield Diagnostic(text, "leave the layer out by `exclude`", f"{LOCATION}.exclude")
                return

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        if "W" in program.kinds:
            text = "the schedule splits backwards, and that of a product in float8 is one function"
            raise PlanError(text, fix='choose another schedule: "1f1b", say', location=LOCATION)
        weights = self.selected(view.model_spec).values()
        block_calls = {block_call for weight in weights for block_call in weight.block_calls}
        return program.edit(lambda actions: run_reruns_whole(actions, block_calls.__contains__))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        state = runtime.state
        if state.world.device.type != "cpu" and (fault := float8_fault()):  # planned on another host
            fix = "train on another device, or remove the strategy"
            raise PlanError(fault, fix=fix, location=LOCATION)
        forward = linear_forward(self.recipe, emulate=state.world.device.type == "cpu")
        for layer in self.selected(state.plan.view.model_spec):
            state.patches.replace_method(layer, forward)
        return {}

    def compute_on_one_device(self, module: nn.Module, model_spec: ModelSpec, micro_batch: int) -> None:
        forward = linear_forward(self.recipe, emulate=True)
        microbatches = _Microbatches(micro_batch)
        module.register_forward_pre_hook(microbatches.count_samples, with_kwargs=True)
        for name in self.selected(model_spec):
            layer = module.get_submodule(name)
            layer.forward = partial(microbatches.run, partial(forward, layer))

    def selected(self, model_spec: ModelSpec) -> dict[str, ParamSpec]:
        """Returns the weight of each layer that multiplies in float8, by the name of the layer."""
        return {
            name: weight
            for name, weight in hidden_layers(model_spec).items()
            if (not self.layers or _matches(name, self.layers)) and not _matches(name, self.exclude)
        }

    def _layer_diagnostics(self, model_spec: ModelSpec) -> Iterator[Diagnostic]:
        names, selected = hidden_layers(model_spec), self.selected(model_spec)
        for key, patterns in (("layers", self.layers), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    text = f"'{pattern}' matches no linear layer between embedding and head"
                    text += f" of {model_spec.name}, whose weight nothing else reads"
                    yield Diagnostic(text, suggest_name(pattern, names), f"{LOCATION}.{key}")
        if not selected:
            text = f"no linear layer of {model_spec.name} is selected; fp8 would change nothing"
            yield Diagnostic(text, "select some by `layers` and `exclude`, or remove the strategy", LOCATION)
        uneven = [name for name, weight in selected.items() if any(size % MULTIPLE for size in weight.shape)]
        if uneven:
            shape = " x ".join(map(str, selected[uneven[0]].shape))
            more = f", and {len(uneven) - 1} more" if len(uneven) > 1 else ""
            text = f"'{uneven[0]}' has a weight of {shape}{more}; sizes must be multiples of {MULTIPLE}"
            patterns = ", ".join(dict.fromkeys(f'"{LAYER_NUMBER.sub("*", name)}"' for name in uneven))
            yield Diagnostic(text, f"leave them out: exclude = [{patterns}]", f"{LOCATION}.exclude")


def hidden_layers(model_spec: ModelSpec) -> dict[str, ParamSpec]:
    """Returns the weight of each plain linear layer between embedding and head, by the name of the layer."""
    hidden = {layer: each for each in model_spec.params if each.is_hidden_matrix for layer in each.layers}
    return {name: hidden[name] for name in model_spec.linear_layers if name in hidden}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def torchao_fault() -> str:
    """Returns why torchao cannot compute here; "" if it can."""
    if find_spec("torchao") is None:
        return "which is not installed"
    try:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args  # noqa: F401
    except ImportError as error:
        return f"which does not import beside torch {torch.__version__}: {error}"
    return ""


def linear_forward(recipe: RecipeName, *, emulate: bool) -> FunctionType:
    """Returns the forward of linear layers in float8: of a layer and its input [..., in], [..., out]. With
    `emulate` operands are rounded, and multiplied in float32.
    """
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    products = Float8Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", config=config).linear_mm_config

    multiply_in_float64 = torch.compiler.disable(
        _multiply_in_float64, reason="it is between graphs of a block"
    )

    def multiply_in_float8(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))  # as in Float8Linear, on any device
        if x.dtype == torch.float64:  # verify, whose comparison to 1e-10 needs wider products than torchao's
            y = multiply_in_float64(x, layer.weight.t(), products, config)
        else:
            y = matmul_with_hp_or_float8_args.apply(x, layer.weight.t(), products, config)
        return y if layer.bias is None else y + layer.bias.to(y.dtype)

    return multiply_in_float8


def _multiply_in_float64(*args: Any) -> torch.Tensor:
    return _Float64Linear.apply(*args)


class _Float64Linear(torch.autograd.Function):
    """torchao's function, whose products are taken in float64 of the float8 values: the definition."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_t: torch.Tensor, products: Any, config: Any
    ) -> torch.Tensor:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        # verify runs models in a mode that widens float32, and casts to float8 are of float32
        with torch._C.DisableTorchFunction(), _Float64Products():
            return matmul_with_hp_or_float8_args.forward(ctx, x, weight_t, products, config)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        with torch._C.DisableTorchFunction(), _Float64Products():
            return matmul_with_hp_or_float8_args.backward(ctx, *grads)


class _Float64Products(TorchDispatchMode):
    """While active, products of float8 tensors of torchao are those of their values in float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and type(args[0]) is not torch.Tensor:
            return torch.mm(*(each.to_original_precision() for each in args))
        return func(*args, **(kwargs or {}))


class _Microbatches:
    """Runs layers of a model on one microbatch of `micro_batch` samples after the other, where the samples of
    all of them are along dim 0.
    """

    def __init__(self, micro_batch: int) -> None:
        self._micro_batch, self._num_samples = micro_batch, 0

    def count_samples(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes the samples of a forward of the model; a hook."""
        self._num_samples = len(tree_tensors((args, kwargs))[0])

    def run(self, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Returns `forward(x)`, with a microbatch at a time."""
        rows, rest = divmod(len(x), self._num_samples)
        if x.ndim < 2 or rest or not rows:
            return forward(x)
        return torch.cat([forward(each) for each in x.split(self._micro_batch * rows)])
