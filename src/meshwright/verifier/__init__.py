"""Checks that a plan computes what one device computes.

Without running it, by its messages, and by its numbers; or, of a lossy plan, how well it learns.

    static_checks           checks of a program without running it: order, waits, memory, gradients, updates
    nccl_deadlocks          where a program would wait for ever, under the rules of NCCL
    message_checks          checks of what transfers mean, of their messages and order, and of sums of tied
                            gradients
    messages                the messages of a step, as the program states them and as a rank issued them
    message_trace           the messages of ranks on fake tensors, compared with the program
    model_own_loss          the loss of the plan beside the one that the model computes itself
    reference               one device: the numbers that every plan must reproduce
    parity                  every rank's numbers and messages, compared with the reference
    float64_parity_setup    the plan, model, random numbers and samples that parity compares
    loss_curves             a lossy plan and its exact counterpart: the gap of losses, the spread of seeds
    divergence_cause        why a plan differs from one device: experiments on one device
    verdict_and_cause       the outcome of parity, in words and as JSON
"""
