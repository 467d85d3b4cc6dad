"""The pages say what the code does: commands, settings, metrics and refusals."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lqs import cli, errors
from lqs.settings import load
from tests.write_docs import PAGE, REPOSITORY, with_blocks

README = (REPOSITORY / "README.md").read_text()
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "models").glob("*.md")]


def blocks(language: str) -> Iterator[str]:
    for page in PAGES:
        yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_lists_in_the_operating_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == with_blocks(page), "run: python -m tests.write_docs"


def test_every_refusal_is_explained() -> None:
    page = PAGE.read_text()
    reasons = {*errors._STATUS_OF_REASON, "timeout", "context_length_exceeded"}
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()


def test_every_command_is_in_the_operating_page() -> None:
    page = PAGE.read_text()
    assert {command for command in cli.COMMANDS if f"`lqs {command}" not in page} == set()


def test_every_make_word_in_the_pages_exists() -> None:
    words = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    used = {word for page in PAGES for word in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)}
    assert used - words == set()


@pytest.mark.parametrize("config", list(blocks("toml")))
def test_every_config_in_the_pages_is_valid(config: str, tmp_path: Path) -> None:
    assert tomllib.loads(config)
    path = tmp_path / "lqs.toml"
    path.write_text(config)
    load(str(path))


@pytest.mark.parametrize("program", list(blocks("python")))
def test_every_program_in_the_pages_compiles(program: str) -> None:
    compile(program, "page", "exec")


@pytest.mark.parametrize("body", re.findall(r"-d '(\{.*?\})'$", README, re.MULTILINE))
def test_every_request_in_the_readme_is_json(body: str) -> None:
    assert json.loads(body)["messages"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_the_changelog_begins_with_what_is_unreleased() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[0] == "Unreleased"
