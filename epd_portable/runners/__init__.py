"""What runs inside an engine: mixins for its model runner, and the collaborators they talk to.

============  ==================  =====================================================
instance      scheduler process   worker processes
============  ==================  =====================================================
encode        `Dispatcher`        `EncoderRunnerMixin`, `Sender` (a thread)
PD            `Receiver`          `PDRunnerMixin`, `Placer`
============  ==================  =====================================================

The mixins are those of vLLM's first model runner. Its second calls the connector's own hooks, and
has `SecondRunnerMixin` in both.

No module here imports vLLM; `epd_portable.vllm_plugin` puts them in their places.
"""

if __name__ != "epd_portable.runners":
    raise ImportError(f"import epd_portable.runners, not {__name__}: two names make two packages")
