"""Small data of every kind, and tokenizers trained from scratch, for the tests of data."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.data.data_loader import Dataset, LocalBatches, open_dataset, open_local_batches
from tests.paper_model import SyntheticModel

END, CUE = "<|end|>", "<|assistant|>"
# The same conversation format twice: once it tells what the assistant says, once it does not.
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Forgets all but the last answer, as templates of reasoning models do with what was thought.
FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}...{% else %}{{ m['content'] }}{% endif "
    "%}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = Path(json.__file__).read_text()[:4000]
TALKS = [
    [{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]
    for n in range(9)
]


def tokenizer(folder: Path, template: str = "", *, end: str | None = END, size: int = 330) -> str:
    """`folder`, with the files of a byte-level BPE tokenizer of about `size` tokens in it, and `template` for
    conversations.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [END, CUE, "<|user|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    return str(folder)


def jsonl(path: Path, rows: Iterable[Mapping[str, object] | str]) -> str:
    """`rows` written to `path`, one per line; a text stands for itself. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(source: DataConfig, folder: Path) -> Dataset:
    """The samples of `source`; tokens are kept in `folder`/cache."""
    return open_dataset(source, None, folder / "cache")


def samples(data: Dataset, ids: Iterable[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Inputs and labels of each sample, as plain values."""
    batch = data.batch(list(ids))
    return [
        (tuple(x), tuple(y))
        for x, y in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    ]


def local_batches_of(data: Dataset, ranks: int, source: DataConfig, train: TrainConfig) -> list[LocalBatches]:
    """The local batches of each of `ranks` data-parallel ranks over `data`."""
    strategies = (BatchSplit(), DDP()) if ranks > 1 else ()
    job = Job(ModelConfig("m.py:f"), source, train)
    plan = Plan.make(job, Mesh(dp_replicate=ranks), SyntheticModel().model_spec, strategies, 0)
    return [open_local_batches(data, plan, rank) for rank in range(ranks)]
