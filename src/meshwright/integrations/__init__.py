"""Trainers of other libraries that run any plan.

transformers          MeshwrightTrainer: transformers' Trainer, its arguments, callbacks and files
training_arguments    from TrainingArguments to a job; refuses, all at once, what a plan cannot honor
model_on_ranks        the user's model under a plan: analysis, plan, and this rank's part
global_batches        samples in the order of transformers' samplers, shared among data ranks
prediction_loop       evaluation and prediction as transformers does it, each sample once
lm_eval               MeshwrightLM: tasks of lm-evaluation-harness on the model in training
lm_eval_tasks         tasks that a config names: refusals, and their metrics at each evaluation
released_parameters   the memory of the user's model while ranks train it, and its values afterwards

Each imports its library, which need not be installed for the rest of meshwright.
"""
