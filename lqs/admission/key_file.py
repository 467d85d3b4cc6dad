"""The file of API keys: made once, stored as digests.

A key has 256 random bits, so a plain SHA-256 of it is as hard to turn around as any slow hash; slow
hashes are for what people can remember. The file holds one JSON object a line.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from lqs.errors import ConfigError
from lqs.plain import open_plain

_KEY_PREFIX = "lqs-"
# What is kept of a key: its beginning, with 24 of its 256 bits.
_PREFIX_CHARS = len(_KEY_PREFIX) + 4
_NAME_CHARS_MAX = 100
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


# Is shown what is about to be written, and raises if it is not to be.
Agree = Callable[[list[KeyRecord]], None]


def _agree(_: list[KeyRecord]) -> None:
    """To everything."""


def check_name(name: str) -> None:
    """Raises ConfigError for what is no name of a key: it stands in logs, and in a path."""
    if not 0 < len(name) <= _NAME_CHARS_MAX or not name.isprintable() or name.strip() != name:
        raise ConfigError(f"A key's name has 1 to {_NAME_CHARS_MAX} printable characters, with no blank at its ends.")


class KeyFile:
    """The file that `lqs keys` and the server edit. A missing file has no keys.

    Who changes it holds a lock from the read to the write; one who is not `patient` does not wait for another.
    """

    def __init__(self, path: str, *, is_patient: bool = True) -> None:
        self._path = Path(path)
        self._is_patient = is_patient

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

    def add(self, name: str, tier: str, *, is_admin: bool = False, created: str, agree: Agree = _agree) -> str:
        """Make a key, store its digest and return it; it cannot be shown again.

        Raises ConfigError if the name is none or taken, or the file cannot be written, and what `agree` raises.
        """
        check_name(name)
        key = _KEY_PREFIX + secrets.token_urlsafe(32)
        digest = hashlib.sha256(key.encode()).hexdigest()
        record = KeyRecord(name, tier, digest, is_admin, created=created, prefix=key[:_PREFIX_CHARS])
        with self._locked():
            records = [*self.read(), record]
            self._check_names(records)
            agree(records)
            self._write(records)
        return key

    def revoke(self, name: str, *, agree: Agree = _agree) -> bool:
        """Take the key out of the file; False if there is none of that name. Raises ConfigError, and as `agree`."""
        with self._locked():
            records = self.read()
            kept = [record for record in records if record.name != name]
            agree(kept)
            if len(kept) == len(records):
                return False
            self._write(kept)
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep everybody else from changing the file. Raises ConfigError.

        The lock is on a file beside it, as each change puts another file in its place. It stays: whoever removed it
        would part those who wait for it from those who come. A folder that is missing is made, for its owner alone.
        """
        lock = self._path.with_name(self._path.name + ".lock")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be changed: {lock.name}: {error.strerror}.") from None
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        """Raises ConfigError."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if self._is_patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path}: somebody else is changing it just now; try again.") from None
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be locked: {error.strerror}.") from None

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
        """Replace the file in one move, so that a reload never reads half of it. Raises ConfigError."""
        draft = self._path.with_name(self._path.name + ".new")
        try:
            draft.touch(mode=0o600)
            draft.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
            os.replace(draft, self._path)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}.") from None
