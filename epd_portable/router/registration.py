"""HTTP addresses at which instances are registered and let go, for holders of the secret."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from epd_portable.config.problems import in_one_line
from epd_portable.config.secret import Secret
from epd_portable.errors import ConfigError, RequestError
from epd_portable.router.bodies import read_body
from epd_portable.router.membership import Membership
from epd_portable.router.pool import Instance, Pool
from epd_portable.router.replies import error_reply
from epd_portable.router.settings import InstanceSettings

INSTANCES_PATH = "/epd/instances"
INSTANCE_PATH = INSTANCES_PATH + "/{name}"
MAX_BODY_BYTES = 64 * 1024


class Registration:
    """``GET`` and ``POST /epd/instances``, ``DELETE /epd/instances/{name}``.

    Answers carry a name of this router process: another one knows nobody who has registered.

    Args:
        membership: Does what is asked for.
        pool: The instances.
        secret: Callers show its token; ``None`` where nobody may register.
    """

    def __init__(self, membership: Membership, pool: Pool, secret: Secret | None) -> None:
        self._membership = membership
        self._pool = pool
        self._secret = secret
        self._name = uuid.uuid4().hex

    async def instances(self, request: Request) -> Response:
        """List the instances, or take one in: 201 if it is new, 200 if it was there."""
        return await self._answer(request, self._join if request.method == "POST" else self._list)

    async def instance(self, request: Request) -> Response:
        """Let an instance go: 202 while it still works on something."""
        return await self._answer(request, self._leave)

    async def _answer(
        self, request: Request, act: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        try:
            self._check(request.headers.get("authorization", ""))
            return await act(request)
        except RequestError as error:
            reply = error_reply(error)
            challenge = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            return Response(reply.body, reply.status, {**reply.headers, **challenge})

    def _check(self, authorization: str) -> None:
        if self._secret is None:
            raise RequestError(
                "this router registers no instances: name a secret_file in its topology file",
                status=404,
                code="registration_off",
            )
        expected = f"Bearer {self._secret.token()}"
        if not hmac.compare_digest(authorization.encode(), expected.encode()):
            raise RequestError(
                "the bearer token is missing or wrong: use the secret_file of this router",
                status=401,
                code="unauthorized",
            )

    async def _list(self, request: Request) -> Response:
        instances = [shown(instance) for instance in self._pool.instances]
        return JSONResponse({"router": self._name, "instances": instances})

    async def _join(self, request: Request) -> Response:
        data = await read_body(request, max_bytes=MAX_BODY_BYTES)
        try:
            settings = InstanceSettings.model_validate_json(data)
            instance, new = await self._membership.join(settings)
        except ValidationError as error:
            problems = in_one_line(error, whole="body")
            raise RequestError(
                f"instance to register: {problems}", status=400, code="invalid_instance"
            ) from error
        except ConfigError as error:
            raise RequestError(str(error), status=400, code="invalid_instance") from error
        body = {"router": self._name, **shown(instance)}
        return JSONResponse(body, status_code=201 if new else 200)

    async def _leave(self, request: Request) -> Response:
        instance = self._membership.leave(request.path_params["name"])
        return JSONResponse(shown(instance), status_code=202)


def shown(instance: Instance) -> dict[str, Any]:
    """Return what callers see of an instance."""
    return {
        "name": instance.name,
        "role": instance.role,
        "url": instance.settings.url,
        "control": instance.control,
        "state": instance.state,
        "registered": instance.registered,
        "in_flight": instance.in_flight,
        "reason": instance.reason,
        "problem": instance.problem,
    }
