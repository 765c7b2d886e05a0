"""A prefill+decode instance over vLLM's real scheduler, and all that can happen to it, by a seed.

``python -m tests.property.engine_model --seeds 0:5000 --seconds 3600`` tries many seeds and prints
a trace of those that fail; `tests.property.test_engine_model` tries some in every run.

What is real: vLLM's ``Scheduler`` and ``AsyncScheduler`` with their prefix cache, preemption and
steps ahead; everything of ours in the scheduler's process; and the encoders' half of the protocol
(`ProducerSession`). What is modelled: the network, the router, the clock, and memory that remembers
what was written where (`memory`). Modules, in the order in which they are best read:

- `shapes`: what a seed draws: how large everything is, and what its requests ask for.
- `memory`: the receive pool, and the worker, which reads it.
- `engine`: vLLM's scheduler around both, stepped as vLLM's engine core does.
- `peers`: encoders, router and network.
- `world`: a run: what happens when, and what must hold.
"""
