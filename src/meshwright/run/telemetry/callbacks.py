"""What others may do around the steps of a run: watch it, write it down elsewhere, ask it to stop.

A callback is a value that holds functions, named as transformers' TrainerCallback names them; each is called on rank 0
with the `Moment` it is about. One that returns STOP asks for the end of the run: all ranks stop together after the next
step, with a checkpoint, as after SIGTERM. One that raises ends the run as any other error does.

    def low_enough(moment: Moment) -> Wish:
        return "stop" if moment.evaluation["loss"] < 2 else None

    meshwright.train(engine, data, held_out=others, callbacks=[Callback(on_evaluate=low_enough)])
    meshwright.Model(module, callbacks=[...])                    from a factory: the command calls them too
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

StopRequest = Literal["stop"] | None
STOP: StopRequest = "stop"


@dataclass(frozen=True)
class StepRecord:
    """What is known after a step: the metrics, how fast it went (all ranks), and this rank's memory in bytes.

    `seconds` are those of the whole step, `data_s` what of them went into waiting for data, `save_s` what saving took since
    the line before. `flops_per_s` counts all ranks, `mfu` is its share of their peak; None where that is not known.
    `noise_scale` is the gradient noise scale in samples, where the job asks for it and it is known. Where something is float16,
    `loss_scale` is that of the next step, and `overflow` tells that this one was left out because gradients left its range.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_s: float
    memory: int
    skipped: bool = False
    data_s: float = 0.0
    save_s: float = 0.0
    flops_per_s: float | None = None
    mfu: float | None = None
    noise_scale: float | None = None
    overflow: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True)
class CallbackEvent:
    """Where a run is: its step, and what there is to say of it: the line of a step, an evaluation, a checkpoint's folder.

    `evaluation` holds loss and tokens, and perplexity where the loss is one per token; `best` says that it is the best so
    far. `spike` is why the guard left the step out, in words.
    """

    step: int
    step_record: StepRecord | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    is_best: bool = False
    spike: str = ""
    checkpoint: Path | None = None


CallbackFunction = Callable[[CallbackEvent], StopRequest]


@dataclass(frozen=True)
class Callback:
    """Functions to call when the training begins, after each step, evaluation and save, and at the end; None: do not."""

    on_train_begin: CallbackFunction | None = None
    on_step_end: CallbackFunction | None = None
    on_evaluate: CallbackFunction | None = None
    on_save: CallbackFunction | None = None
    on_train_end: CallbackFunction | None = None


def call_callbacks(functions: Iterable[CallbackFunction | None], event: CallbackEvent) -> StopRequest:
    """Call each of `heard` with `moment`; STOP when one of them asks for it."""
    wishes = [each(event) for each in functions if each is not None]
    return STOP if STOP in wishes else None
