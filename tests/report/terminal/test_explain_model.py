"""The model report as tables and as JSON."""

import json
from dataclasses import replace
from io import StringIO

from rich.console import Console

from meshwright.model.analysis.model_report import BlockRow, LayerRow, ModelReport
from meshwright.plan.job.errors import Diagnostic
from meshwright.report.terminal.explain_model import model_report_dict, model_report_view

SURVEY = ModelReport(
    name="llama",
    class_name="LlamaForCausalLM",
    numel=5000,
    blocks=(
        BlockRow("embed", "embed", 1, "Embedding", 1000, 64, 0),
        BlockRow(
            "layers.0", "layers.3", 4, "Layer", 1024, 64, 2048, calls_attention=True, num_dropout_sites=2
        ),
    ),
    layers=(
        LayerRow("layers.*.up", 4, "linear", (16, 32), 2048, "colwise", "declared by the model"),
        LayerRow("embed", 1, "embedding", (50, 20), 1000, "", ""),
    ),
    tied_params=(("embed.weight", "head.weight"),),
    attention="sdpa",
    glue_params=("scale",),
    num_captured=(("router_logits", 4),),
    written_buffers=("count",),
    notes=("1 parameters are used outside blocks",),
    advice=(
        Diagnostic(
            "no role is declared for embed", "declare it\n    def build():\n        return Model(net)"
        ),
    ),
)


def shown(found: ModelReport, width: int = 4) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(model_report_view(found, width))
    return console.export_text()


def test_blocks_layers_and_special_cases_are_shown_with_their_bytes():
    text = shown(SURVEY)
    for words in (
        "llama: LlamaForCausalLM, 5,000 parameters (19.5 KiB), 5 blocks",
        "transformers' attention interface (sdpa); 4 block calls use torch's attention",
        "embed.weight = head.weight",
        "scale (used between blocks",
        "router_logits (4 tensors): captured inside blocks",
        "8 draw sites in blocks",
        "count (written by the forward",
        "layers.0 .. layers.3  (4 equal, each:)",
        "layers.*.up x4",
        "16 x 32",
    ):
        assert words in text, words
    assert "2.05 KFLOP" in text


def test_an_undeclared_layer_says_what_it_costs_on_every_rank():
    assert "none: 3.91 KiB on every rank" in shown(SURVEY)
    assert "none: 1.95 KiB on every rank" in shown(SURVEY, width=2)


def test_unrecognized_layers_come_with_the_lines_that_declare_them():
    text = shown(SURVEY)
    lines = [line.rstrip() for line in text[text.index("not recognized") :].splitlines()]
    assert lines[1:] == [
        "  1 parameters are used outside blocks",
        "  no role is declared for embed",
        "    repair: declare it",
        "    def build():",
        "        return Model(net)",
    ]
    assert "not recognized" not in shown(replace(SURVEY, notes=(), advice=()))


def test_a_model_whose_forward_fails_is_shown_as_the_tree_has_it():
    text = shown(replace(SURVEY, diagnostics=(Diagnostic("it fails", "repair it"),)))
    assert "blocks, in the order of the module tree" in text
    assert "dropout" not in text


def test_a_model_without_special_cases_says_none():
    text = shown(
        replace(
            SURVEY,
            blocks=SURVEY.blocks[:1],
            tied_params=(),
            num_captured=(),
            attention="",
            glue_params=(),
            written_buffers=(),
        )
    )
    assert "tied parameters  none" in text
    assert "side channels    none" in text
    assert "no attention call that could be replaced was found" in text
    assert "glue" not in text


def test_the_json_holds_the_same_and_the_width():
    plain = json.loads(json.dumps(model_report_dict(SURVEY, 4)))
    assert plain["bytes_per_element"] == 4
    assert plain["blocks"][1]["num_block_calls"] == 4
    assert plain["advice"][0]["fix"].startswith("declare it")
