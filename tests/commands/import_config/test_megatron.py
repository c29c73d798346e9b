"""Megatron-LM arguments: layout, schedule, precision, and the model that they describe."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from meshwright.commands.import_config.import_config import import_config, write_imported_config
from meshwright.commands.plan import resolve_config
from tests.command_line import TEXT
from tests.commands.import_config.imported import imported, row, strategies

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 64 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --vocab-size 250 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --group-query-attention "
    "--num-query-groups 2 --make-vocab-size-divisible-by 64 "
)
TRAIN = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 10 --bf16 --clip-grad 0.5 --weight-decay 0.1 "
    "--adam-beta2 0.95 --log-interval 1 "
)
LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer "
)
SCRIPT = f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {MODEL} {TRAIN} {LAYOUT}"


def test_a_script_becomes_a_config_and_a_model_that_plan_accepts(tmp_path: Path):
    script, corpus, out = tmp_path / "run.sh", tmp_path / "corpus.txt", tmp_path / "config.toml"
    script.write_text(SCRIPT)
    corpus.write_text(TEXT)
    result = import_config(script, "", "", str(corpus), 0)
    assert result.is_complete, [each for each in result.options if each.verdict in ("refused", "unknown")]
    files = write_imported_config(result, out)
    model = AutoConfig.from_pretrained(files[1])
    assert (model.model_type, model.vocab_size, model.num_key_value_heads) == ("llama", 256, 2)
    plan = resolve_config(out, [], None)[1].plan
    assert str(plan.mesh) == "pp 2 x dp_shard 2 x tp 2"
    job = plan.job
    assert (job.train.batch, plan.micro_batch, job.train.seed, job.train.clip) == (8, 1, 1234, 0.5)
    assert (job.lr_schedule.name, job.lr_schedule.warmup, job.lr_schedule.floor) == ("cosine", 10, 0.1)
    assert (job.precision.gradients, job.precision.reduce) == ("float32", "float32")
    assert job.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("", ["batch_split", "ddp"]),
        ("--use-distributed-optimizer", ["batch_split", "zero"]),
        ("--context-parallel-size 2", ["ring", "batch_split", "ddp"]),
        ("--context-parallel-size 2 --cp-comm-type a2a", ["ulysses", "batch_split", "ddp"]),
        ("--tensor-model-parallel-size 2", ["tensor_parallel", "vocab_parallel", "batch_split", "ddp"]),
        (
            "--recompute-granularity full --recompute-method uniform",
            ["activation_checkpointing", "batch_split", "ddp"],
        ),
    ],
)
def test_arguments_become_strategies(tmp_path: Path, arguments: str, names: list[str]):
    assert strategies(imported(tmp_path, "a.sh", f"{MODEL}{TRAIN}{arguments}", devices=8)) == names


def test_virtual_stages_are_those_of_a_rank(tmp_path: Path):
    text = f"{MODEL}{TRAIN}--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    pipeline = imported(tmp_path, "a.sh", text, devices=2).document["strategies"][0]
    assert pipeline == {"name": "pipeline", "schedule": "interleaved", "virtual_stages": 2}


def test_defaults_of_megatron_are_written(tmp_path: Path):
    result = imported(tmp_path, "a.sh", "--micro-batch-size 2 --lr 1e-3 --train-iters 10", devices=2)
    assert result.document["optimizer"] == {
        **{"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        "betas": [0.9, 0.999],
    }
    assert result.document["lr_schedule"]["name"] == "linear"
    assert result.document["train"]["seed"] == 1234
    assert result.document["train"]["batch"] == 4
    assert row(result, "adam-beta2 (default)") == "mapped: optimizer.betas = [0.9, 0.999]"


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        ("--num-experts 8", "num-experts", "refused: mixture-of-experts"),
        (
            "--expert-model-parallel-size 1",
            "expert-model-parallel-size",
            "dropped: this value turns nothing on",
        ),
        ("--optimizer-cpu-offload", "optimizer-cpu-offload", "mapped: offload.what = ['optimizer_states']"),
        ("--offload-optimizer-states", "offload-optimizer-states", "mapped: offload.what"),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            "optimizer-offload-fraction",
            "refused: optimizer states rest on the host all together or not at all",
        ),
        (
            "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
            "overlap-cpu-optimizer-d2h-h2d",
            "dropped: a setting of --optimizer-cpu-offload",
        ),
        (
            "--cpu-offloading-num-layers 2",
            "cpu-offloading-num-layers",
            "refused: what leaves the device is not chosen by module",
        ),
        (
            "--fine-grained-activation-offloading",
            "fine-grained-activation-offloading",
            "refused: what leaves the device is not chosen by module",
        ),
        (
            "--rampup-batch-size 16 8 300",
            "rampup-batch-size",
            "refused: the batch is fixed -> set train.batch",
        ),
        ("--fp8-format hybrid", "fp8-format", "refused: float8"),
        ("--data-path $DATA", "data-path", "refused: Megatron's .bin and .idx files"),
        ("--load ckpt", "load", "refused: Megatron's checkpoints are not read"),
        ("--seed $RANDOM", "seed", "refused: the script computes the value when it runs -> set train.seed"),
        ("--save $1", "save", "dropped: the script computes the value when it runs; set run.folder"),
        ("--lr-decay-iters 50", "lr-decay-iters", "refused: the cosine decay ends after 50 steps"),
        ("--recompute-activations", "recompute-activations", "dropped: fused attention keeps no scores"),
        (
            "--recompute-granularity full --recompute-num-layers 2",
            "recompute-num-layers",
            "refused: written is that",
        ),
        ("--no-such-thing 3", "no-such-thing", "unknown: "),
        ("--overlap-grad-reduce", "overlap-grad-reduce", "dropped: how communication overlaps"),
    ],
)
def test_other_arguments_are_refused_or_dropped_with_the_reason(
    tmp_path: Path, arguments: str, option: str, message: str
):
    assert row(imported(tmp_path, "a.sh", f"{TRAIN}{arguments}", devices=2), option).startswith(message)


def test_a_gpt_2_has_its_dropout_and_another_architecture_is_refused(tmp_path: Path):
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 256 --seq-length 16 "
    model = imported(tmp_path, "a.sh", sizes + TRAIN, devices=1).model
    assert model is not None
    assert (model["model_type"], model["resid_pdrop"], model["n_positions"]) == ("gpt2", 0.1, 16)
    strange = imported(tmp_path, "a.sh", f"{sizes}{TRAIN}--swiglu", devices=1)
    assert strange.model is None
    assert row(strange, "normalization").startswith("refused: neither a Llama nor a GPT-2")
    assert "model.source" in strange.missing


def test_residual_dropout_of_a_llama_is_refused_because_it_has_none(tmp_path: Path):
    result = imported(tmp_path, "a.sh", MODEL.replace("--hidden-dropout 0 ", "") + TRAIN, devices=1)
    assert row(result, "hidden-dropout").startswith("refused: dropout of 0.1 in the residual stream")


def test_a_model_that_is_named_replaces_the_arguments(tmp_path: Path):
    script = tmp_path / "a.sh"
    script.write_text(SCRIPT)
    (tmp_path / "m.json").write_text(json.dumps({"model_type": "llama"}))
    result = import_config(script, "", str(tmp_path / "m.json"), "", 0)
    assert result.model is None
    assert row(result, "num-layers") == "dropped: the model is that of --model"
    assert result.document["model"]["source"] == str(tmp_path / "m.json")


@pytest.mark.parametrize(
    ("arguments", "step_on"),
    [
        ("--optimizer-cpu-offload --optimizer-offload-fraction 1.0 --overlap-cpu-optimizer-d2h-h2d", "host"),
        ("--offload-optimizer-states", "device"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0", None),
        ("--optimizer-offload-fraction 1.0", None),
    ],
)
def test_optimizer_states_on_the_cpu_are_stepped_where_megatron_steps_them(
    tmp_path: Path, arguments: str, step_on: str | None
):
    """Those of megatron/core/optimizer/optimizer_config.py, 2025."""
    (tmp_path / "run.sh").write_text(f"{SCRIPT} {arguments}")
    result = import_config(tmp_path / "run.sh", "", "", "", 0)
    assert result.is_complete
    found = [each for each in result.document["strategies"] if each["name"] == "offload"]
    expected = {"name": "offload", "what": ["optimizer_states"], "step_on": step_on}
    assert found == ([expected] if step_on else [])
