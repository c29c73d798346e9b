"""The boxes that a rank writes hold its own values."""

import torch

from meshwright.model.tensors.lazy_mapping import box_window
from meshwright.plan.model_spec.param_dim_split import DimRanges
from meshwright.run.checkpoint.write_plan import ShardRange, stored_boxes


def test_a_parameter_in_two_ranges_of_its_rows_is_stored_as_two_boxes_with_their_own_values():
    # rows 0, 1 and 6, 7, 8 of a matrix of 10 x 4 are the local rows 0 to 4
    local = torch.arange(5 * 4).view(5, 4)
    shard = ShardRange("w", (10, 4), "int64", 0, 20, spans=(DimRanges(0, ((0, 2), (6, 9))),))
    boxes = [box for _, box in stored_boxes(shard)]
    assert [(box.start, box.size) for box in boxes] == [((0, 0), (2, 4)), ((6, 0), (3, 4))]
    assert torch.equal(torch.cat([box_window(local.reshape(-1), box) for box in boxes]), local)
