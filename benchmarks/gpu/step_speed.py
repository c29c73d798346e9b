"""A step against plain and compiled PyTorch, with dropout against without, and in float8 against bfloat16, on
one GPU.

All loops train the same Llama on the same tokens with fused AdamW and clipping to norm 1. Plain loops have
parameters in float32 and compute under autocast; ours too, and with bfloat16 parameters and float32 masters.
At the end plain PyTorch, ours and plain PyTorch once more take steps in turn: the ratio, and its noise.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from math import isfinite
from typing import get_args

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.gpu.device_trace import MAX_PLACES, trace_device
from benchmarks.gpu.llamas import AUTOCAST, BF16, FP32, LlamaSize, make_llama_plan, open_trainer
from benchmarks.gpu.setting import Setting, clear_memory, seconds_of
from benchmarks.harness.interleaved_timing import Window, compare, measure
from benchmarks.harness.rank_processes import InProcess
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.device.device_streams import synchronize
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.memory.compiled_blocks import CompiledBlocks
from meshwright.parallel.precision.fp8 import Float8Products, RecipeName, torchao_fault
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig

LARGE = LlamaSize(1536, 16, 12, 32000, 4, 2048)  # 550 M parameters
TINY = LlamaSize(48, 2, 4, 64, 2, 16)
GPT2_BATCH, GPT2_TOKENS, DROPOUT = 8, 512, 0.1
WIDE = LlamaSize(4096, 2, 32, 32000, 4, 2048)  # products large enough for float8 to gain

FP32_LOOPS = ("plain fp32", "meshwright fp32")  # slow, and steady
PAIR = ("plain autocast", "meshwright autocast")
ROUNDS, TINY_ROUNDS = Window(limit_s=25.0, threshold=1.0), Window(clean=2, most=4, threshold=64.0, warmup=1)
RATIO_BAR = 1.03  # of plain PyTorch

Step = Callable[[], object]


def speed(setting: Setting) -> dict[str, object]:
    """Returns seconds, tokens per second and the trace of one step of every loop."""
    size = setting.size(LARGE, TINY)
    rows: dict[str, dict[str, object]] = {}
    for name, make in _loops(size, setting).items():
        clear_memory(setting.device)
        try:
            step = make()
            repeats = setting.size(4 if name in FP32_LOOPS else 10, 2)
            seconds = seconds_of(step, setting.device, repeats, setting.size(3, 1))
            places = _waiting_places(step, setting.device)
            trace = trace_device(step, setting.device).as_dict()
            tokens_per_s = size.batch * size.sequence / seconds
            rows[name] = {"s": seconds, "tokens_per_s": tokens_per_s, **trace, "waits at": places}
        except RuntimeError as error:  # such as compile without a compiler: the other loops are measured
            rows[name] = {"error": str(error)[:500]}
        step = None
        setting.keep({"loops": rows})
    ok, in_turn = all("s" in row for row in rows.values()), _in_turn(size, setting)
    return {"ok": ok, "size": asdict(size), "loops": rows, "in turn": in_turn}


def _loops(size: LlamaSize, setting: Setting) -> dict[str, Callable[[], Step]]:
    def ours(precision: PrecisionConfig) -> Callable[[], Step]:
        return lambda: _ours(size, precision, setting.device)

    def plain(*, compiled: bool = False, half: bool = True) -> Callable[[], Step]:
        return lambda: _plain(size, setting.device, compiled=compiled, half=half)

    loops = {
        "plain autocast": plain(),
        "meshwright autocast": ours(AUTOCAST),
        "meshwright bf16 + fp32 master": ours(BF16),
        "plain autocast, blocks compiled": plain(compiled=True),
        "plain fp32": plain(half=False),
        "meshwright fp32": ours(FP32),
    }
    return setting.size(loops, {name: loops[name] for name in PAIR})


def _in_turn(size: LlamaSize, setting: Setting) -> dict[str, object]:
    """Returns the comparison of rounds of one step each: of plain PyTorch, of ours, and of plain again."""
    loops, (base, ours), twin = _loops(size, setting), PAIR, "plain autocast again"

    def waited(step: Step) -> Callable[[], None]:
        def run() -> None:
            step()
            synchronize(setting.device)

        return run

    clear_memory(setting.device)
    try:
        steps = {base: loops[base](), ours: loops[ours](), twin: loops[base]()}
        sides = [InProcess(name, waited(step)) for name, step in steps.items()]
        rounds = measure(sides, setting.size(ROUNDS, TINY_ROUNDS))
        return compare(rounds, ours, base=base, twin=twin, bar=RATIO_BAR, figure="wall_s").as_dict()
    except (RuntimeError, ValueError) as error:  # such as memory too small for three, or others' load
        return {"error": str(error)[:500]}


def _ours(size: LlamaSize, precision: PrecisionConfig, device: torch.device) -> Step:
    trainer = open_trainer(size, make_llama_plan(size, precision, micro_batch=size.batch), device)
    batch = trainer.local_batch(size.samples())
    return lambda: trainer.step(batch)


def _plain(size: LlamaSize, device: torch.device, *, compiled: bool, half: bool) -> Step:
    with device:
        model = size.make()
    if compiled:
        for layer in model.get_submodule("model.layers").children():
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = {name: value.to(device) for name, value in size.samples().items()}

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            logits = model(input_ids=batch["input_ids"]).logits
        F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _waiting_places(step: Step, device: torch.device) -> list[str]:
    """Returns the lines at which the host waited for the device, where torch tells them."""
    if device.type != "cuda":
        return []
    with _synchronization_warnings() as found:
        step()
    places = [f"{each.filename}:{each.lineno}" for each in found]
    return sorted({f"{place} x {places.count(place)}" for place in places})[:MAX_PLACES]


@contextmanager
def _synchronization_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def dropout(setting: Setting) -> dict[str, object]:
    """Returns seconds and launches of a step of GPT-2 with dropout and without."""
    seconds, traces = {}, {}
    for p in (DROPOUT, 0.0):
        step = _gpt2_step(p, setting)
        seconds[f"p = {p}"] = seconds_of(step, setting.device, setting.size(5, 1), 2)
        traces[f"p = {p}"] = trace_device(step, setting.device).as_dict()
        setting.keep({"s": seconds, "steps": traces})
    ratio = seconds[f"p = {DROPOUT}"] / seconds["p = 0.0"]
    return {"ok": True, "ratio": ratio, "s": seconds, "steps": traces}


def float8(setting: Setting) -> dict[str, object]:
    """Returns seconds of a step and a loss, in bfloat16 and in float8 by each recipe; blocks are compiled."""
    if fault := torchao_fault():
        return {"ok": True, "skipped": f"torchao, {fault}"}
    size, found = setting.size(WIDE, TINY), dict[str, dict[str, float]]()
    compiled = setting.size((CompiledBlocks(),), ())  # a tiny run has no time to compile
    recipes = {f"fp8 {recipe}": (Float8Products(recipe),) for recipe in get_args(RecipeName)}
    for name, more in {"bf16": (), **recipes}.items():
        clear_memory(setting.device)
        plan = make_llama_plan(size, BF16, strategies=(*more, *compiled), micro_batch=size.batch)
        trainer = open_trainer(size, plan, setting.device)
        step = partial(trainer.step, trainer.local_batch(size.samples()))
        seconds = seconds_of(step, setting.device, setting.size(8, 1), setting.size(3, 1))
        found[name] = {"s": seconds, "loss": step().loss}
        trainer.close()
        setting.keep({"steps": found})
    ok = all(isfinite(row["loss"]) for row in found.values())
    return {"ok": ok, "size": asdict(size), "steps": found}


def _gpt2_step(p: float, setting: Setting) -> Step:
    batch_size, tokens = setting.size(GPT2_BATCH, 2), setting.size(GPT2_TOKENS, 16)
    width, layers = setting.size((768, 4), (32, 2))  # analyzed twice
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=setting.size(12, 2), use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = p
    ids = torch.randint(64, (batch_size, tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    example = {name: value[:1] for name, value in batch.items()}
    analyzed = analyze(lambda: GPT2LMHeadModel(config), example, loss=token_cross_entropy())
    job = Job(train=TrainConfig(batch=batch_size), optimizer=OptimizerConfig(lr=1e-4), precision=AUTOCAST)
    plan = make_plan(analyzed, job, micro_batch=batch_size)
    trainer = parallelize(analyzed, plan, world=single_rank_world(setting.device))
    return lambda: trainer.step(trainer.local_batch(batch))
