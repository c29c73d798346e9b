"""Generates a short text with a trained model, so that a user can read what it learned."""

import torch
from torch import nn

from meshwright.model.loss.token_cross_entropy import get_logits
from meshwright.model.tensors.counter_rng import derive_key, uniform
from meshwright.run.data.tokenizer import ByteTokenizer, Tokenizer


def sample_text(
    module: nn.Module,
    prompt: str,
    num_tokens: int,
    context: int,
    seed: int,
    temperature: float = 0.7,
    tokenizer: Tokenizer | None = None,
) -> str:
    """Returns `prompt` continued by `num_tokens` tokens, sampled at `temperature` with a context of
    `context` tokens.

    `tokenizer` None stands for bytes. The same seed gives the same text.
    """
    was_training = module.training
    device = next(module.parameters()).device
    tokenizer = tokenizer or ByteTokenizer()
    tokens = tokenizer.encode([prompt or "\n"])[0].tolist() or [tokenizer.eos_token_id or 0]
    module.eval()
    try:
        with torch.no_grad():
            for number in range(num_tokens):
                ids = torch.tensor([tokens[-context:]], device=device)
                scores = get_logits(module(input_ids=ids))[0, -1].double() / temperature
                reached = scores.softmax(-1).cumsum(-1)
                drawn = uniform(derive_key(seed, "sample", number), 0, 1, torch.float64, device)
                tokens.append(min(int(torch.searchsorted(reached, drawn).item()), len(reached) - 1))
    finally:
        module.train(was_training)
    text = tokenizer.decode(tokens)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
