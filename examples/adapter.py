"""The small Llama of examples/llama-small.json with low-rank adapters; needs `pip install
'meshwright[adapters]'`.
"""

from pathlib import Path

import peft
import transformers
from torch import nn


def build() -> nn.Module:
    """The model; the values of its base come from model.weights."""
    config = transformers.AutoConfig.from_pretrained(
        Path(__file__).with_name("llama-small.json"), use_cache=False
    )
    base = transformers.AutoModelForCausalLM.from_config(config)
    lora = peft.LoraConfig(
        r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.05, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, lora)
