"""Save and restore, and copies from pinned and pageable memory."""

from functools import partial
from time import perf_counter

import torch

from benchmarks.gpu.llamas import BF16, LlamaSize, make_llama_plan, open_trainer, saved_tensors
from benchmarks.gpu.setting import Setting, same_bits, seconds_of
from meshwright.device.local_device import platform_of

LARGE, TINY = LlamaSize(1024, 4, 8, 16000, 2, 256), LlamaSize(48, 2, 4, 64, 2, 16)
COPY_NBYTES, TINY_COPY_NBYTES = 1 << 28, 1 << 16


def checkpoint(setting: Setting) -> dict[str, object]:
    """Returns seconds and bytes per second of save and load; a loaded state must have the saved bits."""
    size = setting.size(LARGE, TINY)
    plan = make_llama_plan(size, BF16, micro_batch=size.batch)
    with open_trainer(size, plan, setting.device) as trainer:
        trainer.step(trainer.local_batch(size.samples()))
        start = perf_counter()
        path = trainer.save(setting.folder)
        save_s = perf_counter() - start
        setting.keep({"save_s": save_s})
        saved = saved_tensors(trainer)
    del trainer
    with open_trainer(size, plan, setting.device) as trainer:
        start = perf_counter()
        trainer.load(path)
        load_s = perf_counter() - start
        is_same = same_bits(saved, saved_tensors(trainer))
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    rates = {"save_bytes_per_s": nbytes / save_s, "load_bytes_per_s": nbytes / load_s}
    times = {"save_s": save_s, "load_s": load_s}
    return {"ok": is_same, "bytes": nbytes, **times, **rates, "copies_bytes_per_s": _copies(setting)}


def _copies(setting: Setting) -> dict[str, float]:
    nbytes = setting.size(COPY_NBYTES, TINY_COPY_NBYTES)
    there = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    rates = {}
    for pinned in (False, True) if platform_of(setting.device).can_pin_memory else (False,):
        here = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
        for way, target, source in (("to", there, here), ("from", here, there)):
            copy = partial(target.copy_, source, non_blocking=True)
            word = f"{way} the device, {'pinned' if pinned else 'pageable'}"
            rates[word] = nbytes / seconds_of(copy, setting.device, 3)
    return rates
