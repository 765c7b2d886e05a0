"""The most that each stage can do, by the utilization law; pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from epd_portable.bench.sizing.demand import Demand
from epd_portable.bench.sizing.simulate import REPLICAS, SPLIT_ENGINES, Deployment, RoutingRules
from epd_portable.bench.sizing.stages import StageTimes
from epd_portable.errors import ConfigError

POOLED = "all devices"
"""The name of encode and language model together, where either kind of instance may encode."""


def router_s(times: StageTimes, demand: Demand) -> float:
    """Return the router's CPU time for a request, in the mean of the mix."""
    router = times.router
    one_picture_s = router.arrival_s([demand.picture_bytes]) - router.arrival_s([])
    pictures = demand.share * _mean(demand.pictures)
    return router.request_s + pictures * one_picture_s + _mean(demand.output) * router.chunk_s


def capacities(
    times: StageTimes, demand: Demand, deployment: Deployment, rules: RoutingRules
) -> dict[str, float]:
    """Return the rate at which each stage that takes time is full, in requests a second.

    What a request takes of a stage in the mean, times the rate, is no more than the stage's
    instances have. Engines are taken to be filled up to their limits in every step, so that what a
    step takes at least is shared by as many as can share it.

    Raises:
        ConfigError: No stage takes any time.
    """
    front_end, limits = times.front_end, times.engine
    pictures = demand.share * _mean(demand.pictures)
    embeddings = _mean([times.encode.embeddings(side**2) for side in demand.size])
    pixels = _mean([side**2 for side in demand.size])
    encode_s = pictures * times.encode.seconds(embeddings)
    prepare_s = pictures * (front_end.picture_s + front_end.pixel_s * pixels)
    prompt = _mean(demand.text) + pictures * embeddings
    per_token_s = times.prefill.per_token_s + times.prefill.base_s / limits.max_num_batched_tokens
    per_answer_token_s = times.decode.per_sequence_s + times.decode.base_s / limits.max_num_seqs
    engine_s = prompt * per_token_s + (_mean(demand.output) - 1) * per_answer_token_s
    if front_end.shares_core:
        engine_s += front_end.request_s + prepare_s
    stages = {
        "router": (rules.router_workers, router_s(times, demand)),
        "front end": (deployment.engines, front_end.request_s),
        "preprocessing": (deployment.engines, prepare_s),
    }
    if not deployment.encoders:
        stages[REPLICAS] = (deployment.engines, engine_s + encode_s)
    else:
        stages[SPLIT_ENGINES] = (deployment.engines, engine_s)
        if rules.elastic_threshold is not None:
            stages[POOLED] = (deployment.devices, engine_s + encode_s)
        else:
            beside_s = prepare_s + pictures * front_end.request_s
            stages["encoders' front end"] = (deployment.encoders, beside_s)
            shared_s = beside_s if front_end.shares_core else 0.0
            stages["encode"] = (deployment.encoders, encode_s + shared_s)
    found = {name: count / seconds for name, (count, seconds) in stages.items() if seconds}
    if not found:
        raise ConfigError("no stage takes any time; give the prefill or decode of a step above 0")
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
