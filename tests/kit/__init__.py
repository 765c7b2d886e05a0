"""A prefill+decode side without an engine, over vLLM's real scheduler; tests step it by hand.

Real: vLLM's schedulers with prefix cache, preemption and steps ahead, made by `make_scheduler`, the
scheduler half of `EPDConnector`, and the encoders' half of the protocol. Fake: the clock, the
network, and the workers' memory, which remembers which item's bytes are where.

- `side.Side`: the side and its encoders, for tests that decide what happens. Start here.
- `engine.Engine`: the turns of vLLM's engine core.
- `encoder.Encoder`: an encode instance, as its messages show it.
- `memory`: the receive pool, and the worker that reads it.
- `ends`, `encode_side`: both ends of transfers over real sockets and memory, without vLLM.
- `sizes`: how large everything is, and prompts.
- `sources`, `prose`: text of the repository, and its rules, for the tests that guard it.

The random model of `tests.property.engine_model` is built of the same parts.
"""
