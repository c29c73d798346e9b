"""Writes a file atomically: a reader sees the old or the new one, never a part."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically and makes its folder: a reader sees the old or the new file. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
