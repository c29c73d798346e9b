"""The model report: rows of equal layers, tied and unused parameters, advice, and the report of a forward
that fails.
"""

import torch
import transformers
from torch import nn

from meshwright.model.analysis.model_report import ModelReport, make_model_report
from meshwright.model.blocks.discovery import WHOLE_MODEL
from meshwright.model.loading.loader import Model, load_factory
from meshwright.plan.model_spec.model_spec import ROOT
from tests.model.unknown_loss import unknown_loss

TOKENS = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "labels": torch.zeros(1, 8, dtype=torch.long)}


class Net(nn.Module):
    """An embedding, three equal layers with a scale in glue, a tied head, and a linear that nobody calls."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed, self.spare = nn.Embedding(7, 4), nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(p)) for _ in range(3))
        self.scale, self.still = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.scale + self.still
        self.seen += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Flat(nn.Module):
    """No chain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.spare = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.up(self.embed(input_ids))


def of(model: nn.Module | Model) -> ModelReport:
    return make_model_report(load_factory(lambda: model, 0, "net"), TOKENS, unknown_loss("labels"))


def test_equal_blocks_are_one_row_in_call_order():
    blocks = ["embed", "layers.0", "layers.1", "layers.2", "head"]
    found = of(Model(Net(0.5), blocks=blocks))
    rows = [
        (
            row.first_block_call,
            row.last_block_call,
            row.num_block_calls,
            row.class_name,
            row.numel,
            row.num_dropout_sites,
        )
        for row in found.blocks
    ]
    assert rows == [
        ("embed", "embed", 1, "Embedding", 28, 0),
        ("layers.0", "layers.2", 3, "Sequential", 20, 1),
        ("head", "head", 1, "Linear", 28, 0),
    ]
    assert found.blocks[1].output_numel == 8 * 4
    assert found.blocks[1].flops == 2 * 8 * 4 * 4


def test_special_cases_of_parameters_are_reported():
    found = of(Model(Net(), blocks=["embed", "layers.0", "layers.1", "layers.2", "head"]))
    assert found.tied_params == (("embed.weight", "head.weight"),)
    assert found.glue_params == ("scale",)
    assert found.frozen_params == ("still",)
    assert found.unused_params == ("spare.weight", "spare.bias")
    assert found.written_buffers == ("seen",)
    assert found.numel == 28 + 6 + 60 + 4 + 4
    assert ROOT not in {row.first_block_call for row in found.blocks}


def test_shardable_layers_of_all_blocks_are_one_row():
    found = of(Model(Net(), layer_roles={"layers.*.0": "colwise"}))
    row = next(row for row in found.layers if row.pattern == "layers.*.*")
    assert (row.num_layers, row.shape, row.numel, row.role, row.source) == (
        3,
        (4, 4),
        60,
        "colwise",
        "declared by you",
    )


def test_the_advice_for_a_model_without_a_chain_is_two_lines_that_work():
    found = of(Flat())
    chain = next(fault for fault in found.advice if "no chain of blocks" in fault.problem)
    line = chain.fix.splitlines()[-1].strip()
    assert line == "return meshwright.Model(make_it(), blocks=['embed', 'up'])"
    assert [row.first_block_call for row in of(Model(Flat(), blocks=["embed", "up"])).blocks] == [
        "embed",
        "up",
    ]
    assert not any("no chain" in fault.problem for fault in of(Model(Flat(), blocks=["embed", "up"])).advice)


def test_the_advice_for_shardable_layers_is_a_declaration_that_works():
    found = of(Flat())
    said = next(fault for fault in found.advice if "no role is declared for up" in fault.problem)
    assert "return meshwright.Model(make_it(), layer_roles={'up': 'colwise'" in said.fix
    again = of(Model(Flat(), layer_roles={"embed": "vocab", "up": "colwise", "spare": "replicated"}))
    assert not any("no role" in fault.problem for fault in again.advice)


def test_a_forward_that_fails_leaves_the_module_tree_and_the_diagnostic():
    class Failing(Net):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise KeyError("nothing here")

    found = of(Failing())
    assert [row.num_block_calls for row in found.blocks] == [1, 1, 3, 1]
    assert "KeyError: 'nothing here'" in found.diagnostics[0].problem
    assert found.unused_params == found.num_captured == ()
    assert len(found.layers) == 4 + 1


def test_a_whole_model_as_one_block_is_named_as_such():
    assert [row.first_block_call for row in of(Flat()).blocks] == [WHOLE_MODEL]


def test_router_logits_are_reported_as_a_side_channel():
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.MixtralConfig(
        **sizes, intermediate_size=24, num_local_experts=3, output_router_logits=True
    )
    found = of(transformers.MixtralForCausalLM(config))
    assert found.num_captured == (("router_logits", 2),)
    assert found.attention == "sdpa"
    assert [row.calls_attention for row in found.blocks] == [False, True, False, False]
