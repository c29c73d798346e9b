"""Implementation of the commands, without argument parsing.

bench_device           bench device: measures a device, writes device.toml
bench_network          bench network: measures the links, writes cluster.toml
doctor                 doctor: checks this host and the ranks of a job
scheduler_script       launch: writes the job file of a plan
plan                   plan: resolves a config, predicts its step time
inspect_model          inspect: describes the model of a config
predict                predicts the step time of a plan on named hardware
report                 report: writes the HTML report of a run
search                 search: chooses a plan for a model and a machine
config_help            init, config: writes a commented config, explains keys
import_config          import-config: reads configs of other libraries
train                  train: starts the local ranks, or trains as one
serving                serve, board: a model answers over HTTP; runs on a page
python_train_loop      meshwright.train: the training loop for a Trainer
verify                 verify: compares a plan with one device
export_import_convert  export, import, convert
"""
