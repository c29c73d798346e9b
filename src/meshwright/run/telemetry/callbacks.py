"""Callbacks: user functions that run around the steps. They observe the run, log it elsewhere, or stop it.

A callback is a value that holds functions, named like those of transformers' TrainerCallback. Each is called
on rank 0 with a `CallbackEvent`. If one returns STOP, all ranks stop together after the next step, with a
checkpoint, as after SIGTERM. If one raises, the run ends like after any other error.

    def low_enough(event: CallbackEvent) -> StopRequest:
        return "stop" if event.evaluation["loss"] < 2 else None

    meshwright.train(trainer, data, eval_data=other_data, callbacks=[Callback(on_evaluate=low_enough)])
    meshwright.Model(module, callbacks=[...])                    from a factory: `meshwright train` calls them
                                                                 too
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

StopRequest = Literal["stop"] | None
STOP: StopRequest = "stop"


@dataclass(frozen=True)
class StepRecord:
    """The metrics of a step, its speed over all ranks, and the memory of this rank in bytes.

    `seconds` is the time of the whole step, `data_s` the part spent waiting for data, `save_s` the time of
    saving since the previous record. `flops_per_s` counts all ranks, `mfu` is the fraction of their peak;
    None if unknown. `noise_scale` is the gradient noise scale in samples, if the job measures it. With
    float16, `loss_scale` is the scale of the next step, and `overflow` says that this step was skipped
    because gradients overflowed. With experts, `busiest_expert` and `busiest_rank` are the largest load over
    the mean load, in the layer where that is most, and `dropped_share` is that of all choices; None: no
    experts, or each rank has all. Where sites train apart, the record is of the first site, and a step that
    ends a round has the loss and the tokens of all sites in that round: `round_loss`, `round_tokens`.
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
    busiest_expert: float | None = None
    busiest_rank: float | None = None
    dropped_share: float | None = None
    round_loss: float | None = None
    round_tokens: int | None = None


@dataclass(frozen=True)
class CallbackEvent:
    """The argument of a callback: the step, and its record, evaluation result or checkpoint folder.

    `evaluation` holds loss and tokens, and perplexity if the loss is per token, and the metrics of tasks
    (`hellaswag/acc`); `is_best` says that its loss is the best so far. `spike` is the reason why the loss
    guard skipped the step, or "".
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
    """Functions to call when training begins, after each step, evaluation and save, and at the end; None: no
    function.
    """

    on_train_begin: CallbackFunction | None = None
    on_step_end: CallbackFunction | None = None
    on_evaluate: CallbackFunction | None = None
    on_save: CallbackFunction | None = None
    on_train_end: CallbackFunction | None = None


def call_callbacks(functions: Iterable[CallbackFunction | None], event: CallbackEvent) -> StopRequest:
    """Calls each of `functions` with `event`; returns STOP if one of them does."""
    requests = [function(event) for function in functions if function is not None]
    return STOP if STOP in requests else None
