"""Small programs with streams, right and wrong; prints the number of races of each. Run with fake CUDA."""

import json
import sys
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness.fake_cuda import end_process
from benchmarks.races.race_checker import RaceChecker


def two_streams(*, waits: bool) -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x.add_(1)
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    x.sum()


def wait_through_a_third(*, waits: bool) -> None:
    x, first, second = zeros(), side_stream(), side_stream()
    with torch.cuda.stream(first):
        x.add_(1)
    event = first.record_event()
    if waits:
        second.wait_event(event)
    torch.cuda.current_stream().wait_stream(second)
    x.sum()


def work_behind_the_event() -> None:
    x, stream = zeros(), side_stream()
    event = stream.record_event()
    with torch.cuda.stream(stream):
        x.add_(1)
    torch.cuda.current_stream().wait_event(event)
    x.sum()


def two_readers() -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x.sum()
    x.sum()


def slices(*, overlap: bool) -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x.view(-1)[:32].add_(1)
    x.view(-1)[32 - overlap :].sum()


def columns(*, overlap: bool) -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x[:, :4].add_(1)
    x[:, 4 - overlap :].sum()


def reuse_of_freed_memory(*, records: bool) -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x.sum()
    if records:
        x.record_stream(stream)
    del x
    zeros()


def reuse_after_a_wait() -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x.sum()
    del x
    torch.cuda.current_stream().wait_stream(stream)
    zeros()


def read_on_the_host(*, waits: bool) -> None:
    copied = zeros().to("cpu", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    copied + 1


def host_reads_another_stream() -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x.add_(1)
    x.cpu()


def stream_after_a_synchronizing_read() -> None:
    x, stream = zeros(), side_stream()
    with torch.cuda.stream(stream):
        x.add_(1).sum().cpu()
    x.sum()


def pinned_buffer(*, waits: bool) -> None:
    host, stream = torch.zeros(8).pin_memory(), side_stream()
    with torch.cuda.stream(stream):
        host.to("cuda", non_blocking=True)
    if waits:
        stream.synchronize()
    host.fill_(1)


def backward_of_a_side_stream() -> None:
    weight, stream = zeros().requires_grad_(), side_stream()
    with torch.cuda.stream(stream):
        loss = (weight * 2).sum()
    loss.backward()
    weight.grad.add_(1)


EXAMPLES: dict[str, Callable[[], None]] = {
    "two streams with a wait": lambda: two_streams(waits=True),
    "two streams WITHOUT a wait": lambda: two_streams(waits=False),
    "a wait through a third stream": lambda: wait_through_a_third(waits=True),
    "NO wait of the third stream": lambda: wait_through_a_third(waits=False),
    "work BEHIND the event": work_behind_the_event,
    "two readers": two_readers,
    "slices of a buffer": lambda: slices(overlap=False),
    "slices that OVERLAP": lambda: slices(overlap=True),
    "columns of a matrix": lambda: columns(overlap=False),
    "columns that OVERLAP": lambda: columns(overlap=True),
    "freed memory of a recorded stream": lambda: reuse_of_freed_memory(records=True),
    "freed memory of a stream NOT recorded": lambda: reuse_of_freed_memory(records=False),
    "freed memory, after a wait": reuse_after_a_wait,
    "asynchronous copy, synchronized": lambda: read_on_the_host(waits=True),
    "asynchronous copy, NOT synchronized": lambda: read_on_the_host(waits=False),
    "the host reads what ANOTHER stream writes": host_reads_another_stream,
    "a stream after the host has synchronized": stream_after_a_synchronizing_read,
    "pinned buffer, written after the copy": lambda: pinned_buffer(waits=True),
    "pinned buffer, written DURING the copy": lambda: pinned_buffer(waits=False),
    "backward of another stream, which autograd orders": backward_of_a_side_stream,
}


def zeros() -> torch.Tensor:
    return torch.zeros(8, 8, device="cuda")


def side_stream() -> torch.cuda.Stream:
    """Returns a new stream that waits for the current one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def count_races(example: Callable[[], None]) -> int:
    with FakeTensorMode(), RaceChecker() as checker:
        example()
    return len(checker.races)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: count_races(example) for name, example in EXAMPLES.items()}))
    end_process()
