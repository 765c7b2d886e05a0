"""Mixins of vLLM's two model runners.

The mixins of `first` call the connector where vLLM's first runner does not. vLLM's second runner
calls the connector's own hooks, and has those of `second`. No module here imports vLLM;
`epd_portable.vllm_plugin.worker` mixes them in.
"""

if __name__ != "epd_portable.runners":
    raise ImportError(f"import epd_portable.runners, not {__name__}: two names make two packages")
