"""lm-evaluation-harness on the model in training, under any plan and without a second copy of its weights.

    lm = MeshwrightLM(trainer, tokenizer)
    found = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])        on every rank

    texts of a task                  on every rank, the same
      loglikelihood            -->   trainer.logprobs: log-probabilities of each continuation
      loglikelihood_rolling    -->   the same, of the windows of a text
      generate_until           -->   trainer.generate, with stop strings
    numbers of the task              on every rank, the same

The harness takes each rank for a process of its own that has all requests, as it does for tensor parallelism;
ranks along the data axes divide them. Texts become tokens, windows and answers as in the harness's own class
for models of transformers (`HFLM`), by its own functions, so the numbers are those of that class on one
device. Log-probabilities are summed in float64 (`HFLM`: in the dtype of the logits, or `softmax_dtype`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from meshwright.engine.generation.sampling_params import READ_WHEN_DRAWN, SamplingParams, end_tokens
from meshwright.model.hf.declared_tp_plan import config_of
from meshwright.plan.job.errors import PlanError
from meshwright.run.training.trainer import Trainer

LOCATION = "lm_eval"

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
        resolve_max_length,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    text = f"lm-evaluation-harness, which evaluates by tasks, cannot be imported: {error}"
    raise PlanError(text, fix='pip install "meshwright[lm-eval]"', location=LOCATION) from error

SAMPLING_NAMES = ("do_sample", "repetition_penalty", *READ_WHEN_DRAWN)  # as transformers has them
EncodedRequest = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


class MeshwrightLM(TemplateLM):
    """The model that `trainer` trains, as lm-evaluation-harness calls it.

    All ranks make one, and evaluate the same tasks.

    Args:
        tokenizer: that of the model.
        batch_size: sequences that a rank computes at once.
        max_length: the most tokens of a sequence, of which longer ones keep the end; None: what the config of
            the model says, or else the tokenizer.
        max_gen_toks: the most tokens of an answer, for tasks that state no number.
        decode_context_parallel: whether ranks along cp divide the keys and values of an answer.
    """

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        decode_context_parallel: bool = False,
    ) -> None:
        super().__init__()
        self._trainer, self.batch_size = trainer, batch_size
        self.tokenizer: Any = tokenizer
        self.max_length = max_length or resolve_max_length(config_of(trainer.module), tokenizer)
        self.max_gen_toks = max_gen_toks
        self._divides = decode_context_parallel
        if tokenizer.eos_token_id is None:
            text = f"the tokenizer {tokenizer.name_or_path!r} names no end token (eos_token)"
            raise PlanError(text, fix='set one: tokenizer.eos_token = "</s>"', location=LOCATION)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, for files of the harness."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the token ids of a text, without a second begin token."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a chat."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, in windows of `max_length` tokens: each token once."""
        windows = [list(self._windows(*request.args)) for request in requests]
        found = iter(self._loglikelihood_tokens([each for row in windows for each in row]))
        totals = [sum(next(found)[0] for _ in row) for row in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answer to each request, up to the first of its stop strings."""
        answers: list[str] = [""] * len(requests)
        numbers_by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            numbers_by_options.setdefault(repr(request.args[1]), []).append(number)
        for numbers in numbers_by_options.values():
            contexts = [requests[number].args[0] for number in numbers]
            texts = self._continue(contexts, requests[numbers[0]].args[1])
            for number, answer in zip(numbers, texts, strict=True):
                answers[number] = answer
                self.cache_hook.add_partial("generate_until", requests[number].args, answer)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[EncodedRequest], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        prompts, answers = [], []
        for _, context, continuation in requests:
            kept = [*context, *continuation][-(self.max_length + 1) :]
            prompts.append(kept[: -len(continuation)])
            answers.append(continuation)
        scored = self._trainer.logprobs(prompts, answers, batch_size=self.batch_size)
        found = [(sum(each.logprobs), each.is_greedy) for each in scored]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def _windows(self, text: str) -> Iterator[EncodedRequest]:
        for window in get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        ):
            yield None, *make_disjoint_window(window)

    def _continue(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Returns the answers to `contexts`, all under the `options` of a task."""
        given = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        end_text = self.tokenizer.decode(self.eot_token_id)
        stops = handle_stop_sequences(given.pop("until"), eos=end_text)
        most = given.pop("max_gen_toks")
        if most >= self.max_length:
            problem = f"max_gen_toks = {most}, and the model has {self.max_length} positions for all tokens"
            raise PlanError(problem, fix="state fewer in generation_kwargs of the task", location=LOCATION)
        params = self._sampling_params(given, most, tuple(each for each in stops if each))
        prompts = [self.tok_encode(each)[-(self.max_length - most) :] for each in contexts]
        found = self._trainer.generate(
            prompts,
            params,
            max_num_seqs=self.batch_size,
            tokenizer=self.tokenizer,
            decode_context_parallel=self._divides,
        )
        texts = [self.tokenizer.decode(each.tokens, skip_special_tokens=True) for each in found]
        return [postprocess_generated_text(each, stops, think_end_token=None) for each in texts]

    def _sampling_params(
        self, options: dict[str, Any], max_new_tokens: int, stop_strings: tuple[str, ...]
    ) -> SamplingParams:
        """Returns `options` of transformers' `generate`; those of a draw are left out where none is made.

        Raises PlanError for options that are not known.
        """
        unknown = sorted(set(options).difference(SAMPLING_NAMES))
        if unknown:
            problem = (
                f"the task generates with {', '.join(unknown)}; known are {', '.join(sorted(SAMPLING_NAMES))}"
            )
            raise PlanError(problem, fix="leave them out of its generation_kwargs", location=LOCATION)
        if not options["do_sample"]:
            options = {name: value for name, value in options.items() if name not in READ_WHEN_DRAWN}
        ends = end_tokens(self._trainer.module, SamplingParams()) or ()
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            stop_strings=stop_strings,
            stop_token_ids=(*ends, self.eot_token_id),
            **options,
        )
