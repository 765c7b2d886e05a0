"""Keys of files, values and variables that are gone, and what to use instead.

Most are keys of topology files; some of hardware profiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "EPD_MAX_QUEUED_BYTES": "it is eight times router.max_body_bytes",
        "EPD_MAX_QUEUED_ITEMS": "use instances.encode.max_queued_items",
        "EPD_PAYLOAD_DIGEST": "items travel without digests; compare answers instead",
        "EPD_SECRET_FILE": "use --secret-file",
        "EPD_STORE_PASSWORD": "use store.password_file",
        "bf16_flops": "nothing was planned by it",
        "host_bytes_per_s": "nothing was planned by it",
        "instances.encode.max_queued_bytes": "it is eight times router.max_body_bytes",
        "launch.log_files": "three files of each log are kept; launch.log_max_bytes limits them",
        "launch.probe_interval_s": "launch.hung_after_s determines it",
        "launch.restart": "a process restarts after 1 s, doubling to 30 s",
        "launch.warm_up": "instances are always warmed up",
        "memory_bytes_per_s": "nothing was planned by it",
        "network_bytes_per_s": "nothing was planned by it",
        "mooncake": (
            "use auto or nixl; vLLM's own ECMooncakeConnector transfers by Mooncake, without this "
            "package"
        ),
        "notes": "write them as comments",
        "pair_bytes_per_s": "nothing was planned by it",
        "router.admission.encode.max_pixels": "use router.admission.encode.max_items",
        "router.admission.max_pixels": "use router.admission.max_items or max_bytes",
        "router.body_timeout_s": "it is 60 s",
        "router.elastic_threshold": "it is 4; router.elastic_encode turns elastic encoding off",
        "router.envoy": "put a gateway before the router as before any server (docs/deploy.md)",
        "router.encode_timeout_s": (
            "it is half of transfer.wait_timeout_s; encoderTimeout of multimodal-epd-decider in "
            "router.choice replaces it"
        ),
        "router.forget_after_s": "it is 600 s",
        "router.max_video_frames": "it is 60 for each of router.max_media_seconds",
        "router.media_urls.cache_s": "it is 300 s, or less if the server says so",
        "router.media_urls.max_fetches": "it is 64",
        "router.media_urls.max_fetches_per_host": "it is 8",
        "router.media_urls.max_redirects": "it is 3",
        "router.media_urls.timeout_s": "it is 10 s",
        "router.prefill_min_bytes": (
            "use promptTokens of prefix-based-pd-decider in router.choice, which counts tokens"
        ),
        "router.send_timeout_s": "it is 60 s",
        "router.tracing.engines": (
            "engines send spans wherever router.tracing.endpoint is set; "
            "engine_args: {otlp_traces_endpoint: null} leaves theirs out"
        ),
        "router.unknown_fields": "fields that the router does not know go to the engine",
        "router.unknown_media": "what an instance cannot decode is refused with 400",
        "router.workers": "use several routers behind a balancer (docs/deploy.md)",
        "software": "nothing was planned by it; write it as a comment",
        "store.layout": "only instances of this package read entries",
        "store.queue_bytes": "it is 256 MiB",
        "transfer.kv_connector": "each platform has one, which epd-launch plan names",
        "transfer.preallocation": "items get room when their requests have arrived",
    }
)
"""By dotted key, a section for all keys within it, or by name."""


def removed(name: str) -> str:
    """Return what is wrong with a key or variable that is gone."""
    return f"is gone: {REMOVED[name]}"
