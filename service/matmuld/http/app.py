"""The application: FastAPI for the pages and the description, the endpoints themselves below it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from matmuld_client.errors import MethodNotAllowed, NotFound, RequestError
from starlette import routing
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..service import TENANT, Service
from ..settings import Settings
from . import state, tensors, warming
from .endpoints import Answer, Endpoint, operation, upload
from .exchange import Exchange
from .openapi import components, describe, status


@dataclass(frozen=True)
class Route:
    """A method of a path, and who answers it."""

    method: str
    path: str
    answer: Answer


ROUTES = (
    Route("POST", "/v1/linear/forward", operation("linear/forward")),
    Route("POST", "/v1/linear/backward", operation("linear/backward")),
    Route("POST", "/v1/mlp/forward", operation("mlp/forward")),
    Route("POST", "/v1/mlp/backward", operation("mlp/backward")),
    Route("POST", "/v1/matmul", operation("matmul")),
    Route("POST", "/v1/run", operation("run")),
    Route("POST", "/v1/tensors", upload(tensors.create)),
    Route("GET", "/v1/tensors", tensors.index),
    Route("GET", "/v1/tensors/{handle}", tensors.read),
    Route("PUT", "/v1/tensors/{handle}", upload(tensors.replace)),
    Route("PATCH", "/v1/tensors/{handle}", tensors.change),
    Route("DELETE", "/v1/tensors/{handle}", tensors.free),
    Route("GET", "/v1/tensors/{handle}/metadata", tensors.show),
    Route("GET", "/v1/tensors/{handle}/mask", tensors.mask),
    Route("GET", "/v1/plans", state.plans),
    Route("POST", "/v1/plans/warm", state.warm),
    Route("DELETE", "/v1/plans", state.evict),
    Route("DELETE", "/v1/plans/{id}", state.evict),
    Route("GET", "/v1/info", state.info),
    Route("GET", "/health/live", state.live),
    Route("GET", "/health/ready", state.ready),
)


class Application(FastAPI):
    """FastAPI, but paths without variable parts go straight to their endpoint: its routing costs
    more than a product.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            title="matmuld",
            version=__version__,
            lifespan=self._lifespan,
            redoc_url=None,
            redirect_slashes=False,
        )
        self.settings = settings
        self.service: Service | None = None
        self._direct: dict[tuple[str, str], Endpoint] = {}
        for route in ROUTES:
            endpoint = Endpoint(self._opened, route.answer)
            if "{" not in route.path:
                self._direct[route.method, route.path] = endpoint
            self.add_api_route(
                route.path,
                _handler(endpoint),
                methods=[route.method],
                response_model=None,
                response_class=Response,
                status_code=status(route.method, route.path),
                openapi_extra=describe(route.method, route.path),
                summary=(route.answer.__doc__ or "").strip().partition("\n")[0],
                operation_id=f"{route.method.lower()}{route.path.translate(_IDENTIFIER)}",
                tags=[route.path.split("/")[2] if route.path.startswith("/v1/") else "health"],
            )
        self.add_exception_handler(HTTPException, self._no_route)

    def _opened(self) -> Service:
        assert self.service is not None
        return self.service

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with Service.open(self.settings) as service:
            if self.settings.warm is not None:
                service.start(warming.read(service, TENANT, self.settings.warm))
            self.service = service
            yield
        self.service = None

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        description.setdefault("components", {})["schemas"] = components()
        return description

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = self._direct.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """FastAPI's own refusals, as problem documents."""
        assert isinstance(error, HTTPException)
        path = request.url.path[:160]
        allowed = sorted(
            method
            for route in self.routes
            if isinstance(route, routing.Route)
            and route.matches(request.scope)[0] is routing.Match.PARTIAL
            for method in route.methods or ()
        )
        if not allowed:
            return _Problem(self.settings.body_limit, NotFound(f"no such path: {path}"))
        methods = ", ".join(allowed)
        problem = MethodNotAllowed(f"{path} takes {methods}, got {request.method}")
        allow = (b"allow", methods.encode())
        return _Problem(self.settings.body_limit, problem, [allow])


class _Direct(Response):
    """A response that is an endpoint: it reads the request itself."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


class _Problem(Response):
    """A problem document in the form that the request asked for."""

    def __init__(
        self, limit: int, problem: RequestError, extra: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__()
        self._limit = limit
        self._problem = problem
        self._extra = extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._limit, TENANT)
        await exchange.problem(self._problem, self._extra)


def _handler(endpoint: Endpoint) -> Any:
    async def handler(request: Request) -> Response:
        return _Direct(endpoint)

    return handler


_IDENTIFIER = str.maketrans({"/": "_", "{": None, "}": None})
