"""Requests to come: of /v1/plans/warm, or of a file that the service is started with."""

from __future__ import annotations

import json
from pathlib import Path

from matmuld_client.errors import RequestError

from ..calls import Step
from ..operations import OPERATIONS
from ..operations.warm import prepare
from ..schemas import Warm, WarmRequest
from ..service import Service
from .exchange import validated


def prepared(service: Service, tenant: str, request: WarmRequest) -> Step:
    """Raises RequestError if such a request would be refused."""
    header = validated(OPERATIONS[request.operation][0], request.header)
    return prepare(service.runtime, tenant, request.operation, header)


def read(service: Service, tenant: str, path: Path) -> list[Step]:
    """The requests in a file. Raises RuntimeError that says where it is wrong."""
    try:
        requests = validated(Warm, json.loads(path.read_bytes())).requests
    except OSError as error:
        raise RuntimeError(f"warm: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"warm: {path} is not JSON: {error}") from error
    except RequestError as error:
        raise RuntimeError(f"warm: {path}: {error.detail}") from error
    steps = []
    for number, request in enumerate(requests):
        try:
            steps.append(prepared(service, tenant, request))
        except RequestError as error:
            raise RuntimeError(f"warm: {path}: requests[{number}]: {error.detail}") from error
    return steps
