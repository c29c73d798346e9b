"""`serve`: a model answers over HTTP on the ranks of a plan, until it is stopped.

All ranks load the weights and continue sequences (engine/generation/serving_loop.py); rank 0 also listens, in
a thread of its own. Nothing is written into the folder of a run, which may be training.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import nn

from meshwright.api import Trainer, parallelize
from meshwright.commands.plan import ResolvedRequest, resolve
from meshwright.commands.serving.served_source import LOCATION, find_source, source_name
from meshwright.commands.train import warning_printer
from meshwright.device.local_device import device_diagnostics, local_platform, own_device_diagnostics
from meshwright.engine.generation.decode_context_parallel import division_diagnostics
from meshwright.engine.generation.generation_step import gather_from_ranks
from meshwright.engine.generation.sampling_params import SamplingParams, end_tokens, model_diagnostics
from meshwright.engine.generation.serving_loop import serve_requests
from meshwright.model.analysis.plan_for_model import EXAMPLE_SOURCE
from meshwright.model.hf.model_from_config import text_limits
from meshwright.model.hf.tokenizer_files import own_tokenizer
from meshwright.plan.job.errors import Diagnostic, PlanError, format_nbytes, raise_diagnostics
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.planner.program_cost.kv_cache_memory import kv_cache_nbytes
from meshwright.resolve_config import ResolvedRun, vocab_size_of
from meshwright.run.checkpoint.distributed_checkpoint import open_tensors
from meshwright.run.checkpoint.distributed_verification import consensus_for_load, verify_checkpoint
from meshwright.run.checkpoint.resume import check_model
from meshwright.run.config.config_and_plan_files import PlanRequest
from meshwright.run.config.plan_file import PLAN_FILE, write_request
from meshwright.run.data.tokenizer import Tokenizer, make_tokenizer, resolve_tokenizer
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.failure_record import record_failure
from meshwright.run.launch.join_world import check_same_plan, join_world
from meshwright.run.launch.local_launcher import LaunchResult, LocalLauncher
from meshwright.run.launch.run_folder import Attempt, claim_run_folder
from meshwright.run.serving.http_server import HttpServer, check_address
from meshwright.run.serving.openai_app import make_app
from meshwright.run.serving.openai_requests import ServedModel
from meshwright.run.serving.request_queue import RequestQueue
from meshwright.run.telemetry.logs import rank_log

DEFAULT_NUM_SEQS = 8
UNBOUNDED = 1 << 40  # sequences, where the cache of a model is not known
StopFlagContext = Callable[[], AbstractContextManager[Callable[[], bool]]]


@dataclass(frozen=True)
class ServeOptions:
    """Where and how to serve: the address, the key that requests state, the `name` of the model ("": that of
    its source), and limits; None: what fits. With `decode_context_parallel` ranks along cp divide the keys
    and values of each sequence.
    """

    host: str
    port: int
    api_key: str | None
    name: str = ""
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    decode_context_parallel: bool = False

    def as_args(self) -> list[str]:
        """Returns them as arguments of the command, without the key, which ranks find where it was found."""
        args = ["--host", self.host, "--port", str(self.port), "--served-model-name", self.name]
        for name, value in (("--max-num-seqs", self.max_num_seqs), ("--max-model-len", self.max_model_len)):
            args += [] if value is None else [name, str(value)]
        return [*args, *(["--decode-context-parallel"] if self.decode_context_parallel else [])]


def serve(
    source: str,
    checkpoint: Path | None,
    overrides: Sequence[str],
    world: int | None,
    options: ServeOptions,
    key_args: Sequence[str],
    launcher: LocalLauncher,
) -> LaunchResult:
    """Checks everything in this process, then starts the local ranks and waits for them; `key_args` tell
    them where the API key is.
    """
    check_address(options.host, options.port, options.api_key)
    served = find_source(source, checkpoint, overrides)
    request, run = _resolve(served.request, world)
    plan = run.plan
    _check_options(options, run)
    dtypes = plan.job.precision.roles.values()
    raise_diagnostics(
        [
            *device_diagnostics(local_platform(), plan.mesh.world_size, dtypes),
            *own_device_diagnostics(plan.mesh.world_size),
        ]
    )
    run.check_host_memory(range(plan.mesh.world_size))
    options = replace(options, name=options.name or source_name(source))
    with TemporaryDirectory(prefix="meshwright-serve-") as private:
        path = Path(private) / PLAN_FILE
        write_request(request, path)
        argv = ["serve", str(path), *options.as_args(), *key_args]
        argv += [] if served.checkpoint is None else ["--checkpoint", str(served.checkpoint)]
        with claim_run_folder(Path(private)) as attempt:
            return launcher(argv, plan.mesh.world_size, attempt)


def serve_rank(
    rank_env: RankEnv,
    source: str,
    checkpoint: Path | None,
    overrides: Sequence[str],
    options: ServeOptions,
    stop_flag: StopFlagContext,
    console: Console,
) -> None:
    """Serves as one rank until a signal comes; rank 0 listens and prints."""
    with _failures_recorded(rank_env, console):
        served = find_source(source, checkpoint, overrides)
        run = _resolve(served.request, rank_env.world)[1]
        options = replace(options, name=options.name or source_name(source))
        if rank_env.launcher_env is not None:  # else the launching process has checked it
            _check_options(options, run)
            run.check_host_memory(rank_env.launcher_env.ranks_of_host)
        limits, shared_memory = run.plan.run.limits, run.plan.run.shared_memory
        joining = join_world(rank_env, run.plan.mesh, limits, shared_memory=shared_memory)
        with joining as world, ExitStack() as stack:
            check_same_plan(world, run.plan, str(served.checkpoint))
            trainer = stack.enter_context(parallelize(run.analyzed, run.plan, loss=run.loss, world=world))
            stack.enter_context(trainer.oom_advisor)
            if served.checkpoint is not None:
                _load_parameters(trainer, served.checkpoint)
            should_stop = stack.enter_context(stop_flag())
            _serve_until_stopped(trainer, options, served.checkpoint, should_stop, console)


def _serve_until_stopped(
    trainer: Trainer,
    options: ServeOptions,
    checkpoint: Path | None,
    should_stop: Callable[[], bool],
    console: Console,
) -> None:
    plan, executor = trainer.plan, trainer.executor
    max_model_len = options.max_model_len or _context(plan, trainer.module)
    divides = options.decode_context_parallel
    num_fitting, nbytes = _cache_memory(trainer, max_model_len, decode_context_parallel=divides)
    max_num_seqs = options.max_num_seqs or max(1, min(DEFAULT_NUM_SEQS, num_fitting))
    if max_num_seqs > num_fitting:
        text = f"{max_num_seqs} sequences of {max_model_len} tokens run at once on a rank, and their keys "
        text += f"and values fit in its memory for {num_fitting}"
        smaller = f"--max-num-seqs {num_fitting}, or " if num_fitting else ""
        fix = f"pass {smaller}a smaller --max-model-len; or use more ranks along tp or pp"
        fix += " or cp" if divides else "; or --decode-context-parallel" if plan.sharding.token_axes else ""
        raise PlanError(text, fix=fix, location=LOCATION)
    how: dict[str, Any] = {"max_num_seqs": max_num_seqs, "decode_context_parallel": divides}
    if trainer.world.rank:
        serve_requests(executor, None, should_stop=should_stop, **how)
        return
    served = _served_model(trainer, options.name, max_model_len, max_num_seqs)
    queue = RequestQueue(served.decode)
    with HttpServer(make_app(served, queue, options.api_key), options.host, options.port) as server:
        weights = checkpoint or plan.job.model.weights or "the values that the model is made with"
        each = f"{format_nbytes(nbytes)} a sequence of {max_model_len:,} tokens" if nbytes else "not known"
        fits = f", memory for {num_fitting:,}" if nbytes else ""
        lines = {
            "model": f"{served.name}: {plan.model_spec.numel:,} parameters, of {weights}",
            "plan": f"{plan.hash} on {plan.mesh}",
            "cache": f"{each}; {max_num_seqs} sequences at once{fits}",
            "url": f"{server.url}/v1",
        }
        for name, line in lines.items():
            console.print(f"{name:<12}{line}", markup=False, soft_wrap=True)

        def ends() -> bool:
            return should_stop() or not server.is_running

        try:
            serve_requests(executor, queue, should_stop=ends, **how)
        finally:
            queue.close()


def _resolve(request: PlanRequest, world: int | None) -> ResolvedRequest:
    return resolve(request, world, needs_data=request.job.data.source == EXAMPLE_SOURCE)


def _check_options(options: ServeOptions, run: ResolvedRun) -> None:
    """Raises PlanError for a model that predicts no next token or has no tokenizer, and for long texts."""
    module, length = run.analyzed.deferred_init.instantiate(), options.max_model_len
    problems = list(model_diagnostics(module))
    if options.decode_context_parallel:
        problems += division_diagnostics(module, run.plan.sharding)
    positions = text_limits(module).max_positions
    if length is not None and positions is not None and length > positions:
        text = f"--max-model-len {length}; the model has {positions} positions"
        problems.append(Diagnostic(text, f"pass at most --max-model-len {positions}", LOCATION))
    raise_diagnostics(problems)
    _tokenizer(run.plan, module)


def _tokenizer(plan: Plan, module: nn.Module) -> Tokenizer:
    return make_tokenizer(resolve_tokenizer(plan.job, vocab_size_of(module)))


def _context(plan: Plan, module: nn.Module) -> int:
    """Returns the positions of the model; where it states none, the tokens of a sample of the plan."""
    return text_limits(module).max_positions or plan.job.data.sequence


def _cache_memory(trainer: Trainer, num_tokens: int, *, decode_context_parallel: bool) -> tuple[int, int]:
    """Returns how many sequences of `num_tokens` tokens fit on every rank, and the bytes of keys and values
    of one on the fullest; 0 where they are not known.
    """
    world, layers = trainer.world, trainer.analyzed.cached_layers
    how = {"decode_context_parallel": decode_context_parallel}
    nbytes = kv_cache_nbytes(layers or (), trainer.plan, world.rank, 1, num_tokens - 1, **how)
    fitting = trainer.num_fitting_seqs(num_tokens - 1, **how)
    own = torch.tensor([UNBOUNDED if fitting is None else fitting, nbytes], device=world.device)
    fits, sizes = gather_from_ranks(world.group(AXES), own).unbind(1)
    return int(fits.min()), int(sizes.max())


def _load_parameters(trainer: Trainer, path: Path) -> None:
    """Loads the parameters of a checkpoint alone; each rank verifies a share of the files."""
    ranks, executor = consensus_for_load(trainer.world, f"'{path}' is not served"), trainer.executor
    manifest = verify_checkpoint(path, ranks, lambda manifest, place: check_model(manifest, executor, place))
    executor.load_parameters(open_tensors(path, manifest.entries))


def _served_model(trainer: Trainer, name: str, max_model_len: int, max_num_seqs: int) -> ServedModel:
    module, job = trainer.module, trainer.plan.job
    tokenizer = _tokenizer(trainer.plan, module)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ends = end_tokens(module, SamplingParams()) if tokenizer.name == own_tokenizer(job.model) else eos
    limits = max_model_len, max_num_seqs
    # the first call may change the settings of a tokenizer, which threads must not do beside each other
    tokenizer.encode([" "])
    return ServedModel(name, module, tokenizer, eos if ends is None else ends, *limits, int(time.time()))


@contextmanager
def _failures_recorded(rank_env: RankEnv, console: Console) -> Iterator[None]:
    """Records a failure for the launching process, or prints it under another launcher."""
    show = None
    if rank_env.launcher_env is not None:
        show = partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)
    with TemporaryDirectory(prefix="meshwright-serve-") as private:
        attempt_folder = rank_env.attempt_folder or Attempt(Path(private), 1).folder
        folder, printer = attempt_folder.parents[1], warning_printer(rank_env, console)
        with (
            record_failure(rank_env.rank, attempt_folder, rank_env.lifeline_fd, show),
            rank_log(folder, rank_env.rank, printer),
        ):
            yield
