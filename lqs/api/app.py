"""Puts the HTTP surface together: routes inside, middleware around them.

From the outside in: trace (id, access log, last resort), CORS, errors to answers, key, body bounds, log of acts.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lqs.api.admin import AlertList
from lqs.api.admin_keys import admin_key_routes
from lqs.api.admin_models import admin_model_routes
from lqs.api.chat import Chat
from lqs.api.completions import Completions
from lqs.api.control import ControlDrain, ControlReload, ControlRestart
from lqs.api.devices import DeviceDrain, DeviceList, DeviceWeight
from lqs.api.generate import Generator
from lqs.api.health import Health, Livez, MetricsPage, Readyz
from lqs.api.live import Live
from lqs.api.middleware.acts import ActsMiddleware
from lqs.api.middleware.auth import AuthMiddleware
from lqs.api.middleware.body import BodyMiddleware
from lqs.api.middleware.cors import CorsMiddleware
from lqs.api.middleware.refusal import RefusalMiddleware
from lqs.api.middleware.trace import TraceMiddleware
from lqs.api.model_drain import ModelDrain
from lqs.api.models import ModelInfo, ModelList, ModelsBehind
from lqs.api.requests import RequestInfo
from lqs.api.services import Services
from lqs.api.tokens import ApplyTemplate, Detokenize, Tokenize
from lqs.api.watch import Watched
from lqs.config import is_loopback
from lqs.errors import NotFound

__all__ = ["Services", "create_app", "routes"]


def create_app(services: Services, *, cors_origins: Sequence[str] = ()) -> ASGIApp:
    """Return the ASGI app. It starts nothing and keeps what it needs in itself.

    `cors_origins` are the origins whose pages may call it, "*" for any.
    """
    server = services.config.server
    app: ASGIApp = _Routes(routes(services), redirect_slashes=False, default=_no_such_path)
    app = ActsMiddleware(app, services.log)
    app = BodyMiddleware(app, num_bytes_max=server.body_bytes_max, timeout_s=server.body_timeout_s)
    app = AuthMiddleware(app, services.keys, is_metrics_open=is_loopback(server.host))
    app = RefusalMiddleware(app, services.metrics.count_refusal)
    if cors_origins:
        app = CorsMiddleware(app, cors_origins)
    return TraceMiddleware(app, services.log)


def routes(services: Services) -> list[BaseRoute]:
    """Return every path that there is. A model may be named in the path in front of the API's own."""
    live = Live()
    generator = Generator(services, live)
    posts: dict[str, ASGIApp] = {
        "/chat/completions": Chat(services, generator),
        "/completions": Completions(services, generator),
        "/tokenize": Tokenize(services),
        "/detokenize": Detokenize(services),
        "/apply-template": ApplyTemplate(services),
    }
    prefixes = ("", "/v1", "/models/{model:path}/v1")
    return [
        *(Route(prefix + path, app, methods=["POST"]) for prefix in prefixes for path, app in posts.items()),
        *_gets("/models", ModelList(services)),
        # Before the next two: a name may have anything in it.
        Route("/models/{prefix:path}/v1/models", ModelsBehind(services), methods=["GET"]),
        Route("/models/{prefix:path}/v1/models/{model:path}", ModelInfo(services), methods=["GET"]),
        *_gets("/models/{model:path}", ModelInfo(services)),
        Route("/v1/requests/{id}", RequestInfo(services, live), methods=["GET", "DELETE"]),
        Route("/livez", Livez(), methods=["GET"]),
        Route("/readyz", Readyz(services), methods=["GET"]),
        Route("/health", Health(services), methods=["GET"]),
        *admin_model_routes(services),
        *admin_key_routes(services),
        Route("/admin/alerts", AlertList(services), methods=["GET"]),
        *_admin_routes(services),
        Route("/metrics", MetricsPage(services), methods=["GET"]),
    ]


def _admin_routes(services: Services) -> list[BaseRoute]:
    """Return what changes the running server, and what shows its device slots."""
    stall_s = services.config.server.write_stall_s
    posts: dict[str, ASGIApp] = {
        "/admin/devices/{slot}/drain": Watched(DeviceDrain(services), stall_s),
        "/admin/devices/{slot}/undrain": DeviceDrain(services, undrain=True),
        "/admin/devices/{slot}/weight": DeviceWeight(services),
        "/admin/models/{model:path}/drain": Watched(ModelDrain(services), stall_s),
        "/admin/models/{model:path}/undrain": ModelDrain(services, undrain=True),
        "/admin/drain": ControlDrain(services),
        "/admin/reload": ControlReload(services),
    }
    return [
        Route("/admin/restart", ControlRestart(services), methods=["GET", "POST"]),
        Route("/admin/devices", DeviceList(services), methods=["GET"]),
        *(Route(path, app, methods=["POST"]) for path, app in posts.items()),
    ]


def _gets(path: str, app: ASGIApp) -> list[BaseRoute]:
    return [Route(prefix + path, app, methods=["GET"]) for prefix in ("", "/v1")]


class _Routes(Router):
    """A router that raises for a wrong method instead of answering in its own way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await super().__call__(scope, receive, send)


async def _no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound("There is no such path.")
