"""`/admin/models`: which models are in memory, and what an admin wants of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from lqs.api.admin import check_admin, send_found
from lqs.api.errors import send_json
from lqs.api.intake import find_models
from lqs.api.services import Services
from lqs.engine.residents import Standing

if TYPE_CHECKING:
    from lqs.admission.fleet import Fleet
    from lqs.engine.served import Served
    from lqs.engine.slots import Models
    from lqs.observe.models import ModelFigures


def admin_model_routes(services: Services) -> list[BaseRoute]:
    """Return the paths. What loads and unloads answers 202 at once; how far it is `GET /admin/models` tells."""
    fleet = services.fleet
    return [
        Route("/admin/models", Listing(services), methods=["GET"]),
        Route("/admin/models/{model:path}/load", Change(services, fleet.load), methods=["POST"]),
        Route("/admin/models/{model:path}/unload", Change(services, fleet.unload), methods=["POST"]),
    ]


class Listing:
    """Every model: where it stands between file and memory, who uses it, who waits for it."""

    def __init__(self, services: Services) -> None:
        self._models = services.models
        self._fleet: Fleet = services.fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        data = [_shape(self._fleet.figures(served), served, self._models) for served in self._models.all()]
        await send_json(send, msgspec.json.encode({"object": "list", "data": data}))


class Change:
    """Has a model loaded or unloaded; by a name without its version all versions, as a list. Raises NotFound."""

    def __init__(self, services: Services, change: Callable[[Served], None]) -> None:
        self._models = services.models
        self._fleet: Fleet = services.fleet
        self._change = change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        name = scope["path_params"]["model"]
        found = find_models(self._models, name)
        for served in found:
            self._change(served)
        shown = [_shape(self._fleet.figures(served), served, self._models) for served in found]
        await send_found(send, shown, 202)


def _shape(figures: ModelFigures, served: Served, models: Models) -> dict[str, Any]:
    """How a model stands, for an admin. It `needs` what is planned for it, and `takes` it while it is in memory."""
    needs = dict(models.plan_of(served).takes)
    is_there = figures.standing not in (Standing.ABSENT, Standing.WAITING)
    return {
        "id": served.name,
        "object": "model",
        "standing": figures.standing,
        "state": served.state,
        "progress": round(served.progress, 3),
        "on_demand": served.is_on_demand,
        "users": figures.num_users,
        "waiting": figures.num_waiting,
        "devices": served.devices,
        "takes": needs if is_there else dict.fromkeys(needs, 0),
        "needs": needs,
        "failure": figures.failure,
    }
