"""Describes what is trained, independent of the number of devices.

Modules:

    data_config                DataConfig and MixturePart: where the data come from
    errors                     Diagnostic, PlanError, CollectiveError, and texts for repairs
    field_constraints          allowed values beside the fields of configs
    file_format                format and version of the files of runs, and their refusal
    job                        Job and its tables: optimizer, lr_schedule, training, evaluation, loss guard
    model_config               ModelConfig: where the model and its initial weights come from
    precision                  a dtype per role
    python_file                imports a file that a config names: file.py:name
    checkpoint_logging_config  RunConfig: options of a run that change no result
    timeouts                   WaitLimits: how long one wait for another rank may last, by phase
"""
