"""Calls of `generate` that are timed: ours under any mesh, and transformers' under its own parallelism.

Greedy answers without end tokens, so that all sides make equally many tokens. The models have transformers'
initial values; of all weights every side has the same.

    llama     8 layers x 512, 25.6 M parameters
    small     4 layers x 256: for many requests
    mixtral   4 layers x 256, 64 experts of which a token chooses 8
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.distributed import DistributedConfig

from benchmarks.models.llama_steps import join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.engine.generation.sampling_params import GeneratedAnswer, SamplingParams
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import Trainer

Call = Callable[[], list[list[int]]]  # returns the tokens of each answer
VOCABULARY, PROMPT_LENGTH, NEW_TOKENS = 256, 32, 24
NUM_REQUESTS, SHORTEST, LONGEST, ROOM = 64, 4, 128, 8  # requests of so many tokens, and sequences at once
THEIR_ROOM = {"num_blocks": 64, "max_batch_tokens": 512, "max_requests_per_batch": ROOM}


def _llama(width: int, num_layers: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": width * 43 // 16, "num_hidden_layers": num_layers}
    heads, positions = {"num_attention_heads": width // 64}, {"max_position_embeddings": 256}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, **positions, eos_token_id=None)
    )


def _mixtral() -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"num_local_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 4}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=VOCABULARY, **sizes, **experts, eos_token_id=None)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(_llama, 512, 8),
    "small": partial(_llama, 256, 4),
    "mixtral": _mixtral,
}


def model_of(name: str) -> nn.Module:
    """Returns the model with the values that all sides have."""
    torch.manual_seed(0)
    return MODELS[name]()


def prompts_of(num_prompts: int) -> list[list[int]]:
    """Returns prompts of equal length."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCABULARY, (num_prompts, PROMPT_LENGTH), generator=generator).tolist()


def new_tokens_of(num_requests: int) -> list[int]:
    """Returns how many tokens each request gets: evenly from SHORTEST to LONGEST, in a mixed order."""
    generator = torch.Generator().manual_seed(1)
    spread = [
        SHORTEST + (LONGEST - SHORTEST) * number // max(num_requests - 1, 1) for number in range(num_requests)
    ]
    return [spread[place] for place in torch.randperm(num_requests, generator=generator).tolist()]


def ours(
    rank: int,
    size: int,
    store: str,
    mesh: Mapping[str, int],
    num_prompts: int,
    model: str = "llama",
    stage: int = 0,
) -> Call:
    """Returns a call of our `generate` under `mesh`; with a ZeRO `stage` weights are gathered once a call."""
    trainer = _trainer(rank, size, store, mesh, model, stage)
    prompts, params = prompts_of(num_prompts), _greedy(NEW_TOKENS)
    return lambda: _tokens(trainer.generate(prompts, params, max_num_seqs=num_prompts))


def ours_continuous(rank: int, size: int, store: str, num_requests: int = NUM_REQUESTS) -> Call:
    """Returns a call with all requests: one that ends makes room for the next."""
    trainer = _trainer(rank, size, store, {}, "small", 0)
    prompts, params = prompts_of(num_requests), list(map(_greedy, new_tokens_of(num_requests)))
    return lambda: _tokens(trainer.generate(prompts, params, max_num_seqs=ROOM))


def ours_in_fixed_batches(rank: int, size: int, store: str, num_requests: int = NUM_REQUESTS) -> Call:
    """Returns calls with as many requests as run at once; each call lasts as long as its longest."""
    trainer = _trainer(rank, size, store, {}, "small", 0)
    prompts, params = prompts_of(num_requests), list(map(_greedy, new_tokens_of(num_requests)))

    def call() -> list[list[int]]:
        batches = (slice(first, first + ROOM) for first in range(0, num_requests, ROOM))
        answers = (trainer.generate(prompts[each], params[each], max_num_seqs=ROOM) for each in batches)
        return [tokens for each in answers for tokens in _tokens(each)]

    return call


def theirs(
    rank: int, size: int, store: str, sizes: Mapping[str, Any], num_prompts: int, model: str = "llama"
) -> Call:
    """Returns a call of transformers' `generate`, on `sizes` of its DistributedConfig, with its cache."""
    torch.set_num_threads(1)
    join(rank, size, store)
    generating: Any
    if sizes:
        folder = Path(f"{store}.model")  # beside the store of this group
        if rank == 0:
            cast(Any, model_of(model)).save_pretrained(folder)
        dist.barrier()
        loading = transformers.AutoModelForCausalLM.from_pretrained
        generating = loading(folder, distributed_config=DistributedConfig(**sizes))
    else:
        generating = model_of(model)
    generating.eval()
    ids = torch.tensor(prompts_of(num_prompts))
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW_TOKENS}

    def call() -> list[list[int]]:
        texts = generating.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return texts[:, PROMPT_LENGTH:].tolist()

    return call


def their_continuous(rank: int, size: int, store: str, num_requests: int = NUM_REQUESTS) -> Call:
    """Returns a call with the same requests of transformers' continuous batching, as `generate_batch` does it
    but with a limit for each request.
    """
    torch.set_num_threads(1)
    generating: Any = model_of("small").eval()
    requests = list(zip(prompts_of(num_requests), new_tokens_of(num_requests), strict=True))
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=LONGEST)

    def call() -> list[list[int]]:
        with generating.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**THEIR_ROOM)
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=limit, eos_token_id=-1)
                for prompt, limit in requests
            ]
            tokens = dict[str, list[int]]()
            while len(tokens) < num_requests:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    tokens[result.request_id] = result.generated_tokens
        return [tokens[name] for name in names]

    return call


def _trainer(rank: int, size: int, store: str, mesh: Mapping[str, int], model: str, stage: int) -> Trainer:
    torch.set_num_threads(1)
    join(rank, size, store)
    ids = torch.tensor(prompts_of(2 * size))
    analyzed = analyze(model_of(model), {"input_ids": ids, "labels": ids})
    job = Job(train=TrainConfig(steps=1, batch=2 * size))
    strategies = [BatchSplit("dp_shard"), ZeRO(stage=stage)] if stage else None
    return parallelize(analyzed, make_plan(analyzed, job, Mesh(**mesh), strategies))


def _tokens(answers: Sequence[GeneratedAnswer]) -> list[list[int]]:
    return [list(each.tokens) for each in answers]


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, stop_token_ids=())
