"""Sites that meet as peers let them: torch, Accelerate and torchft, around the loop of `llama_steps`.

    post_local_sgd    DDP with torch's post-local hook, which then sums no gradient, and PeriodicModelAverager
    accelerate_local  Accelerate's LocalSGD around a prepared model, which averages one parameter at a time
    torchft_diloco    torchft's DiLoCo with one fragment: a replica group per site, a lighthouse at the first

A site is one rank, in a network of its own. Set is what is fastest: buckets that are views, no buffers sent
in forwards (none is trained), all of what torchft sends in buckets. Each function builds the step of a rank.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models.llama_steps import WORKLOADS, torch_step
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.testing.rank_worker import NetworkLocation

TIMEOUT = timedelta(seconds=300)
STARTED = ExitStack()  # what lives as long as the process
EndStep = Callable[[], object]


@dataclass(frozen=True)
class SitePlace:
    """Where the site `rank` of `size` is, at `address`, and where they meet."""

    rank: int
    size: int
    location: NetworkLocation
    address: str
    endpoint: RendezvousEndpoint

    def join(self) -> None:
        """Makes this process one of torch.distributed, over gloo."""
        store = dist.TCPStore(self.endpoint.address, self.endpoint.port, self.size, self.rank == 0, TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)


def post_local_sgd(place: SitePlace, workload: str, every: int) -> Callable[[], object]:
    """Returns the step of a site whose parameters torch averages every `every` steps."""
    place.join()

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
        state = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        return wrapped

    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> EndStep:
        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)  # in the last step of a round
        return lambda: averager.average_parameters(model.parameters())

    return torch_step(place.rank, place.size, WORKLOADS[workload], wrap, begin=begin)


def accelerate_local(place: SitePlace, workload: str, every: int) -> Callable[[], object]:
    """Returns the step of a site whose parameters Accelerate averages every `every` steps."""
    place.join()
    ranks = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    meeting = {"MASTER_ADDR": place.endpoint.address, "MASTER_PORT": place.endpoint.port}
    os.environ.update({key: str(value) for key, value in {**ranks, **meeting}.items()})
    accelerate, local_sgd = import_module("accelerate"), import_module("accelerate.local_sgd")
    kwargs = accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[kwargs])

    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> EndStep:
        local = local_sgd.LocalSGD(accelerator, model, local_sgd_steps=every)
        local.__enter__()  # it is never left: that would average once more
        return local.step

    return torch_step(place.rank, place.size, WORKLOADS[workload], accelerator.prepare, begin=begin)


def torchft_diloco(place: SitePlace, workload: str, every: int) -> Callable[[], object]:
    """Returns the step of a site whose parameters torchft steps every `every` steps.

    Raises RuntimeError at the end of a round in which not all sites took part, or which it took back.
    """
    manager_module, local_sgd = import_module("torchft.manager"), import_module("torchft.local_sgd")
    if place.rank == 0:
        lighthouse = import_module("torchft.coordination").LighthouseServer(
            bind=f"{place.endpoint.address}:{place.endpoint.port}", min_replicas=place.size
        )
        STARTED.callback(lighthouse.shutdown)
    store = dist.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
    manager = manager_module.Manager(
        pg=import_module("torchft.process_group").ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=place.size,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=place.address,
        store_port=store.port,
        lighthouse_addr=f"http://{place.endpoint.address}:{place.endpoint.port}",
        replica_id=f"site_{place.rank}",
        hostname=place.address,
        init_sync=False,  # all begin with the same parameters
    )
    num_steps = 0

    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> EndStep:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = local_sgd.DiLoCo(manager, [model], optimizer, outer, every, use_bucketization=True)
        STARTED.enter_context(diloco)
        STARTED.callback(lambda: store)  # it lives as long

        def end_step() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps % every == 0 and (
                manager.current_step() != num_steps // every or manager.num_participants() != place.size
            ):
                raise RuntimeError(
                    f"torchft has ended {manager.current_step()} of {num_steps // every} rounds, the last "
                    f"one with {manager.num_participants()} of {place.size} sites"
                )

        return end_step

    return torch_step(place.rank, place.size, WORKLOADS[workload], lambda model: model, begin=begin)
