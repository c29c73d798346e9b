"""Delayed collectives change no bit of a right program, and the bits of one that waits too little."""

import torch

from benchmarks.gpu.delayed_collectives import LateWorld, bits_after
from benchmarks.gpu.llamas import FP32, SMALL, make_llama_plan
from benchmarks.gpu.setting import same_bits
from meshwright.comm.backends.fake import FakeWorld
from meshwright.plan.sharding.mesh import AXES, Mesh

CPU = torch.device("cpu")


def test_a_late_collective_ends_when_it_is_waited_for():
    world = LateWorld(FakeWorld(Mesh(dp_shard=3), 0, CPU), "late")
    tensor = torch.ones(2)
    work = world.group(AXES).all_reduce(tensor)
    assert tensor.tolist() == [1, 1]
    work.wait()
    work.wait()
    assert tensor.tolist() == [3, 3]


def test_a_send_that_is_overwritten_too_early_is_seen():
    sent = []
    for timing in ("at once", "late"):
        world = LateWorld(FakeWorld(Mesh(pp=2), 0, CPU), timing)
        tensor = torch.ones(2)
        world.group(("pp",)).send(tensor, target=1)
        tensor.zero_()
        world.finish()
        sent.append(list(world.sent.values()))
    assert not same_bits(*sent)


def test_a_pipeline_that_does_not_wait_has_other_bits():
    plan = make_llama_plan(SMALL, FP32, Mesh(pp=3), micro_batch=1)
    at_once = bits_after(plan, 1, CPU, "at once")
    assert same_bits(at_once, bits_after(plan, 1, CPU, "late"))
    assert not same_bits(at_once, bits_after(plan, 1, CPU, "not waited for"))
    assert all(each.isfinite().all() for each in at_once)
