"""Generates a short text with a model in training, so that a user can read what it learned."""

from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.run.data.tokenizer import ByteTokenizer, Tokenizer
from meshwright.run.training.trainer import Trainer


def sample_text(
    trainer: Trainer,
    prompt: str,
    num_tokens: int,
    context: int,
    seed: int,
    temperature: float = 0.7,
    tokenizer: Tokenizer | None = None,
) -> str:
    """Returns `prompt` continued by `num_tokens` tokens, drawn at `temperature`; all ranks call it.

    At most `context` tokens go through the model at once; a longer text goes on from its last half.
    `tokenizer` None stands for bytes. The same seed gives the same text.
    """
    tokenizer = tokenizer or ByteTokenizer()
    tokens = tokenizer.encode([prompt or "\n"])[0].tolist() or [tokenizer.eos_token_id or 0]
    end = len(tokens) + num_tokens
    while len(tokens) < end:
        given = tokens[-context:] if len(tokens) < context else tokens[-max(1, context // 2) :]
        params = SamplingParams(
            max_new_tokens=min(end - len(tokens), max(1, context - len(given))),
            do_sample=True,
            temperature=temperature,
            stop_token_ids=(),
            seed=seed + len(tokens),  # positions repeat where the text goes on
        )
        (answer,) = trainer.generate([given], params)
        tokens += answer.tokens
    text = tokenizer.decode(tokens)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
