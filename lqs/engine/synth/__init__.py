"""Makes model files out of nothing: random weights of a given shape, with a vocabulary to match.

For tests and load tests: a model without a chat template, with a broken or hostile one, with an
end-of-turn token that is not its end-of-text token, without a prefix cache (a sliding window, a recurrent
state), of any size, or one that says a given text whatever it is asked. The same recipe gives the same
bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lqs.engine.synth import weights
from lqs.engine.synth.container import DTYPES, F32, Place, Value, header, padding
from lqs.engine.synth.shapes import ARCHITECTURES, Shape, parse_shape, settings, tensors
from lqs.engine.synth.vocabulary import Vocabulary, build

__all__ = ["ARCHITECTURES", "DTYPES", "TEMPLATES", "Recipe", "Shape", "parse_shape", "write"]

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "broken": "{% for message in messages %}{{ message['content'] }",
    "hostile": "{{ lipsum.__globals__['os'].popen('id').read() }}",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a made-up model file is to be.

    `chat_template`: the template itself, None for a file without one. `eot`: the end-of-turn token; None
    for a model that ends its turns with `eos`. `extra_tokens`: bytes of further tokens, whole characters
    or not. `script`: the tokens, by their bytes, that a `llama` model says after any prompt, then `eos`;
    a control token is named by its text. Tokens of the script are added to the vocabulary. A prompt that
    ends with a token of the script goes on from there.
    """

    shape: Shape = field(default_factory=Shape)
    architecture: str = "llama"
    dtype: str = "f32"
    seed: int = 0
    name: str = "synthetic"
    chat_template: str | None = TEMPLATES["chatml"]
    bos: str = "<|begin_of_text|>"
    eos: str = "<|end_of_text|>"
    eot: str | None = "<|im_end|>"
    add_bos: bool = False
    extra_tokens: tuple[bytes, ...] = ()
    script: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES or self.dtype not in DTYPES:
            raise ValueError(f"there are the architectures {ARCHITECTURES} and the types {tuple(DTYPES)}")
        if self.script and self.architecture != "llama":
            raise ValueError("only a llama model can follow a script")


def write(path: str | os.PathLike[str], recipe: Recipe, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the model file, whole or not at all.

    `progress` is called with the bytes of tensor data written so far and in all.

    Raises:
        ValueError: the recipe contradicts itself.
        OSError: the file cannot be written.
    """
    path = Path(path)
    vocabulary = _vocabulary(recipe)
    places = [
        Place(name, dimensions, DTYPES[recipe.dtype] if _is_matrix(name, dimensions) else F32)
        for name, dimensions in tensors(recipe.architecture, recipe.shape, len(vocabulary.texts))
    ]
    values = _source(recipe, vocabulary)
    total = sum(place.num_bytes for place in places)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(header(_metadata(recipe, vocabulary), places))
            written = 0
            for place in places:
                file.write(weights.encode(values(place), place.type) + padding(place.num_bytes))
                written += place.num_bytes
                if progress is not None:
                    progress(written, total)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _is_matrix(name: str, dimensions: tuple[int, ...]) -> bool:
    # The small tensors of a recurrent layer are read as f32 whatever the file says of them.
    return len(dimensions) == 2 and name.endswith("weight") and ".ssm_conv" not in name and ".ssm_dt" not in name


def _controls(recipe: Recipe) -> tuple[str, ...]:
    texts = (recipe.bos, recipe.eos, "<|im_start|>", "<|im_end|>", recipe.eot)
    return tuple(dict.fromkeys(text for text in texts if text is not None))


def _vocabulary(recipe: Recipe) -> Vocabulary:
    return build(_controls(recipe), recipe.extra_tokens + recipe.script, recipe.shape.vocab)


def _source(recipe: Recipe, vocabulary: Vocabulary) -> Callable[[Place], weights.Values]:
    ids = vocabulary.ids
    if not recipe.script:
        silent = [ids[text.encode()] for text in _controls(recipe)]
        return lambda place: weights.random(place, recipe.seed, silent)
    script = [ids[token] for token in recipe.script]
    weights.check_script(script, recipe.shape.embd)
    return lambda place: weights.scripted(place, script, ids[recipe.eos.encode()])


def _metadata(recipe: Recipe, vocabulary: Vocabulary) -> dict[str, Value]:
    metadata: dict[str, Value] = {
        "general.architecture": recipe.architecture,
        "general.name": recipe.name,
    }
    for key, value in settings(recipe.architecture, recipe.shape).items():
        metadata[f"{recipe.architecture}.{key}"] = value
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary.texts,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.bos_token_id": vocabulary.ids[recipe.bos.encode()],
        "tokenizer.ggml.eos_token_id": vocabulary.ids[recipe.eos.encode()],
        "tokenizer.ggml.add_bos_token": recipe.add_bos,
    }
    if recipe.eot is not None:
        metadata["tokenizer.ggml.eot_token_id"] = vocabulary.ids[recipe.eot.encode()]
    if recipe.chat_template is not None:
        metadata["tokenizer.chat_template"] = recipe.chat_template
    return metadata
