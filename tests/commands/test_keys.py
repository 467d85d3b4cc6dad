"""`lqs keys`, as an operator sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lqs.cli import main


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "keys.jsonl")
    monkeypatch.setenv("LQS_KEYS_FILE", path)
    return path


def test_a_key_is_made_listed_and_revoked(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "--name", "ann", "--tier", "vip", "--admin"]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("lqs-")
    assert main(["keys", "add", "--name", "bob", "--file", file]) == 0
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:2] for line in listed.splitlines()] == [["ann", "vip"], ["bob", "normal"]]
    assert "admin" in listed.splitlines()[0]
    assert key not in listed
    assert main(["keys", "revoke", "ann"]) == 0
    assert main(["keys", "revoke", "ann"]) == 1
    assert "there is no key named 'ann'" in capsys.readouterr().err


def test_a_tier_that_does_not_exist_is_wrong_use(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "--name", "ann", "--tier", "gold"]) == 2
    assert "there are vip, normal, free, batch" in capsys.readouterr().err
    assert not Path(file).exists()


def test_without_a_file_it_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list"]) == 2
    assert "--file" in capsys.readouterr().err
