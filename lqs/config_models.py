"""What an operator can say about models: `[model]`, and a table `[models.NAME]` for each further one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Struct

from lqs.describe import key

# The core has a queue for each.
NUM_MODELS_MAX = 64
_NAME = re.compile(r"[A-Za-z0-9][\w./:+-]{0,127}(@[\w.+-]{1,64})?")
_NAME_RULE = "a name is letters, digits and ._-/:+, a letter or digit first; a version follows an @."


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is served."""

    path: Annotated[str, key("GGUF file or the name of a fetched model; empty: the default model.")] = ""
    name: Annotated[
        str,
        key("Its name in requests, NAME or NAME@VERSION; empty: the file's name without .gguf, or the table's name."),
    ] = ""
    aliases: Annotated[
        tuple[str, ...],
        key("Further names; models that have one in common share its requests.", min_length=0, max_length=64),
    ] = ()
    share: Annotated[
        float,
        key(
            "Its part of the requests for a name that several versions have, beside the others'; 0: only by version.",
            ge=0,
            le=1_000_000,
        ),
    ] = 1.0
    devices: Annotated[
        tuple[str, ...], key("Its device slots; empty: those of engine.devices.", min_length=0, max_length=64)
    ] = ()
    ctx: Annotated[
        int, key("KV cells on each of its device slots; 0: as engine.ctx says.", "tokens", ge=0, le=16_777_216)
    ] = 0
    on_demand: Annotated[
        bool, key("Loaded when it is asked for; leaves when another such model needs the memory and nobody uses it.")
    ] = False
    default_max_tokens: Annotated[
        int,
        key("When a request names no max_tokens; 0: to the end of the context.", "tokens", ge=0, le=1_000_000_000),
    ] = 0
    max_tokens_max: Annotated[
        int,
        key("No answer is longer, whatever it asks; 0: the context is the limit.", "tokens", ge=0, le=1_000_000_000),
    ] = 0
    chat_template: Annotated[str, key("File with a Jinja template; empty: the model's own.")] = ""
    fallback: Annotated[
        str,
        key("Smaller model that answers when waits are long: file, or name of a model; empty: none."),
    ] = ""

    @property
    def base(self) -> str:
        """Its name without the version."""
        return self.name.partition("@")[0]

    @property
    def version(self) -> str:
        """Its version; empty if it has none."""
        return self.name.partition("@")[2]


def model_rules(model: ModelConfig, models: Mapping[str, ModelConfig]) -> Iterator[tuple[bool, str]]:
    """What no key of a model alone can show: whether it holds, and what to say if not."""
    yield len(models) < NUM_MODELS_MAX, f"models: there may be at most {NUM_MODELS_MAX - 1}."
    is_bare = bool(model.path) or model == ModelConfig() or not models
    yield is_bare, "model.path: is empty, and with [models.NAME] tables nothing is served of [model] then."
    yield model.on_demand is False or bool(models), "model.on_demand: the only model is there from the start."
    yield not model.name or _is_name(model.name), f"model.name: {_NAME_RULE}"
    for name, each in models.items():
        where = f"models.{name}"
        yield _is_name(name), f"{where}: {_NAME_RULE}"
        yield each.name == "", f"{where}.name: the table's name is the model's."
        yield each.path != "", f"{where}.path: which file is it?"
    for where, each in (("model", model), *((f"models.{name}", each) for name, each in models.items())):
        wrong = [alias for alias in each.aliases if not _is_name(alias) or "@" in alias]
        yield not wrong, f"{where}.aliases: {', '.join(wrong)}: an alias is a name without a version."


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def served_of(model: ModelConfig, models: Mapping[str, ModelConfig]) -> Sequence[ModelConfig]:
    """All that is served, [model] first unless there are only tables; those of tables with their names."""
    tables = [msgspec.structs.replace(each, name=name) for name, each in models.items()]
    return tables if models and not model.path else [model, *tables]
