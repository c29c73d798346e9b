"""Benchmarks: one module per claim writes `benchmarks/results/NAME.json` (`make bench NAME=zero_vs_torch`).

engine_overhead     step time of the engine on one device, against a plain PyTorch loop
compiled_overhead   steps with compiled blocks beside loops with compiled layers
interface_overhead  time that our interface adds to a call of the backend, and the ledger to a step
mutants             the share of planted faults that the test suite notices
nearest_tests       orders test files by their distance to a module
trainer_parity      MeshwrightTrainer beside transformers' Trainer
startup             CPU seconds of a run of one step, beside a bare torchrun script
suite_tiers         chooses the cases of the default tier of the test suite
comm/               all-reduce, hosts, transports
compression/        gradients, weights and activations as codes
context_parallel/   ring attention, Ulysses
data_parallel/      DDP and ZeRO
experts/            experts on different ranks
fake_devices/       plans on fake CUDA tensors: what a rank asks of a GPU
first_hour/         mistakes of a new user, and what is said to them
generation/         answers of models in training beside one device
gpu/                sections that run where a GPU is
harness/            measurement methods, and the format of results
memory/             techniques that need less memory
models/             the models that benchmarks train
outer/              rounds of sites, servers
pipeline/           pipeline schedules
planner/            the planner's predictions
published_runs/     runs that others published
races/              operations of several streams on one storage
random_plans/       random plans beside one device
recovery/           kills, hangs, restarts
tensor_parallel/    tensor parallelism
"""
