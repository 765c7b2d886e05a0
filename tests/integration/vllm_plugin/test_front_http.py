"""What the engine front's middleware answers by itself."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from starlette.responses import Response

from epd_portable.media.limits import MediaLimits
from epd_portable.vllm_plugin.front_http import FrontMiddleware
from tests.integration.vllm_plugin.test_front import Front, config, run  # noqa: F401 - fixtures

pytestmark = pytest.mark.needs_vllm


def test_operators_see_engines_as_they_see_the_instances_of_a_router(run: Any) -> None:  # noqa: F811
    async def story(front: Front) -> None:
        served = FrontMiddleware(Response())
        served._open(front.client, MediaLimits())
        transport = httpx.ASGITransport(app=cast(Any, served))
        signed = front.client.secret.sign("GET", "/epd/instances", b"")
        front.goes("e-0")
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
                health = await http.get("/health")
                seen = await http.get("/epd/instances", headers={"authorization": signed})
                refused = await http.get("/epd/instances")
        finally:
            REGISTRY.unregister(cast(Any, front.client.metrics.registry))
        counts = {"up": 1, "joining": 0, "down": 1, "draining": 0}
        assert (health.status_code, health.json()) == (200, {"status": "ok", "counts": counts})
        assert refused.status_code == 401
        encode, pd = seen.json()["instances"]
        assert (encode["name"], encode["state"]) == ("e-0", "down")
        assert encode["reason"] == "its process has ended"
        assert (pd["state"], pd["in_flight"], pd["problem"], pd["url"]) == ("up", 0, "", "")

    run(story, "e-0", "pd-0")
