"""Writes the lists in docs/operating.md that follow from the code: `python -m tests.write_docs`.

test_docs.py fails while the page and the code disagree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lqs.settings import NAMED, Setting, settings

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "operating.md"
NAMES = ("metrics", "families", "tables", "gpus", "models")
METRICS = [REPOSITORY / "lqs" / "observe" / f"{name}.py" for name in NAMES]


def settings_table() -> Iterator[str]:
    """One table for each section of the config."""
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            yield f"\n**[{section}{'.NAME' if section in NAMED else ''}]**\n"
            yield "| key | what | unit | default | bound |\n|---|---|---|---|---|"
        yield f"| `{setting.key}` | {setting.doc} | {setting.unit} | {_default(setting)} | {setting.bound} |"


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"`{json.dumps(list(value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"


def metrics_table() -> Iterator[str]:
    """Every series by name, as the room pairs names with sentences."""
    yield "\n| metric | what |\n|---|---|"
    pairs = re.findall(r'"((?:vllm:|lqs_)\w+)",\s+"([^"]+)"', "".join(path.read_text() for path in METRICS))
    yield from (f"| `{name}` | {what} |" for name, what in sorted(pairs))


BLOCKS: dict[str, Callable[[], Iterator[str]]] = {"settings": settings_table, "metrics": metrics_table}


def with_blocks(page: str) -> str:
    """The page with each block as the code has it."""
    for name, lines in BLOCKS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n" + "\n".join(lines()) + f"\n\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_blocks(PAGE.read_text()))
