"""Plans a training step: what is trained, how its tensors are sharded, and which actions each rank executes;
and what generation does with the same shards.

Standard library only; nothing here imports torch.

    job                     what is trained: model, data, optimizer, precision, options of a run, errors
    model_spec              the description of a model: blocks, parameters, layer calls, costs
    sharding                the mesh, placements, parameter groups, the local share of each rank
    step                    the actions of a step: forward, backward, reductions, optimizer, simulation
    hardware                devices and networks: specifications and measurements
    event_loop              who acts next in a simulation: of programs, of schedules, deadlock checks
    optimizer_per_param     which optimizer updates which parameter, its states
    role_programs           the list of each role: of the workers of a stage, of a dedicated server
    plan                    Plan: job, mesh and strategies, resolved
    strategy_interface      Strategy: the interface of every parallelism technique
    generation_program      the second program of a plan: a call of generate
    compiled_graphs         the graphs that a compiler makes of blocks, counted before and in a run
    strategy_state          the tensors that a technique keeps from step to step
    strategy_compatibility  checks of job, sharding and strategies together
"""
