"""What surrounds the training and changes no number."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.errors import Fault


@dataclass(frozen=True)
class Run:
    """What surrounds the training and changes no number: where it writes, how often it saves, what it shows.

    A checkpoint is saved every `save_every` steps (0: only at the end) and the newest `keep` stay. After the last
    step, `sample_tokens` tokens are generated from `sample_prompt`.
    """

    folder: str = "runs/default"
    save_every: int = 100
    keep: int = 3
    sample_prompt: str = "def "
    sample_tokens: int = 0

    def faults(self) -> Iterator[Fault]:
        if self.save_every < 0:
            yield Fault(f"save_every = {self.save_every}", "0 saves only at the end; 100 every 100 steps", "run.save_every")
        if self.keep < 1:
            yield Fault(f"keep = {self.keep}: no checkpoint would stay", "keep at least 1", "run.keep")
