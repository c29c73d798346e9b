"""Writes the tokenizer that a model was trained with into its folder, and its special tokens into the config.

    trained with                          written
    the tokenizer in the model's folder   its files, copied
    another one                           as transformers saves it, its chat template included
    bytes                                 a tokenizer.json with one token per byte: the id is the byte

With another tokenizer than that of the folder, the special tokens of the config (eos, bos, pad) and its
generation settings are of no use: their ids would be other words. They become those of the tokenizer.

In the tokenizer.json of bytes, the id of the zero byte is the end of a text (`<|endoftext|>`): no text has
that byte. `split_special_tokens` lets a text that spells this name out be read as bytes too, as in training.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from meshwright.model.hf.tokenizer_files import tokenizer_files
from meshwright.run.data.tokenizer import ByteTokenizer, PretrainedTokenizer, Tokenizer

END_OF_TEXT = "<|endoftext|>"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
GENERATION_FILE = "generation_config.json"


def companion_files(folder: Path | None, *, with_tokenizer: bool, remote: bool) -> Iterator[Path]:
    """Yields the files next to a model's config in `folder` that its export keeps.

    Without `with_tokenizer`, those of the tokenizer and the generation settings are left out. `remote` adds
    the code of the repository.
    """
    if folder is None:
        return
    kept = (*PROCESSOR_FILES, GENERATION_FILE) if with_tokenizer else PROCESSOR_FILES
    yield from (folder / name for name in kept if (folder / name).is_file())
    yield from tokenizer_files(folder) if with_tokenizer else ()
    yield from folder.glob("*.py") if remote else ()


def copy_files(paths: Iterator[Path], folder: Path) -> None:
    """Copies the files `paths` into `folder`."""
    for path in paths:
        shutil.copyfile(path, folder / path.name)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files of `tokenizer` into `folder`, which `transformers.AutoTokenizer` then loads."""
    _hf_tokenizer(tokenizer).save_pretrained(folder)


def use_special_tokens(config: Any, tokenizer: Tokenizer) -> None:
    """Replaces the ids of special tokens in a transformers or generation config by those of `tokenizer`."""
    hf_tokenizer = _hf_tokenizer(tokenizer)
    config.eos_token_id = hf_tokenizer.eos_token_id
    config.bos_token_id = hf_tokenizer.bos_token_id
    config.pad_token_id = hf_tokenizer.pad_token_id


def _hf_tokenizer(tokenizer: Tokenizer) -> Any:
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.hf_tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        return _byte_tokenizer()
    raise TypeError(f"{type(tokenizer).__name__} cannot be written; add its files to {__name__}")


def _byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = _byte_letters()
    vocabulary = {END_OF_TEXT: 0} | {letter: byte for byte, letter in enumerate(letters) if byte}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """Returns the letter for each byte in the alphabet of byte-level tokenizers (GPT-2): itself if it can be
    printed, else one of the 68 letters from U+0100 on.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
