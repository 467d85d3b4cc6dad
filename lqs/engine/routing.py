"""Which model a name in a request means.

    name                            means
    qwen@v2                         that version
    qwen, with a version beside it  that version, `x-lqs-model-version: v2`
    qwen                            one of its versions, as their shares stand to each other
    chat, an alias                  one of the models that have it, in the same way
    no name                         the first model, by its name without the version

Shares are split by the smooth weighted round robin that also places requests (core/placement.pxi), among
those that can serve now: with 9 and 1 every ten requests are split exactly, and never in bursts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Choice:
    """One model behind a name, and its turn."""

    name: str
    share: float
    turn: float = 0.0


class Routing:
    """Names to models. Owner: the event loop.

    `models` are the full names, their shares and their aliases, in order.
    """

    def __init__(self, models: Sequence[tuple[str, float, Iterable[str]]]) -> None:
        self._names = {name for name, _, _ in models}
        self._behind: dict[str, list[Choice]] = {}
        for name, share, aliases in models:
            for shared in shared_names(name, aliases):
                self._behind.setdefault(shared, []).append(Choice(name, share))
        self.first = base_of(models[0][0])

    def all_of(self, name: str) -> list[str]:
        """The model of exactly that name; else all behind it, in order."""
        return [name] if name in self._names else [choice.name for choice in self._behind.get(name, ())]

    def find(self, name: str) -> str | None:
        """The model of exactly that name; else of those behind it the one with the largest share. Nobody's turn."""
        if name in self._names:
            return name
        choices = self._behind.get(name, ())
        return max(choices, key=lambda choice: choice.share).name if choices else None

    def route(self, name: str, version: str, can_serve: Callable[[str], bool]) -> str | None:
        """The model that is to answer a request for that name; it is its turn. None: there is none."""
        if version:
            named = f"{base_of(name)}@{version}" if version_of(name) in ("", version) else ""
            behind = [each.name for each in self._behind.get(name, ()) if version_of(each.name) == version]
            return named if named in self._names else next(iter(behind), None)
        choices = self._behind.get(name, [])
        if not choices:
            return name if name in self._names else None
        choices = [each for each in choices if each.share > 0] or choices[:1]
        # Those that cannot are asked only where nobody can: they say why.
        choices = [each for each in choices if can_serve(each.name)] or choices
        return _next_of(choices).name


def shared_names(name: str, aliases: Iterable[str]) -> list[str]:
    """The names that a model may have together with others, each once."""
    return list(dict.fromkeys((base_of(name), *aliases)))


def base_of(name: str) -> str:
    """A name without its version."""
    return name.partition("@")[0]


def version_of(name: str) -> str:
    """The version in a name; empty if there is none."""
    return name.partition("@")[2]


def _next_of(choices: Sequence[Choice]) -> Choice:
    """Smooth weighted round robin: each gains its share, the highest goes and pays for all."""
    if len(choices) == 1:
        return choices[0]
    for each in choices:
        each.turn += each.share
    chosen = max(choices, key=lambda choice: choice.turn)
    chosen.turn -= sum(each.share for each in choices)
    return chosen
