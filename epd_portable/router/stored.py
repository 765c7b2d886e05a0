"""The store's look-up of the router, which learns from encoders what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.connector.stores.lookup import StoredItem, StoreLookup
from epd_portable.connector.stores.metrics import StoreMetrics
from epd_portable.media.limits import RequestItem


class LearningLookup(StoreLookup):
    """Reads nothing before an encoder has named its entries, nor while encoders name several.

    Args:
        encoders: Returns the names of the encode instances.
    """

    def __init__(
        self,
        section: StoreSection,
        secret: Secret,
        metrics: StoreMetrics,
        encoders: Callable[[], Iterable[str]],
    ) -> None:
        super().__init__(section, secret, metrics)
        self._encoders = encoders
        self._namespaces: dict[str, str] = {}

    def note_namespace(self, encoder: str, namespace: str) -> None:
        """Record the namespace of an encoder's entries; empty for none."""
        if namespace:
            self._namespaces[encoder] = namespace

    async def find_items(
        self, items: Sequence[RequestItem], namespace: str = ""
    ) -> dict[str, StoredItem]:
        """See `StoreLookup`; the namespace is that of all encoders."""
        return await super().find_items(items, self._namespace())

    def _namespace(self) -> str:
        there = [name for name in self._encoders() if name in self._namespaces]
        found = {self._namespaces[name] for name in there or self._namespaces}
        if there:
            self._namespaces = {name: self._namespaces[name] for name in there}
        return found.pop() if len(found) == 1 else ""
