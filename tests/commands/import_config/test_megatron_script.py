"""Arguments in a shell script: variables, arrays and products are followed, nothing is run."""

from pathlib import Path

import pytest

from meshwright.commands.import_config.megatron_script import read_arguments
from meshwright.plan.job.errors import PlanError


def test_a_list_of_arguments_is_read_with_flags_and_lists():
    text = "--num-layers 4 \\\n  --bf16 --cp-comm-type p2p a2a --lr=3e-4  # a comment\n--save '/a b'"
    assert read_arguments(text, "") == {
        **{"num-layers": "4", "bf16": True, "cp-comm-type": ["p2p", "a2a"]},
        **{"lr": "3e-4", "save": "/a b"},
    }


def test_variables_arrays_and_products_are_followed():
    text = """
    GPUS=8
    NODES=${NODES:-2}
    WORLD=$(($GPUS * $NODES))
    ARGS="--num-layers 4 \\
          --hidden-size 8"
    MODEL=(
        --seq-length 16   # tokens
        --moe-layer-freq ([0]*3+[1]*2)
        --train-iters $WORLD
    )
    MODEL+=(--bf16)
    torchrun --nproc_per_node $GPUS pretrain_gpt.py $ARGS "${MODEL[@]}" \\
        --global-batch-size $((4*WORLD)) | tee log --x
    """
    assert read_arguments(text, "") == {
        **{"nproc_per_node": "8", "num-layers": "4", "hidden-size": "8", "seq-length": "16", "bf16": True},
        **{"moe-layer-freq": "([0]*3+[1]*2)", "train-iters": "16", "global-batch-size": "64"},
    }


def test_a_value_that_the_script_computes_stays_a_variable():
    found = read_arguments("SAVE=$1\nNOW=$(date +%s)\npython x.py --save $SAVE --seed $NOW --lr ${LR}", "")
    assert found == {"save": "$1", "seed": "$OUTPUT_OF_A_COMMAND", "lr": "${LR}"}


def test_nothing_of_a_script_is_run(tmp_path: Path):
    target = tmp_path / "made"
    read_arguments(f"X=$(touch {target})\n`touch {target}`\npython x.py --seed $X", "")
    assert not target.exists()


def test_a_file_with_arrays_alone_is_read():
    assert read_arguments("ARGS=(--num-layers 4 --bf16)", "") == {"num-layers": "4", "bf16": True}


@pytest.mark.parametrize("text", ["echo hello", "python x.py 'open"])
def test_a_file_without_arguments_is_refused_with_the_repair(text: str):
    with pytest.raises(PlanError, match=r"repair: (name the script|balance its quotes)"):
        read_arguments(text, "x.sh")
