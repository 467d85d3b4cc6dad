"""`lqs keys`, as an operator sees it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lqs.admission.key_file import KeyFile
from lqs.cli import main


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "keys.jsonl")
    monkeypatch.setenv("LQS_KEYS_FILE", path)
    return path


def test_a_key_is_made_listed_and_revoked(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "--name", "ann", "--tier", "vip"]) == 0
    said = capsys.readouterr()
    assert "only time the key is shown" in said.err
    assert "SIGHUP" in said.err
    key = said.out.strip()
    assert key.startswith("lqs-")
    assert main(["keys", "add", "--name", "bob", "--file", file]) == 0
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:2] for line in listed.splitlines()] == [["ann", "vip"], ["bob", "normal"]]
    assert key not in listed
    assert main(["keys", "revoke", "ann"]) == 0
    assert "SIGHUP" in capsys.readouterr().err
    assert main(["keys", "revoke", "ann"]) == 1
    assert "there is no key named 'ann'" in capsys.readouterr().err


def test_a_key_may_be_an_admins(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "--name", "ann"]) == 0
    assert main(["keys", "add", "--name", "boss", "--admin"]) == 0
    capsys.readouterr()
    records = {record.name: record.is_admin for record in KeyFile(file).read()}
    assert records == {"ann": False, "boss": True}


def test_revoke_takes_the_name_as_add_does(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "--name", "ann"]) == 0
    assert main(["keys", "revoke", "--name", "ann"]) == 0
    assert main(["keys", "revoke"]) == 2


def test_a_folder_that_is_missing_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "keys.json"
    assert main(["keys", "add", "--name", "ann", "--file", str(path)]) == 0
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("command", [["add", "--name", "ann"], ["list"], ["revoke", "ann"]])
def test_a_file_that_cannot_be_used_is_named_as_it_was_given(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "keys.json")
    assert main(["keys", *command, "--file", path]) == 2
    assert capsys.readouterr().err.startswith(f"lqs: {path}: cannot be ")


def test_a_file_named_in_the_config_lies_beside_it(tmp_path: Path) -> None:
    config = tmp_path / "lqs.toml"
    config.write_text('[keys]\nfile = "keys.json"\n')
    assert main(["keys", "add", "--name", "ann", "--config", str(config)]) == 0
    assert (tmp_path / "keys.json").exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{tmp_path}/{'x' * 300}/keys.json"
    assert main(["keys", "add", "--name", "ann", "--file", path]) == 2
    assert path in capsys.readouterr().err


def test_a_tier_that_does_not_exist_is_wrong_use(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "--name", "ann", "--tier", "gold"]) == 2
    assert "there are vip, normal, free, batch" in capsys.readouterr().err
    assert not Path(file).exists()


def test_without_a_file_it_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list"]) == 2
    assert "--file" in capsys.readouterr().err
