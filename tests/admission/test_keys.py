"""Keys: made once, stored as digests, found by the whole ring, reloaded without losing anybody."""

import hashlib
import hmac
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lqs.admission import keys as keys_module
from lqs.admission.key_file import KeyFile
from lqs.admission.keys import KeyRing
from lqs.config import Config
from lqs.errors import ConfigError, Unauthorized
from lqs.settings import load


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "keys.jsonl")


def config_for(path: str, **flags: Any) -> Config:
    return load(None, None, {"keys.file": path, **flags})


def add(path: str, name: str, tier: str = "normal", **kind: Any) -> bytes:
    key = KeyFile(path).add(name, tier, is_admin=kind.get("is_admin", False), created="2026-01-01")
    return key.encode()


def test_a_key_is_shown_once_and_only_its_digest_is_kept(path: str) -> None:
    key = add(path, "ann", "vip", is_admin=True)
    text = Path(path).read_text()
    assert key.decode() not in text
    assert hashlib.sha256(key).hexdigest() in text
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


def test_the_tenant_of_a_key_has_its_tier(path: str) -> None:
    key = add(path, "ann", "vip", is_admin=True)
    tenant = KeyRing(config_for(path)).find(key)
    assert (tenant.name, tenant.tier, tenant.level, tenant.best_level) == ("ann", "vip", 0, 0)
    assert tenant.is_admin
    assert tenant.key_index > 0


@pytest.mark.parametrize("token", [None, b"", b"caf\xe9", b"\xf0\x9f\x98\x80", b"x" * 65_536, b"KEY", b"lqs-"])
def test_any_other_token_is_refused_whatever_its_bytes(path: str, token: bytes | None) -> None:
    add(path, "ann")
    with pytest.raises(Unauthorized):
        KeyRing(config_for(path)).find(token)


def test_every_key_is_compared_also_after_a_match(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = [add(path, name) for name in ("ann", "bob", "eve")]
    ring = KeyRing(config_for(path))
    compared = []

    def compare(known: bytes, digest: bytes) -> bool:
        compared.append(known)
        return hmac_compare(known, digest)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    assert ring.find(first).name == "ann"
    assert len(compared) == 3


def test_without_a_key_file_everybody_is_anonymous() -> None:
    ring = KeyRing(Config())
    assert ring.find(None) is ring.find(b"sk-none") is ring.anonymous
    assert ring.anonymous.level == 2
    assert not ring.is_guarded


def test_an_empty_key_file_lets_nobody_in(path: str) -> None:
    key = add(path, "ann")
    ring = KeyRing(config_for(path))
    assert KeyFile(path).revoke("ann")
    ring.reload(config_for(path))
    for token in (key, None):
        with pytest.raises(Unauthorized):
            ring.find(token)


def test_an_empty_configured_key_is_refused_at_start(path: str) -> None:
    digest = hashlib.sha256(b"").hexdigest()
    Path(path).write_text(f'{{"name":"x","tier":"vip","sha256":"{digest}"}}\n')
    with pytest.raises(ConfigError, match="line 1: sha256"):
        KeyRing(config_for(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"name":"x","tier":"vip","sha256":"12"}', "line 1: Expected `str` matching"),
        ('{"name":"x","tier":"vip","sha256":"' + "z" * 64 + '"}', "line 1: Expected `str` matching"),
        ('{"name":"x","tier":"gold","sha256":"' + "0" * 64 + '"}', "tier 'gold'"),
        ('{"name":"","tier":"vip","sha256":"' + "0" * 64 + '"}', "named ''"),
        ('{"nam":"x"}', "line 1"),
    ],
)
def test_a_wrong_line_is_named(path: str, line: str, message: str) -> None:
    Path(path).write_text(line + "\n")
    with pytest.raises(ConfigError) as caught:
        KeyRing(config_for(path))
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyFile(str(tmp_path)).read()


def test_names_are_unique(path: str) -> None:
    add(path, "ann")
    with pytest.raises(ConfigError, match="already a key named 'ann'"):
        add(path, "ann")
    assert not KeyFile(path).revoke("bob")


def test_a_reload_keeps_numbers_and_takes_new_keys(path: str) -> None:
    ann = add(path, "ann")
    ring = KeyRing(config_for(path))
    number = ring.find(ann).key_index
    bob = add(path, "bob")
    KeyFile(path).revoke("ann")
    ring.reload(config_for(path))
    assert ring.find(bob).key_index != number
    with pytest.raises(Unauthorized):
        ring.find(ann)
    assert [tenant.name for tenant in ring.tenants()] == ["bob"]


def test_numbers_of_revoked_keys_come_back_only_when_no_other_is_left(path: str) -> None:
    config = config_for(path, **{"keys.num_keys_max": 2})
    add(path, "ann")
    ring = KeyRing(config)
    KeyFile(path).revoke("ann")
    bob = add(path, "bob")
    ring.reload(config)
    assert ring.find(bob).key_index == 2
    eve = add(path, "eve")
    ring.reload(config)
    assert ring.find(eve).key_index == 1
    assert ring.find(bob).key_index == 2


def test_a_reload_that_fails_changes_nothing(path: str) -> None:
    ann = add(path, "ann")
    ring = KeyRing(config_for(path))
    with Path(path).open("a") as file:
        file.write("broken\n")
    with pytest.raises(ConfigError):
        ring.reload(config_for(path))
    assert ring.find(ann).name == "ann"


def test_more_keys_than_there_is_room_for_are_refused(path: str) -> None:
    for name in ("ann", "bob"):
        add(path, name)
    with pytest.raises(ConfigError, match=": 2 keys, there is room for 1"):
        KeyRing(config_for(path, **{"keys.num_keys_max": 1}))


@pytest.mark.parametrize("weight", ["0", "-1", "1e300", "0.0001"])
def test_a_weight_that_the_core_does_not_take_is_named_with_its_line(path: str, weight: str) -> None:
    digest = "0" * 64
    Path(path).write_text(f'{{"name":"x","tier":"vip","sha256":"{digest}","weight":{weight}}}\n')
    with pytest.raises(ConfigError, match=r"line 1: .*weight"):
        KeyFile(path).read()


def test_weights_stand_at_the_numbers_of_their_keys(path: str) -> None:
    digest = hashlib.sha256(b"k").hexdigest()
    Path(path).write_text(f'{{"name":"x","tier":"vip","sha256":"{digest}","weight":3}}\n\n')
    ring = KeyRing(config_for(path, **{"keys.num_keys_max": 2}))
    assert ring.weights() == [1.0, 3.0, 1.0]
    assert ring.num_keys == 1


def test_the_ring_is_what_was_written_and_a_write_that_fails_changes_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read again afterwards: it could have another error by then, with the file changed already."""
    add(path, "ann")
    config = config_for(path)
    ring = KeyRing(config)
    reads = []
    read = KeyFile.read

    def count(file: KeyFile) -> Any:
        assert not reads
        reads.append(file)
        return read(file)

    monkeypatch.setattr(KeyFile, "read", count)
    key = ring.add(config, "bob", "vip", is_admin=False, created="")
    assert ring.find(key.encode()).name == "bob"
    reads.clear()
    assert ring.revoke(config, "ann")
    assert [record.name for record in ring.records] == ["bob"]
    before = Path(path).read_bytes()
    Path(path + ".new").mkdir()
    for change in (
        lambda: ring.add(config, "eve", "vip", is_admin=False, created=""),
        lambda: ring.revoke(config, "bob"),
    ):
        reads.clear()
        with pytest.raises(ConfigError, match="cannot be written"):
            change()
        assert [record.name for record in ring.records] == ["bob"]
        assert Path(path).read_bytes() == before


def test_a_key_that_was_taken_out_by_hand_is_out_of_force_when_it_is_revoked(path: str) -> None:
    key = add(path, "ann")
    config = config_for(path)
    ring = KeyRing(config)
    assert KeyFile(path).revoke("ann")
    assert not ring.revoke(config, "ann")
    with pytest.raises(Unauthorized):
        ring.find(key)


def test_while_one_changes_the_file_another_waits_and_the_server_is_told_to_try_again(path: str) -> None:
    """`lqs keys add` between the server's read and its write would bring back what was just revoked."""
    add(path, "ann")
    config = config_for(path)
    ring = KeyRing(config)
    waiting = threading.Thread(target=add, args=(path, "bob"))

    def meanwhile(_: Any) -> None:
        waiting.start()
        for change in (
            lambda: ring.revoke(config, "ann"),
            lambda: ring.add(config, "eve", "vip", is_admin=False, created=""),
        ):
            with pytest.raises(ConfigError, match="try again"):
                change()

    assert KeyFile(path).revoke("ann", agree=meanwhile)
    waiting.join(10)
    assert [record.name for record in KeyFile(path).read()] == ["bob"]
    assert [record.name for record in ring.records] == ["ann"]
    assert not ring.revoke(config, "ann")


def test_many_that_change_the_file_at_once_lose_nothing(path: str) -> None:
    threads = [threading.Thread(target=add, args=(path, f"k{n}")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert {record.name for record in KeyFile(path).read()} == {f"k{n}" for n in range(8)}


def test_who_follows_is_told_each_weight_whenever_keys_or_tiers_change(path: str) -> None:
    config = config_for(path)
    ring = KeyRing(config)
    told: dict[int, float] = {}
    ring.follow(told.__setitem__)
    ring.add(config, "ann", "vip", is_admin=False, created="")
    assert told == {1: config.tiers["vip"].weight}
    tiers = config.tiers | {"vip": msgspec.structs.replace(config.tiers["vip"], weight=9.0)}
    ring.reload(msgspec.structs.replace(config, tiers=tiers))
    assert told == {1: 9.0}
