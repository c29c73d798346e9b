"""Describes what is trained, independent of the number of devices.

Modules:

    data_source          the model and the data: ModelConfig, DataConfig, MixturePart
    errors               Diagnostic, PlanError, CollectiveError, and texts for repairs
    field_constraints    allowed values beside the fields of configs
    job                  Job and its tables: optimizer, schedule, training, evaluation, loss guard
    precision            a dtype per role
    run_options          RunConfig and WaitLimits: options that change no result
"""
