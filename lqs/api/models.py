"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.errors import send_json
from lqs.api.intake import no_such_model
from lqs.api.services import Services
from lqs.engine.routing import shared_names

if TYPE_CHECKING:
    from lqs.engine.served import Served


class ModelList:
    """Lists what is served."""

    def __init__(self, services: Services) -> None:
        self._models = services.models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = [self._models.find(name) for name in self._models.names()]
        data = [_shape(served) for served in found if served is not None]
        await send_json(send, msgspec.json.encode({"object": "list", "data": data}))


class ModelsBehind:
    """The models behind the name that stands in the path: one, or its versions. Raises NotFound."""

    def __init__(self, services: Services) -> None:
        self._models = services.models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["prefix"]
        data = [_shape(served) for served in self._models.all() if name in _names_of(served)]
        if not data:
            raise no_such_model(name)
        await send_json(send, msgspec.json.encode({"object": "list", "data": data}))


class ModelInfo:
    """Shows one model. Raises NotFound."""

    def __init__(self, services: Services) -> None:
        self._models = services.models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model"]
        served = self._models.find(name)
        if served is None:
            raise no_such_model(name)
        await send_json(send, msgspec.json.encode(_shape(served)))


def _names_of(served: Served) -> tuple[str, ...]:
    """What a model can be asked for by."""
    return (served.name, *shared_names(served.name, served.config.aliases))


def _shape(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "lqs",
        "meta": served.meta(),
    }
