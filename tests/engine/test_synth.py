"""Made-up models load in libllama and do what their recipe says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lqs.engine.gguf import read_header
from lqs.engine.synth import TEMPLATES, Recipe, parse_shape, write
from lqs.engine.synth.shapes import PRESETS, Shape
from lqs.engine.synth.vocabulary import build, spell

# A process of its own: what it maps and logs stays out of the test's.
GENERATE = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, swa_full=False)
tokens = model.tokenize(sys.argv[2].encode(), add_bos=True, special=True)
made = []
for token in model.generate(tokens, temp=0.0):
    made.append(token)
    if len(made) == int(sys.argv[3]) or llama_cpp.llama_vocab_is_eog(model._model.vocab, token):
        break
print(tokens)
print(b"".join(model.detokenize([token]) for token in made).hex())
"""


def generate(path: Path, prompt: str = "Hello", num_tokens: int = 8) -> tuple[list[int], bytes]:
    """The prompt's ids and the text that libllama makes of it."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(path), prompt, str(num_tokens)], capture_output=True, text=True, check=True
    )
    ids, text = done.stdout.splitlines()[-2:]
    return [int(number) for number in re.findall(r"\d+", ids)], bytes.fromhex(text)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_a_model_of_each_architecture_and_type_generates(architecture: str, dtype: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", Recipe(architecture=architecture, dtype=dtype))
    read_header(path)
    _, text = generate(path)
    assert text


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = (
        write(tmp_path / name, Recipe(seed=seed)).read_bytes() for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == second
    assert first != other


def test_a_script_is_said_byte_for_byte_after_any_prompt(tmp_path: Path) -> None:
    script = (b"Hi ", b"\xf0\x9f", b"\x98\x80", b"!", b"\xe6\xad", b"\xaa")
    path = write(tmp_path / "m.gguf", Recipe(script=script))
    assert generate(path, "Hello")[1] == b"".join(script)
    assert generate(path, "the world ends")[1] == b"".join(script)


def test_a_script_can_end_its_turn_with_another_token_than_the_end_of_text(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", Recipe(eot="<|eot_id|>", script=(b"Hello", b"<|eot_id|>", b"assistant")))
    assert generate(path, "Hi")[1] == b"Hello"


def test_the_start_token_is_added_only_where_the_file_says_so(tmp_path: Path) -> None:
    bos = 0
    assert generate(write(tmp_path / "with", Recipe(add_bos=True)), num_tokens=1)[0][0] == bos
    assert bos not in generate(write(tmp_path / "without", Recipe(add_bos=False)), num_tokens=1)[0]


def test_text_is_tokenised_into_words_and_bytes(tmp_path: Path) -> None:
    recipe = Recipe()
    ids = build((), (), 0).ids
    tokens, _ = generate(write(tmp_path / "m", recipe), "Hello the 歪", num_tokens=1)
    assert len(tokens) == len([b"Hello", b" the", b" "]) + len("歪".encode())
    assert b" the" in ids


def test_a_vocabulary_is_filled_up_to_the_size_of_its_shape(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m", Recipe(shape=Shape(vocab=1000))))
    assert header.metadata["tokenizer.ggml.tokens"].length == 1000  # type: ignore[union-attr]


def test_every_byte_has_a_printable_letter_of_its_own() -> None:
    letters = {spell(bytes([byte])) for byte in range(256)}
    assert len(letters) == 256
    assert all(letter.isprintable() and not letter.isspace() for letter in letters)
    assert (spell(b" "), spell(b"\n"), spell(b"A")) == ("Ġ", "Ċ", "A")


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()])
def test_a_file_holds_its_template_or_none(template: str | None, tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m", Recipe(chat_template=template)))
    assert header.metadata.get("tokenizer.chat_template") == template


def test_a_file_without_an_end_of_turn_token_does_not_name_one(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m", Recipe(eot=None)))
    assert "tokenizer.ggml.eot_token_id" not in header.metadata


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write(tmp_path / "m", Recipe(), lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def break_off(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m", Recipe(), break_off)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"architecture": "gpt5"}, "architectures"),
        ({"dtype": "q1"}, "types"),
        ({"architecture": "mamba", "script": (b"a",)}, "only a llama model"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Recipe(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "reason"),
    [((b"a", b"b", b"a"), "a token twice"), (tuple(b"%d" % i for i in range(70)), "needs an embedding")],
)
def test_a_script_that_cannot_be_said_is_refused(script: tuple[bytes, ...], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        write(tmp_path / "m", Recipe(script=script))


def test_a_shape_is_a_preset_its_changes_or_both() -> None:
    assert parse_shape("tiny") == PRESETS["tiny"]
    assert parse_shape("layer=3, ctx=99") == Shape(layer=3, ctx=99)
    assert parse_shape("135m,ctx=2048").ctx == 2048


@pytest.mark.parametrize(
    "text", ["", "huge", "layer", "layer=x", "depth=3", "embd=48", "layer=0", "head=3", "head_kv=3"]
)
def test_a_shape_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape|multiple"):
        parse_shape(text)
