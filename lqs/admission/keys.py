"""API keys: made once, stored as digests, compared without telling anything by time.

A key has 256 random bits, so a plain SHA-256 of it is as hard to turn around as any slow hash; slow
hashes are for what people can remember. The file holds one JSON object a line.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from lqs.config import Config
from lqs.errors import ConfigError, Unauthorized
from lqs.plain import open_plain
from lqs.request import Tenant

_KEY_PREFIX = "lqs-"
# What is kept of a key: its beginning, with 24 of its 256 bits.
_PREFIX_CHARS = len(_KEY_PREFIX) + 4
_NAME_CHARS_MAX = 100
_ANONYMOUS_INDEX = 0
_EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the key file. `sha256` is the digest of the whole key, in hex."""

    name: str
    tier: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    is_admin: bool = msgspec.field(default=False, name="admin")
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] | None = None  # Absent: the tier's.
    created: str = ""
    prefix: str = ""  # How the key begins, for people who look for theirs; most of its bits are beyond that.


def check_name(name: str) -> None:
    """Raises ConfigError for what is no name of a key: it stands in logs, and in a path."""
    if not 0 < len(name) <= _NAME_CHARS_MAX or not name.isprintable() or name.strip() != name:
        raise ConfigError(f"A key's name has 1 to {_NAME_CHARS_MAX} printable characters, with no blank at its ends.")


class KeyFile:
    """The file that `lqs keys` edits and the server reads. A missing file has no keys."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    def read(self) -> list[KeyRecord]:
        """All records, in the order of the file. Raises ConfigError that names the line."""
        try:
            with open_plain(self._path, "a key file") as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}.") from None
        records = [self._record(no, line) for no, line in enumerate(lines, 1) if line.strip()]
        self._check_names(records)
        return records

    def add(self, name: str, tier: str, *, is_admin: bool = False, created: str) -> str:
        """Make a key, store its digest and return it; it cannot be shown again.

        Raises ConfigError if the name is none or taken, or the file cannot be written.
        """
        check_name(name)
        records = self.read()
        key = _KEY_PREFIX + secrets.token_urlsafe(32)
        digest = hashlib.sha256(key.encode()).hexdigest()
        record = KeyRecord(name, tier, digest, is_admin, created=created, prefix=key[:_PREFIX_CHARS])
        self._check_names([*records, record])
        self._write([*records, record])
        return key

    def revoke(self, name: str) -> bool:
        """Take the key out of the file; False if there is none of that name. Raises ConfigError."""
        records = self.read()
        kept = [record for record in records if record.name != name]
        if len(kept) == len(records):
            return False
        self._write(kept)
        return True

    def _record(self, number: int, line: bytes) -> KeyRecord:
        try:
            record = msgspec.json.decode(line, type=KeyRecord)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}, line {number}: {error}.") from None
        # An empty key would let in everybody who sends an empty token.
        if record.sha256 == _EMPTY_DIGEST:
            raise ConfigError(f"{self._path}, line {number}: sha256 is that of an empty key.")
        return record

    def _check_names(self, records: Iterable[KeyRecord]) -> None:
        seen: set[str] = set()
        for record in records:
            if not record.name or record.name in seen:
                raise ConfigError(f"{self._path}: there is already a key named {record.name!r}.")
            seen.add(record.name)

    def _write(self, records: Iterable[KeyRecord]) -> None:
        """Replace the file in one move, so that a reload never reads half of it.

        A folder that is missing is made, for its owner alone. Raises ConfigError.
        """
        draft = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.touch(mode=0o600)
            draft.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
            os.replace(draft, self._path)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}.") from None


class KeyRing:
    """Finds the tenant of a token.

    Without a key file everybody is the anonymous tenant. With one, nobody is, not even while the
    file is empty: revoking the last key must not open the door.

    Owner: the event loop.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._file = KeyFile(config.keys.file) if config.keys.file else None
        self._indices: dict[str, int] = {}
        self._tenants: list[tuple[bytes, Tenant]] = []
        self.records: tuple[KeyRecord, ...] = ()  # In force.
        self.reload(config)

    @property
    def num_keys(self) -> int:
        """Keys that are in force."""
        return len(self._tenants)

    @property
    def is_guarded(self) -> bool:
        """Whether a key is needed."""
        return self._file is not None

    def reload(self, config: Config) -> None:
        """Read the file again, with these tiers.

        Raises ConfigError and leaves everything as it was if anything is wrong.
        """
        records = self._file.read() if self._file else []
        self._check_tiers(records, config)
        indices = self._assign(records)
        self._config = config
        self.anonymous = self._anonymous()
        self._tenants = [
            (bytes.fromhex(record.sha256), self._tenant(record, indices[record.name])) for record in records
        ]
        self._indices = indices
        self.records = tuple(records)

    def add(self, config: Config, name: str, tier: str, *, is_admin: bool, created: str) -> str:
        """Make a key that is in force at once, and return it. Raises ConfigError, and nothing has changed then."""
        assert self._file is not None
        # First what is there: a file with an error in it is not written to.
        self.reload(config)
        num_max = self._config.keys.num_keys_max
        if self.num_keys >= num_max:
            raise ConfigError(
                f"keys.num_keys_max: there is room for {num_max} keys. Revoke one, or raise it and restart."
            )
        key = self._file.add(name, tier, is_admin=is_admin, created=created)
        self.reload(config)
        return key

    def revoke(self, config: Config, name: str) -> bool:
        """Take a key out of force and out of the file; False if there is none of that name.

        Raises ConfigError, and nothing has changed then.
        """
        assert self._file is not None
        self.reload(config)
        if not self._file.revoke(name):
            return False
        self.reload(config)
        return True

    def find(self, token: bytes | None) -> Tenant:
        """The tenant whose key this is. Raises Unauthorized.

        Every key is compared, whether an earlier one matched or not, and only digests are: the
        time says nothing about which key is near.
        """
        if not self.is_guarded:
            return self.anonymous
        digest = hashlib.sha256(token or b"").digest()
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if not token or found is None:
            raise Unauthorized
        return found

    def weights(self) -> list[float]:
        """The weight of every key index that the core has room for."""
        weights = [1.0] * (1 + self._config.keys.num_keys_max)
        for _, tenant in self._tenants:
            weights[tenant.key_index] = tenant.weight
        return weights

    def tenants(self) -> Iterator[Tenant]:
        """All tenants with a key in force."""
        return (tenant for _, tenant in self._tenants)

    def _anonymous(self) -> Tenant:
        name = self._config.keys.anonymous_tier
        tier = self._config.tiers[name]
        return Tenant("anonymous", name, _ANONYMOUS_INDEX, tier.level, tier.best_level, tier.weight, True)

    def _tenant(self, record: KeyRecord, key_index: int) -> Tenant:
        tier = self._config.tiers[record.tier]
        weight = tier.weight if record.weight is None else record.weight
        return Tenant(
            record.name,
            record.tier,
            key_index,
            tier.level,
            tier.best_level,
            weight,
            record.is_admin,
        )

    def _check_tiers(self, records: Iterable[KeyRecord], config: Config) -> None:
        for record in records:
            if record.tier not in config.tiers:
                known = ", ".join(config.tiers)
                raise ConfigError(
                    f"{self._config.keys.file}: key {record.name!r} has tier {record.tier!r}; there are {known}."
                )

    def _assign(self, records: list[KeyRecord]) -> dict[str, int]:
        """A number for every name: known names keep theirs, new ones take the lowest never used.

        Numbers of revoked keys come back only when no other is left: requests of theirs may still
        run, and their part of the prefix cache may still be there.
        """
        num_max = self._config.keys.num_keys_max
        if len(records) > num_max:
            raise ConfigError(
                f"keys.num_keys_max: {self._config.keys.file} has {len(records)} keys, "
                f"there is room for {num_max}. Raise it and restart."
            )
        names = {record.name for record in records}
        indices = dict(self._indices)
        if len(names | indices.keys()) > num_max:
            indices = {name: index for name, index in indices.items() if name in names}
        free = iter(sorted(set(range(1, num_max + 1)) - set(indices.values())))
        for record in records:
            if record.name not in indices:
                indices[record.name] = next(free)
        return indices
