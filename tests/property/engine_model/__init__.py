"""A prefill+decode instance over vLLM's real scheduler, and all that can happen to it, by a seed.

``python -m tests.property.engine_model --seeds 0:5000 --seconds 3600`` tries many seeds and prints
a trace of those that fail; `tests.property.test_engine_model` tries some in every run.

What is real: vLLM's ``Scheduler`` and ``AsyncScheduler`` with their prefix cache, preemption and
steps ahead; everything of ours in the scheduler's process; and the encoders' half of the protocol
(`ProducerSession`). Instance, encoders and memory come from `tests.kit`. What is modelled besides:
the network, the front and the clock. Modules, in the order in which they are best read:

- `shapes`: sizes and prompts that a seed draws.
- `peers`: front and network.
- `world`: a run: what happens when, and what must hold.
"""
