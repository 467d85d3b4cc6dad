"""A small byte-level BPE vocabulary, made up on the spot.

Any text can be tokenised with it: all 256 bytes are tokens, some frequent words are merged, and the
markers of a chat are control tokens. Its tokens may also be pieces of a character, as in real
byte-level vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NORMAL, CONTROL = 1, 3

# Merged letter by letter, so that ordinary text is shorter in tokens than in bytes.
WORDS = (
    " the", " of", " and", " to", " in", " is", " that", " it", " you", " was", " for", " are", " with", " this",
    "Hello", "Hi", " world", "assistant", "user", "system", " queue", " token", " model", "ing", "tion", "ed",
)  # fmt: skip


@dataclass(slots=True)
class Vocabulary:
    """Token texts as they stand in a GGUF file, their types, the merges, and the ids by their bytes."""

    texts: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    ids: dict[bytes, int] = field(default_factory=dict)

    def add(self, token: bytes, kind: int = NORMAL) -> int:
        """Add a token unless it is there; its id."""
        if token not in self.ids:
            self.ids[token] = len(self.texts)
            self.texts.append(token.decode() if kind == CONTROL else spell(token))
            self.types.append(kind)
        return self.ids[token]


def build(controls: tuple[str, ...], extra: tuple[bytes, ...], size: int) -> Vocabulary:
    """A vocabulary with the given control tokens and extra tokens, filled up to `size` if it is smaller.

    Extra tokens come out of the model only: no merge leads to them, so no text is tokenised into them.
    """
    vocabulary = Vocabulary()
    for text in controls:
        vocabulary.add(text.encode(), CONTROL)
    for byte in range(256):
        vocabulary.add(bytes([byte]))
    for word in WORDS:
        _merge(vocabulary, word.encode())
    for token in extra:
        vocabulary.add(token)
    for number in range(size - len(vocabulary.texts)):
        vocabulary.add(f"[filler {number}]".encode())
    return vocabulary


def spell(token: bytes) -> str:
    """How a byte-level vocabulary writes bytes: each byte as one printable character."""
    return "".join(_letter(byte) for byte in token)


def _letter(byte: int) -> str:
    # GPT-2's rule: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up in their order.
    if _is_printable(byte):
        return chr(byte)
    return chr(0x100 + sum(not _is_printable(lower) for lower in range(byte)))


def _is_printable(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF


def _merge(vocabulary: Vocabulary, word: bytes) -> None:
    for end in range(2, len(word) + 1):
        merge = f"{spell(word[: end - 1])} {spell(word[end - 1 : end])}"
        if merge not in vocabulary.merges:
            vocabulary.merges.append(merge)
        vocabulary.add(word[:end])
