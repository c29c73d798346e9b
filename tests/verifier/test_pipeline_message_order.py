"""Messages that are received in another order than they are sent are noticed."""

from dataclasses import replace

from meshwright.api import make_plan
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.verifier.pipeline_message_order import check_message_order
from tests.tiny_model import analyzed_model, tiny_job


def test_two_receives_that_change_places_are_noticed():
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=2), (Pipeline(),), 1)
    receiver = plan.program.roles[1]
    assert list(check_message_order(plan, receiver)) == []

    first, second, *_ = (action for action in receiver.actions if action.kind == "RECV")
    swapped = {first.name: second, second.name: first}

    def swap(action: Action) -> Action:
        return swapped.get(action.name, action)

    corrupted = replace(receiver, actions=tuple(map(swap, receiver.actions)))
    assert list(check_message_order(plan, corrupted)) == [
        "what pp0 sends pp1 is received in another order: pp0/SEND(layers.2 to 1, 0) is matched with the "
        "receive for pp0/SEND(layers.2 to 1, 1)"
    ]
