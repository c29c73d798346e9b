"""The rank that a hang report names, from constructed rank statuses of at least three ranks."""

from dataclasses import replace

from meshwright.comm.collectives.flight_recorder import IssuedCollective
from meshwright.comm.watchdog.hang_report import HangReport, diagnose_hang
from meshwright.comm.watchdog.rank_status import C10D_FILE, PendingWait, RankStatus
from meshwright.plan.sharding.mesh import Mesh

LINE = ("dp_replicate",)
MESH = Mesh(dp_replicate=3)
SLEEP = ("/home/me/train.py", 212, "on_step_end")


def issued(
    number: int, size: int = 4096, action: str = "", axes: tuple[str, ...] = LINE, place: str = "acts.py:93"
) -> IssuedCollective:
    return IssuedCollective(
        number, number, axes, f"all_reduce of float32 [{size}]", action or f"REDUCE({number})", place
    )


def waits(rank: int, *recent: IssuedCollective, seconds: float = 5.1) -> RankStatus:
    return RankStatus(
        rank,
        phase="step",
        step=12,
        collectives=recent,
        waits=(PendingWait(recent[-1].sequence_id, seconds),),
        time_s=float(rank),
    )


def diagnosis_of(*statements: RankStatus, mesh: Mesh = MESH) -> HangReport:
    return diagnose_hang({each.rank: each for each in statements}, mesh)


SIXTEEN = [issued(number) for number in range(1, 17)]
MISSING = RankStatus(
    1, phase="step", step=12, collectives=tuple(SIXTEEN), stack=(("/x/main.py", 1, "main"), SLEEP)
)
VICTIMS = (waits(0, *SIXTEEN, issued(17)), waits(2, *SIXTEEN, issued(17), seconds=4.9))


def test_a_missing_rank_is_named_with_its_line_and_what_the_others_wait_for():
    found = diagnosis_of(*VICTIMS, MISSING)
    assert found.ranks == (1,)
    first, asked, where, last, *_ = str(found).splitlines()
    assert first == (
        "rank 1 did not issue all_reduce of float32 [4096] for REDUCE(17), number 17 over dp_replicate; "
        "ranks 0, 2 wait for it since 5.1 s"
    )
    assert asked == "  issued at acts.py:93"
    assert where == "rank 1 is at step 12 at /home/me/train.py:212 in on_step_end (in no collective)"
    assert last == (
        "  its last collective was number 16 over dp_replicate: all_reduce of float32 [4096] "
        "for REDUCE(16), from acts.py:93"
    )
    assert "raise run.limits.step_s" in found.fix


def test_a_call_of_torch_that_the_run_did_not_ask_for_is_said():
    inside = replace(MISSING, stack=(SLEEP, (C10D_FILE, 5, "barrier")))
    assert (
        "(in torch.distributed.barrier, which meshwright did not issue)"
        in diagnosis_of(*VICTIMS, inside).text
    )


def test_a_rank_that_left_with_an_error_is_named_before_those_that_miss_it():
    left = replace(MISSING, condition="exited", error="ValueError: x", is_root_cause=True)
    found = diagnosis_of(*VICTIMS, left)
    assert found.ranks == (1,)
    assert found.text.startswith(
        "rank 1 left at step 12: ValueError: x\n  at /home/me/train.py:212 in on_step_end"
    )
    assert "ranks 0, 2 wait in all_reduce" in found.text
    assert "repair the error of rank 1" in found.fix


def test_of_two_that_left_the_first_is_named_and_a_consequence_never():
    late = replace(MISSING, condition="exited", error="ValueError: late", is_root_cause=True, time_s=9.0)
    early = replace(
        MISSING, rank=2, condition="exited", error="ValueError: early", is_root_cause=True, time_s=3.0
    )
    follows = replace(
        MISSING, rank=0, condition="exited", error="CollectiveError: closed", is_root_cause=False, time_s=1.0
    )
    assert diagnosis_of(late, early, follows).ranks == (2,)


def test_a_process_that_is_gone_is_named_with_its_last_collective():
    found = diagnosis_of(*VICTIMS, RankStatus(1, "dead", collectives=tuple(SIXTEEN)))
    assert found.ranks == (1,)
    assert "rank 1: its process is gone" in found.text
    assert "its last collective was number 16" in found.text


def test_the_odd_one_out_is_named_with_both_calls_and_its_line():
    odd = waits(1, *SIXTEEN, issued(17, 4097, place="/home/me/model.py:88"))
    found = diagnosis_of(*VICTIMS, odd)
    assert found.ranks == (1,)
    lines = found.text.splitlines()
    assert lines[0] == "the ranks do not agree on number 17 over dp_replicate:"
    assert lines[1:5] == [
        "  rank 1 issued all_reduce of float32 [4097] for REDUCE(17)",
        "    from /home/me/model.py:88",
        "  ranks 0, 2 issued all_reduce of float32 [4096] for REDUCE(17)",
        "    from acts.py:93",
    ]


def test_a_process_that_a_backend_aborted_is_not_blamed_for_the_size_that_another_sent():
    aborted = RankStatus(0, "dead", collectives=(*SIXTEEN, issued(17)))
    found = diagnosis_of(aborted, waits(1, *SIXTEEN, issued(17, 4097)), VICTIMS[1])
    assert found.ranks == (1,)
    assert "rank 0: its process is gone; a backend may abort" in found.text


def test_of_two_ranks_that_differ_neither_is_called_wrong():
    found = diagnosis_of(waits(0, issued(1)), waits(1, issued(1, 7)), mesh=Mesh(dp_replicate=2))
    assert found.ranks == (0, 1)
    assert "it cannot be determined which rank is wrong" in found.text


def test_the_earliest_disagreement_is_reported():
    swapped = (issued(1), issued(2, action="REDUCE(3)"), issued(3, action="REDUCE(2)"))
    straight = (issued(1), issued(2), issued(3))
    found = diagnosis_of(waits(0, *straight), waits(1, *swapped), waits(2, *straight))
    assert found.ranks == (1,)
    assert "number 2 over" in found.text


def test_the_end_of_a_chain_is_blamed_and_not_who_waits_in_the_middle():
    """Rank 0 waits for 1 along tp, rank 1 for 3 along dp_shard, and rank 3 sleeps."""
    mesh = Mesh(dp_shard=2, tp=2)
    row, column = issued(5, axes=("tp",)), issued(6, axes=("dp_shard",))
    asleep = RankStatus(3, phase="step", step=1, collectives=(issued(1, axes=("tp",)),), stack=(SLEEP,))
    found = diagnosis_of(
        waits(0, row), waits(1, column), waits(2, issued(2, axes=("tp",))), asleep, mesh=mesh
    )
    assert found.ranks == (3,)


def test_of_ranks_that_receive_in_a_row_the_one_that_is_stopped_comes_first():
    """Rank 0 waits for the gradient of rank 1, which waits for that of rank 2."""
    first, second = (
        IssuedCollective(
            number,
            number,
            LINE,
            f"receive of float32 [4] from index {rank + 1}",
            "GRAD",
            "a.py:1",
            (rank + 1, rank),
        )
        for number, rank in ((4, 0), (3, 1))
    )
    found = diagnosis_of(waits(0, first), waits(1, second), RankStatus(2, "stopped"))
    assert found.ranks == (2,)
    told, _, chain, where, *_ = str(found).splitlines()
    assert told.startswith(
        "rank 2 did not issue rank 1's receive of float32 [4] from index 2 for GRAD, number 3 over rank 2 to"
    )
    assert chain.startswith(
        "rank 0 waits for rank 1 in receive of float32 [4] from index 1 for GRAD, number 4"
    )
    assert chain.endswith(": it waits, too")
    assert where == (
        "rank 2 did not answer: its process is stopped (SIGSTOP, Ctrl-Z, a debugger), and goes on after "
        "SIGCONT"
    )


def test_ranks_that_wait_for_each_other_in_a_cycle_are_reported():
    mesh = Mesh(dp_shard=2, tp=2)
    circle = [waits(rank, issued(1, axes=("tp",) if rank in (0, 3) else ("dp_shard",))) for rank in range(4)]
    found = diagnosis_of(*circle, mesh=mesh)
    assert found.ranks == (0, 1, 2, 3)
    assert found.text.startswith("the ranks wait for each other in a cycle")
    assert "the same order on every rank" in found.fix


def test_a_receive_whose_sender_did_not_come_blames_the_sender():
    receive = IssuedCollective(1, 1, LINE, "receive of float32 [4] from index 1", "", "a.py:1", (1, 0))
    found = diagnosis_of(
        waits(0, receive), replace(MISSING, collectives=()), RankStatus(2, stack=(("/x/y.py", 1, "f"),))
    )
    assert found.ranks == (1,)
    assert "number 1 over rank 1 to rank 0" in found.text


def test_nobody_is_blamed_when_all_have_come():
    found = diagnosis_of(*(waits(rank, issued(1)) for rank in range(3)))
    assert found.ranks == ()
    assert "the backend or the network" in found.text


def test_a_rank_that_does_not_answer_is_distinguished_from_one_that_does():
    silent = RankStatus(1, "silent", collectives=tuple(SIXTEEN), stack=(SLEEP,))
    text = diagnosis_of(*VICTIMS, silent).text
    assert "rank 1 did not answer: its interpreter is held by native code" in text
    assert "it is at /home/me/train.py:212 in on_step_end" in text


def test_a_rank_that_stopped_after_it_issued_the_collective_is_named_and_not_the_network():
    stopped = RankStatus(1, "stopped", collectives=(*SIXTEEN, issued(17)))
    found = diagnosis_of(*VICTIMS, stopped)
    assert found.ranks == (1,)
    first, last, waiting, *_ = str(found).splitlines()
    assert first.startswith("rank 1 did not answer: its process is stopped (SIGSTOP, Ctrl-Z, a debugger)")
    assert last.startswith("  its last collective was number 17 over dp_replicate")
    assert waiting.startswith("  ranks 0, 2 wait in all_reduce of float32 [4096] for REDUCE(17), number 17")
    assert "network" not in str(found)
    assert "kill -CONT" in found.fix


def test_a_rank_that_does_not_answer_is_named_before_one_that_is_late():
    mesh = Mesh(dp_replicate=4)
    recent = (*SIXTEEN, issued(17))
    late = replace(MISSING, rank=3)
    found = diagnosis_of(*VICTIMS, RankStatus(1, "silent", collectives=recent), late, mesh=mesh)
    assert found.ranks == (1, 3)
    assert found.text.startswith("rank 1 did not answer")
    assert "rank 3 did not issue all_reduce of float32 [4096] for REDUCE(17)" in found.text


def test_many_ranks_are_not_all_listed():
    mesh = Mesh(dp_replicate=200)
    found = diagnosis_of(*(waits(rank, issued(1)) for rank in range(1, 200)), RankStatus(0), mesh=mesh)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ... (199 in all) wait for it" in found.text
