"""Vector clocks order what events and synchronizations order, and nothing else."""

from benchmarks.races.vector_clocks import HOST, VectorClocks

EVENT = 7


def test_work_before_an_event_precedes_the_stream_that_waits_for_it():
    clocks = VectorClocks()
    before = clocks.launch(1)
    clocks.record(EVENT, 1)
    behind = clocks.launch(1)
    clocks.wait_event(EVENT, 2)
    assert clocks.is_before(1, before, 2)
    assert not clocks.is_before(1, behind, 2)


def test_an_event_that_is_recorded_again_forgets_nothing_and_carries_more():
    clocks = VectorClocks()
    first = clocks.launch(1)
    clocks.record(EVENT, 1)
    second = clocks.launch(1)
    clocks.record(EVENT, 1)
    clocks.wait_event(EVENT, 2)
    assert clocks.is_before(1, first, 2)
    assert clocks.is_before(1, second, 2)


def test_an_event_that_was_never_recorded_orders_nothing():
    clocks = VectorClocks()
    epoch = clocks.launch(1)
    clocks.wait_event(EVENT, 2)
    assert not clocks.is_before(1, epoch, 2)


def test_a_launch_comes_after_what_the_host_did_and_has_waited_for():
    clocks = VectorClocks()
    on_stream = clocks.launch(1)
    clocks.launch(2)
    on_host = clocks.host_epoch()
    clocks.synchronize_stream(1)
    assert clocks.is_before(1, on_stream, HOST)
    assert not clocks.is_before(HOST, on_host, 2)
    clocks.launch(2)
    assert clocks.is_before(HOST, on_host, 2)
    assert clocks.is_before(1, on_stream, 2)
