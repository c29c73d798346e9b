"""The models of the benchmarks, and training steps of some of them.

analysis_cost   CPU seconds and forwards of an analysis, before and after
compiled_parity parity of compiled blocks with one device, for the models of `hf_defaults`
custom_models   a model file as a user would write it, for models that do not take plain text
dropout_kernels kernels of a dropout mask on a GPU, counted on fake tensors
head_batches    batches of the collators of transformers
head_families   the models with a head of `hf_defaults`
hf_defaults     models with a head and no loss stated: their own loss, and every plan
host_reads      reads of the device by the host in a step, counted on fake tensors
llama_steps     training steps of small Llamas: plain loop, DDP, FSDP2, DeepSpeed, ours
model_coverage  parity with one device for unmodified model families
model_families  the families of `model_coverage`
synthetic_models    model shapes without values, of any size
"""
