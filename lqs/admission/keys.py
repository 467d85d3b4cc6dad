"""The API keys in force: found without telling anything by time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lqs.admission.key_file import KeyFile, KeyRecord
from lqs.config import Config
from lqs.config_tiers import TierConfig
from lqs.errors import ConfigError, Unauthorized
from lqs.request import Tenant

_ANONYMOUS_INDEX = 0


class _Known(NamedTuple):
    """What follows from a key file and the tiers."""

    config: Config
    records: tuple[KeyRecord, ...]
    indices: dict[str, int]
    anonymous: Tenant
    tenants: list[tuple[bytes, Tenant]]  # By digest.


class KeyRing:
    """Finds the tenant of a token.

    Without a key file everybody is the anonymous tenant. With one, nobody is, not even while the
    file is empty: revoking the last key must not open the door.

    Owner: the event loop.
    """

    def __init__(self, config: Config) -> None:
        # The event loop waits for nobody who holds the file.
        self._file = KeyFile(config.keys.file, is_patient=False) if config.keys.file else None
        self._tell_weight: Callable[[int, float], None] | None = None
        self._known = _Known(config, (), {}, _anonymous(config), [])
        self.reload(config)

    @property
    def records(self) -> tuple[KeyRecord, ...]:
        """Those in force, in the order of the file."""
        return self._known.records

    @property
    def anonymous(self) -> Tenant:
        """Who comes without a key, where none is needed."""
        return self._known.anonymous

    @property
    def num_keys(self) -> int:
        """Keys that are in force."""
        return len(self._known.tenants)

    @property
    def is_guarded(self) -> bool:
        """Whether a key is needed."""
        return self._file is not None

    def follow(self, tell_weight: Callable[[int, float], None]) -> None:
        """Tell the weight of every key's index whenever keys or tiers have changed from now on."""
        self._tell_weight = tell_weight

    def reload(self, config: Config) -> None:
        """Read the file again, with these tiers.

        Raises ConfigError and leaves everything as it was if anything is wrong.
        """
        self._take(self._known_by(config, self._file.read() if self._file else []))

    def add(self, config: Config, name: str, tier: str, *, is_admin: bool, created: str) -> str:
        """Make a key that is in force at once, and return it. Raises ConfigError, and nothing has changed then."""
        assert self._file is not None
        known: list[_Known] = []
        # Before anything is written: what could be wrong with the file is found out, and nothing of it is written.
        key = self._file.add(
            name,
            tier,
            is_admin=is_admin,
            created=created,
            agree=lambda records: known.append(self._known_by(config, records)),
        )
        self._take(known[0])
        return key

    def revoke(self, config: Config, name: str) -> bool:
        """Take a key out of force and out of the file; False if there is none of that name.

        Raises ConfigError, and nothing has changed then.
        """
        assert self._file is not None
        known: list[_Known] = []
        was_there = self._file.revoke(name, agree=lambda records: known.append(self._known_by(config, records)))
        # Also if it was not there: it may have been taken out by hand and be in force still.
        self._take(known[0])
        return was_there

    def find(self, token: bytes | None) -> Tenant:
        """The tenant whose key this is. Raises Unauthorized.

        Every key is compared, whether an earlier one matched or not, and only digests are: the
        time says nothing about which key is near.
        """
        if not self.is_guarded:
            return self.anonymous
        digest = hashlib.sha256(token or b"").digest()
        found = None
        for known, tenant in self._known.tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if not token or found is None:
            raise Unauthorized
        return found

    def weights(self) -> list[float]:
        """The weight of every key index that the core has room for."""
        weights = [1.0] * (1 + self._known.config.keys.num_keys_max)
        for _, tenant in self._known.tenants:
            weights[tenant.key_index] = tenant.weight
        return weights

    def tenants(self) -> Iterator[Tenant]:
        """All tenants with a key in force."""
        return (tenant for _, tenant in self._known.tenants)

    def _known_by(self, config: Config, records: list[KeyRecord]) -> _Known:
        """What would hold with this file and these tiers. Raises ConfigError."""
        for record in records:
            if record.tier not in config.tiers:
                known = ", ".join(config.tiers)
                raise ConfigError(
                    f"{config.keys.file}: key {record.name!r} has tier {record.tier!r}; there are {known}."
                )
        indices = self._assign(records)
        tenants = [(bytes.fromhex(each.sha256), _tenant(config, each, indices[each.name])) for each in records]
        return _Known(config, tuple(records), indices, _anonymous(config), tenants)

    def _take(self, known: _Known) -> None:
        """From now on this holds."""
        self._known = known
        if self._tell_weight is not None:
            for tenant in self.tenants():
                self._tell_weight(tenant.key_index, tenant.weight)

    def _assign(self, records: list[KeyRecord]) -> dict[str, int]:
        """A number for every name: known names keep theirs, new ones take the lowest never used.

        Numbers of revoked keys come back only when no other is left: requests of theirs may still
        run, and their part of the prefix cache may still be there.
        """
        num_max = self._known.config.keys.num_keys_max
        if len(records) > num_max:
            raise ConfigError(
                f"keys.num_keys_max: {self._known.config.keys.file}: {len(records)} keys, "
                f"there is room for {num_max}. Revoke one, or raise it and restart."
            )
        names = {record.name for record in records}
        indices = dict(self._known.indices)
        if len(names | indices.keys()) > num_max:
            indices = {name: index for name, index in indices.items() if name in names}
        free = iter(sorted(set(range(1, num_max + 1)) - set(indices.values())))
        for record in records:
            if record.name not in indices:
                indices[record.name] = next(free)
        return indices


def _anonymous(config: Config) -> Tenant:
    name = config.keys.anonymous_tier
    tier = config.tiers[name]
    return Tenant("anonymous", name, _ANONYMOUS_INDEX, tier.level, tier.best_level, tier.weight, True)


def _tenant(config: Config, record: KeyRecord, key_index: int) -> Tenant:
    tier = config.tiers[record.tier]
    weight = weight_of(record, tier)
    return Tenant(record.name, record.tier, key_index, tier.level, tier.best_level, weight, record.is_admin)


def weight_of(record: KeyRecord, tier: TierConfig) -> float:
    """Its own weight, or its tier's."""
    return tier.weight if record.weight is None else record.weight
