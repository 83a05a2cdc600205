"""Handles: unguessable, bound to a tenant and to one run of the service."""

from __future__ import annotations

import hmac
import secrets
from hashlib import blake2b

from matmuld_client.errors import Gone, RequestError, UnknownHandle

TOKEN_DIGITS, SEAL_DIGITS = 32, 12


class HandleMint:
    """Makes handles ``epoch-token-seal`` and tells why one is not known.

    The seal proves that the handle was issued in this run and to this tenant, so a handle that is
    no longer held was freed or has expired (410), and anything else was never issued (404); nothing
    need be remembered for that.
    """

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)

    def issue(self, tenant: str) -> str:
        token = secrets.token_hex(TOKEN_DIGITS // 2)
        return f"{self.epoch}-{token}-{self._seal(tenant, token)}"

    def explain(self, tenant: str, handle: str, operand: str | None) -> RequestError:
        """Why `handle` names nothing of `tenant`'s."""
        name = "" if operand is None else f"{operand}: "
        epoch, _, rest = handle.partition("-")
        token, _, seal = rest.partition("-")
        if (
            not handle.isascii()
            or len(epoch) != 8
            or len(token) != TOKEN_DIGITS
            or len(seal) != SEAL_DIGITS
        ):
            return UnknownHandle(
                f"{name}expected a handle of this service, got {handle[:80]!r}", operand=operand
            )
        if epoch != self.epoch:
            return Gone(
                f"{name}expected a handle of epoch {self.epoch}, got {handle}: "
                "the service has restarted since",
                operand=operand,
            )
        if hmac.compare_digest(seal.encode(), self._seal(tenant, token).encode()):
            return Gone(
                f"{name}expected a tensor that is held, {handle} was freed or has expired",
                operand=operand,
            )
        return UnknownHandle(
            f"{name}expected a handle of this tenant, {handle} was not issued to it",
            operand=operand,
        )

    def _seal(self, tenant: str, token: str) -> str:
        digest = blake2b(f"{tenant}/{token}".encode(), key=self._key, digest_size=SEAL_DIGITS // 2)
        return digest.hexdigest()
