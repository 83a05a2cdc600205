"""What can go wrong, one class for each `code` of the protocol.

    MatmuldError
    ├── RequestError               an answer of the service, a problem document
    │   ├── Malformed              400 malformed
    │   ├── UnknownHandle          404 unknown_handle
    │   ├── NotFound               404 not_found
    │   ├── MethodNotAllowed       405 method_not_allowed
    │   ├── RequestTimeout         408 request_timeout
    │   ├── Conflict               409 conflict
    │   ├── Gone                   410 gone
    │   ├── LengthRequired         411 length_required
    │   ├── TooLarge               413 too_large
    │   ├── UnsupportedMediaType   415 unsupported_media_type
    │   ├── InvalidOperands        422 invalid_operands
    │   ├── Overloaded             429 overloaded
    │   ├── Internal               500 internal
    │   ├── Starting               503 starting
    │   ├── Draining               503 draining
    │   ├── DeviceLost             503 device_lost
    │   ├── DeadlineExceeded       504 deadline_exceeded
    │   └── OutOfMemory            507 out_of_memory
    └── TransportError             no answer: the service is out of reach, or the connection broke
        └── Timeout                not within the time allowed

The service raises the same classes, so that the two sides cannot drift apart.
"""

from __future__ import annotations

from typing import ClassVar


class MatmuldError(Exception):
    """Whatever this package raises of its own."""


class RequestError(MatmuldError):
    """A request that the service refused. Nothing was changed by it.

    Attributes:
        code: stable name of the kind of failure.
        status: HTTP status.
        detail: what was expected and what came.
        operand: the operand at fault, if there is one.
        request_id: the `X-Request-ID` of the request, once it was answered.
        retry_after: seconds after which it is worth trying again, if the service said so.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    def __init__(
        self,
        detail: str,
        *,
        operand: str | None = None,
        request_id: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.operand = operand
        self.request_id = request_id
        self.retry_after = retry_after

    def problem(self, request_id: str) -> dict[str, object]:
        """The RFC 9457 problem document."""
        document: dict[str, object] = {
            "type": f"urn:matmuld:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "request_id": request_id,
        }
        if self.operand is not None:
            document["operand"] = self.operand
        return document


class Malformed(RequestError):
    """The body is not what the protocol says."""

    code, status, title = "malformed", 400, "Malformed request"


class UnknownHandle(RequestError):
    """A handle that was never issued to this tenant."""

    code, status, title = "unknown_handle", 404, "Unknown handle"


class NotFound(RequestError):
    """No such path or plan."""

    code, status, title = "not_found", 404, "Not found"


class MethodNotAllowed(RequestError):
    """The path exists, but not with this method."""

    code, status, title = "method_not_allowed", 405, "Method not allowed"


class RequestTimeout(RequestError):
    """The request came too slowly, or not to its end; the connection was closed."""

    code, status, title = "request_timeout", 408, "Request timeout"


class Conflict(RequestError):
    """The tensor is not what the request takes it for."""

    code, status, title = "conflict", 409, "Conflict"


class Gone(RequestError):
    """The handle was freed, has expired, or comes from before a restart of the service."""

    code, status, title = "gone", 410, "Gone"


class LengthRequired(RequestError):
    """A body of unknown length where its length must be known."""

    code, status, title = "length_required", 411, "Length required"


class TooLarge(RequestError):
    """The body is over the service's limit; it was not read."""

    code, status, title = "too_large", 413, "Body too large"


class UnsupportedMediaType(RequestError):
    """The body's form is none that the service takes."""

    code, status, title = "unsupported_media_type", 415, "Unsupported media type"


class InvalidOperands(RequestError):
    """The operands do not fit the operation, or one another."""

    code, status, title = "invalid_operands", 422, "Invalid operands"


class Overloaded(RequestError):
    """The service has as many requests as it can hold; the body was not read. See `retry_after`."""

    code, status, title = "overloaded", 429, "Overloaded"


class Internal(RequestError):
    """A fault of the service."""


class Starting(RequestError):
    """The service makes plans before it is ready; it takes requests already."""

    code, status, title = "starting", 503, "Starting"


class Draining(RequestError):
    """The service is about to stop."""

    code, status, title = "draining", 503, "Draining"


class DeviceLost(RequestError):
    """The device has failed; the service must be started again."""

    code, status, title = "device_lost", 503, "Device lost"


class DeadlineExceeded(RequestError):
    """The request could not be at work before its deadline, and was not run."""

    code, status, title = "deadline_exceeded", 504, "Deadline exceeded"


class OutOfMemory(RequestError):
    """The device's memory, or the tenant's quota, does not suffice."""

    code, status, title = "out_of_memory", 507, "Out of memory"


class TransportError(MatmuldError):
    """No answer came: the service could not be reached, or the connection broke.

    Whether the request was carried out is not known.
    """


class Timeout(TransportError):
    """No answer came within the time allowed."""


BY_CODE: dict[str, type[RequestError]] = {kind.code: kind for kind in RequestError.__subclasses__()}
