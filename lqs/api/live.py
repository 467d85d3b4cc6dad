"""The requests that are being answered, by id, for those who ask after them."""

from __future__ import annotations

from typing import NamedTuple

from lqs.api.watch import ClientWatch
from lqs.request import Request, Tenant


class Entry(NamedTuple):
    """A request and the coroutine that answers it."""

    request: Request
    watch: ClientWatch


class Live:
    """Requests from the moment their body is read until they are answered.

    An id belongs to its key: to every other key it does not exist. Owner: the event loop.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def add(self, request: Request, watch: ClientWatch) -> None:
        """Make the request known."""
        self._entries[_key(request.tenant, request.id)] = Entry(request, watch)

    def discard(self, request: Request) -> None:
        """Forget it; nothing happens if another request has its id by now."""
        key = _key(request.tenant, request.id)
        entry = self._entries.get(key)
        if entry is not None and entry.request is request:
            del self._entries[key]

    def find(self, tenant: Tenant, request_id: str) -> Entry | None:
        """Return the request of that id, if it is this key's."""
        return self._entries.get(_key(tenant, request_id))


def _key(tenant: Tenant, request_id: str) -> tuple[str, str]:
    return tenant.name, request_id
