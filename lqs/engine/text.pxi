# Turns tokens into text that may leave: whole characters, nothing of a stop string.
#
#     token -> piece -> UTF-8 -> stop strings -> released
#
# UTF-8 holds back the beginning of a character until its end has come. Bytes that can
# no longer become one are replaced by U+FFFD where that is known: one for each longest
# beginning of a character, as the Unicode standard recommends and Python does.
#
# Stop strings are looked for in the text that comes out of that, byte by byte, with
# Knuth, Morris and Pratt's automaton, one per string: the state says how much of the
# end of the text is the beginning of that stop string. What the longest state covers
# is held back, all else may leave. Nothing is read twice, and where tokens begin and
# end makes no difference. The first stop string to be complete ends the text, right
# before itself; of two that end together the one that began first.
#
# A token counts with the first release after it, so that the counts over all releases
# add up to the tokens fed.

from libc.stdint cimport INT32_MIN, int32_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset, strlen

from lqs.engine.llama cimport (
    llama_vocab,
    llama_vocab_get_text,
    llama_vocab_is_control,
    llama_vocab_is_eog,
    llama_vocab_n_tokens,
)


cdef extern from "engine/_shim.h" namespace "lqs" nogil:
    int32_t piece_of(const llama_vocab* vocab, int32_t token, char* buf, int32_t size)


cdef enum:
    STOP_MAX = 16                # Stop strings of a request.
    STOP_BYTES_MAX = 1024        # Of one stop string; also how much text may be held back.
    PIECE_BYTES_MAX = 65535      # A longer piece is cut: the LOGPROBS payload has 16 bits for it.

cdef enum TextEnd:
    TEXT_OPEN = 0
    TEXT_STOP_STRING = 1
    TEXT_END_OF_TURN = 2
    TEXT_FLUSHED = 3

# Filled through a pointer and never returned: a build for coverage makes a Python object of
# what a function returns, and would take `bytes` for a C string.
cdef struct TokenText:
    const char* bytes
    uint32_t num_bytes

cdef struct PieceTable:          # One per model; constant once built.
    int32_t n_vocab
    uint32_t* starts             # n_vocab + 1 offsets into `bytes`.
    char* bytes                  # What each token prints.
    uint32_t* marker_starts      # n_vocab + 1 offsets into `markers`.
    char* markers                # The own text of tokens that print nothing: "<|im_end|>".
    uint8_t* eog                 # One byte per token: does it end a generation?
    uint32_t longest             # Bytes of the longest piece or marker.

cdef struct StopSet:             # One per request; constant once filled.
    uint32_t num_stops
    uint32_t longest             # Bytes.
    uint32_t starts[STOP_MAX + 1]
    char* bytes                  # All stop strings, one after the other.
    uint16_t* shorter            # Per byte: the next shorter state when the text does not go on so.

cdef struct TextRelease:
    const char* bytes            # Valid until the stream is fed or flushed again.
    uint32_t num_bytes
    uint32_t num_tokens          # Fed since the last release.

cdef struct TextStream:          # One per running sequence.
    const PieceTable* pieces
    const StopSet* stops
    char* text                   # Released by the last call, then held back.
    uint32_t capacity
    uint32_t num_released        # Bytes at the front, given away by the last call.
    uint32_t num_text            # All bytes in `text`.
    uint32_t num_tokens          # Fed since the last release.
    uint16_t matched[STOP_MAX]   # Bytes of each stop string that the text ends with.
    uint8_t partial[4]           # The beginning of a character.
    uint8_t num_partial
    uint8_t num_missing          # Bytes that the character still needs.
    uint8_t low                  # The next byte must lie between these two.
    uint8_t high
    TextEnd ended


# ---- pieces -------------------------------------------------------------------------

cdef struct Pile:                # A growing byte array.
    char* bytes
    size_t num
    size_t capacity


cdef char* _pile_room(Pile* pile, size_t num) noexcept nogil:
    """Where `num` more bytes may be written, or NULL without memory."""
    cdef size_t capacity = pile.capacity
    cdef char* moved
    if pile.num + num > capacity:
        capacity = 2 * (pile.num + num)
        moved = <char*>realloc(pile.bytes, capacity)
        if moved == NULL:
            return NULL
        pile.bytes = moved
        pile.capacity = capacity
    return pile.bytes + pile.num


cdef int _add_piece(Pile* pile, const llama_vocab* vocab, int32_t token) noexcept nogil:
    """Append what the token prints; 0, or -1 without memory."""
    cdef char* at = _pile_room(pile, 256)
    cdef int32_t num
    if at == NULL:
        return -1
    num = piece_of(vocab, token, at, 256)
    if INT32_MIN < num < 0:
        at = _pile_room(pile, <size_t>(-num))
        if at == NULL:
            return -1
        num = piece_of(vocab, token, at, -num)
    pile.num += <size_t>min(max(num, 0), PIECE_BYTES_MAX)
    return 0


cdef int _add_bytes(Pile* pile, const char* text, size_t num) noexcept nogil:
    """Append `num` bytes; 0, or -1 without memory."""
    cdef char* at = _pile_room(pile, num + 1)
    if at == NULL:
        return -1
    memcpy(at, text, num)
    pile.num += min(num, <size_t>PIECE_BYTES_MAX)
    return 0


cdef int _pieces_alloc(PieceTable* pieces, int32_t n_vocab) noexcept nogil:
    memset(pieces, 0, sizeof(PieceTable))
    pieces.n_vocab = n_vocab
    pieces.starts = <uint32_t*>calloc(<size_t>n_vocab + 1, sizeof(uint32_t))
    pieces.marker_starts = <uint32_t*>calloc(<size_t>n_vocab + 1, sizeof(uint32_t))
    pieces.eog = <uint8_t*>calloc(<size_t>n_vocab + 1, 1)
    return 0 if pieces.starts != NULL and pieces.marker_starts != NULL and pieces.eog != NULL else -1


cdef void _end_token(PieceTable* pieces, int32_t token, const Pile* prints, const Pile* markers) noexcept nogil:
    """Note where `token` ends in both piles."""
    cdef TokenText name
    pieces.starts[token + 1] = <uint32_t>prints.num
    pieces.marker_starts[token + 1] = <uint32_t>markers.num
    pieces.bytes = prints.bytes             # Either may have moved.
    pieces.markers = markers.bytes
    pieces_name(pieces, token, &name)
    pieces.longest = max(pieces.longest, name.num_bytes)


cdef int pieces_build(PieceTable* pieces, const llama_vocab* vocab) noexcept nogil:
    """Read every token's text once. 0, or -1 without memory; pairs with pieces_free, also then."""
    cdef Pile prints
    cdef Pile markers
    cdef int32_t token
    cdef const char* marker
    cdef int failed = _pieces_alloc(pieces, llama_vocab_n_tokens(vocab))
    memset(&prints, 0, sizeof(Pile))
    memset(&markers, 0, sizeof(Pile))
    for token in range(pieces.n_vocab):
        if failed != 0:
            break
        failed = _add_piece(&prints, vocab, token)
        if failed == 0 and llama_vocab_is_control(vocab, token):
            marker = llama_vocab_get_text(vocab, token)
            failed = _add_bytes(&markers, marker, strlen(marker))
        pieces.eog[token] = llama_vocab_is_eog(vocab, token)
        _end_token(pieces, token, &prints, &markers)
    return failed


cdef void pieces_free(PieceTable* pieces) noexcept nogil:
    free(pieces.starts)
    free(pieces.bytes)
    free(pieces.marker_starts)
    free(pieces.markers)
    free(pieces.eog)
    memset(pieces, 0, sizeof(PieceTable))


cdef inline bint pieces_is_eog(const PieceTable* pieces, int32_t token) noexcept nogil:
    return 0 <= token < pieces.n_vocab and pieces.eog[token] != 0


cdef inline void _slice(const char* bytes, const uint32_t* starts, int32_t n_vocab, int32_t token,
                        TokenText* out) noexcept nogil:
    out.bytes = bytes
    out.num_bytes = 0
    if 0 <= token < n_vocab:
        out.bytes = bytes + starts[token]
        out.num_bytes = starts[token + 1] - starts[token]


cdef inline void pieces_text(const PieceTable* pieces, int32_t token, TokenText* out) noexcept nogil:
    """What the token prints. An id outside of the vocabulary prints nothing."""
    _slice(pieces.bytes, pieces.starts, pieces.n_vocab, token, out)


cdef inline void pieces_marker(const PieceTable* pieces, int32_t token, TokenText* out) noexcept nogil:
    """The own text of a control token; of all others nothing."""
    _slice(pieces.markers, pieces.marker_starts, pieces.n_vocab, token, out)


cdef inline void pieces_name(const PieceTable* pieces, int32_t token, TokenText* out) noexcept nogil:
    """What a token is called where it is listed: what it prints, or its own text."""
    pieces_text(pieces, token, out)
    if out.num_bytes == 0:
        pieces_marker(pieces, token, out)


# ---- stop strings -------------------------------------------------------------------

cdef int stops_fill(StopSet* stops, list strings) except -1:
    """Take up to STOP_MAX strings of UTF-8; empty ones are ignored, they would end every text.

    ValueError for too many, one too long or not UTF-8: the caller's fault. Pairs with
    stops_free, also after a failure.
    """
    cdef bytes string, joined
    cdef const char* raw
    memset(stops, 0, sizeof(StopSet))
    joined = b"".join(strings)
    if len(strings) - strings.count(b"") > STOP_MAX:
        raise ValueError(f"at most {STOP_MAX} stop strings are allowed")
    raw = joined
    stops.bytes = <char*>malloc(len(joined) + 1)
    stops.shorter = <uint16_t*>calloc(len(joined) + 1, sizeof(uint16_t))
    if stops.bytes == NULL or stops.shorter == NULL:
        raise MemoryError
    memcpy(stops.bytes, raw, len(joined))
    for string in strings:
        if len(string) > STOP_BYTES_MAX:
            raise ValueError(f"a stop string must have at most {STOP_BYTES_MAX} bytes")
        string.decode()                     # UnicodeDecodeError is a ValueError.
        if string:
            _add_stop(stops, <uint32_t>len(string))
    return 0


cdef void _add_stop(StopSet* stops, uint32_t num) noexcept nogil:
    """Compute the failure links of the next stop string, `num` bytes long, already in `bytes`."""
    cdef uint32_t start = stops.starts[stops.num_stops]
    cdef const char* string = stops.bytes + start
    cdef uint16_t* shorter = stops.shorter + start
    cdef uint32_t i, state = 0
    for i in range(1, num):
        state = _advance(string, shorter, state, string[i])
        shorter[i] = <uint16_t>state
    stops.num_stops += 1
    stops.starts[stops.num_stops] = start + num
    stops.longest = max(stops.longest, num)


cdef inline uint32_t _advance(const char* string, const uint16_t* shorter, uint32_t state, char byte) noexcept nogil:
    """How many bytes of `string` the text ends with, once `byte` has come; state < its length."""
    while state > 0 and string[state] != byte:
        state = shorter[state - 1]
    return state + 1 if string[state] == byte else 0


cdef void stops_free(StopSet* stops) noexcept nogil:
    free(stops.bytes)
    free(stops.shorter)
    memset(stops, 0, sizeof(StopSet))


cdef uint32_t _match(TextStream* stream, char byte) noexcept nogil:
    """Advance every automaton by one byte; the length of the longest stop now complete, or 0."""
    cdef const StopSet* stops = stream.stops
    cdef uint32_t i, state, num, found = 0
    for i in range(stops.num_stops):
        num = stops.starts[i + 1] - stops.starts[i]
        state = _advance(stops.bytes + stops.starts[i], stops.shorter + stops.starts[i], stream.matched[i], byte)
        if state == num:
            found = max(found, num)
            state = 0                       # The text ends here; nobody asks again.
        stream.matched[i] = <uint16_t>state
    return found


cdef bint _is_stop_marker(const TextStream* stream, int32_t token) noexcept nogil:
    """Whether a stop string is the own text of a token that prints nothing."""
    cdef const StopSet* stops = stream.stops
    cdef TokenText marker, printed
    cdef uint32_t i
    pieces_marker(stream.pieces, token, &marker)
    pieces_text(stream.pieces, token, &printed)
    if marker.num_bytes == 0 or printed.num_bytes > 0:
        return False
    for i in range(stops.num_stops):
        if (stops.starts[i + 1] - stops.starts[i] == marker.num_bytes
                and memcmp(stops.bytes + stops.starts[i], marker.bytes, marker.num_bytes) == 0):
            return True
    return False


# ---- the stream ---------------------------------------------------------------------

cdef int text_init(TextStream* stream, const PieceTable* pieces, const StopSet* stops) noexcept nogil:
    """Start a text; both tables must outlive it. 0, or -1 without memory; pairs with text_free."""
    memset(stream, 0, sizeof(TextStream))
    stream.pieces = pieces
    stream.stops = stops
    stream.capacity = <uint32_t>text_release_max(stream)
    stream.text = <char*>malloc(stream.capacity)
    return 0 if stream.text != NULL else -1


cdef void text_free(TextStream* stream) noexcept nogil:
    free(stream.text)
    stream.text = NULL


cdef size_t text_release_max(const TextStream* stream) noexcept nogil:
    """The most bytes that one feed or flush can release."""
    # What was held back, and a piece of nothing but broken bytes after a broken beginning.
    return stream.stops.longest + 3 * (<size_t>stream.pieces.longest + 4)


cdef inline bint _append(TextStream* stream, const uint8_t* bytes, uint32_t num) noexcept nogil:
    """Add a whole character to the text. True: a stop string is complete, and cut off."""
    cdef uint32_t i, found
    memcpy(stream.text + stream.num_text, bytes, num)
    stream.num_text += num
    if stream.stops.num_stops == 0:
        return False
    for i in range(num):
        found = _match(stream, <char>bytes[i])
        if found > 0:
            # What precedes this byte in it was held back, so it begins in `text`; and
            # being valid UTF-8 it can only end where the character does.
            stream.num_text -= found
            return True
    return False


cdef inline bint _append_broken(TextStream* stream) noexcept nogil:
    """Add U+FFFD for the beginning that will not become a character."""
    stream.num_partial = 0
    stream.num_missing = 0
    return _append(stream, <const uint8_t*>b"\xef\xbf\xbd", 3)


cdef inline bint _begin(TextStream* stream, uint8_t byte) noexcept nogil:
    """Take a byte that no beginning waits for. True as in _append."""
    if byte < 0x80:
        return _append(stream, &byte, 1)
    # The second byte's bounds keep out overlong forms, surrogates and what is past U+10FFFF.
    stream.low = 0xA0 if byte == 0xE0 else 0x90 if byte == 0xF0 else 0x80
    stream.high = 0x9F if byte == 0xED else 0x8F if byte == 0xF4 else 0xBF
    if 0xC2 <= byte <= 0xDF:
        stream.num_missing = 1
    elif 0xE0 <= byte <= 0xEF:
        stream.num_missing = 2
    elif 0xF0 <= byte <= 0xF4:
        stream.num_missing = 3
    else:
        return _append_broken(stream)
    stream.partial[0] = byte
    stream.num_partial = 1
    return False


cdef inline bint _take(TextStream* stream, uint8_t byte) noexcept nogil:
    """Decode one byte. True as in _append."""
    if stream.num_missing > 0 and stream.low <= byte <= stream.high:
        stream.partial[stream.num_partial] = byte
        stream.num_partial += 1
        stream.num_missing -= 1
        stream.low = 0x80
        stream.high = 0xBF
        if stream.num_missing > 0:
            return False
        byte = stream.num_partial           # Its length now: the partial is used up.
        stream.num_partial = 0
        return _append(stream, stream.partial, byte)
    if stream.num_missing > 0 and _append_broken(stream):
        return True
    return _begin(stream, byte)


cdef inline void _forget_released(TextStream* stream) noexcept nogil:
    stream.num_text -= stream.num_released
    memmove(stream.text, stream.text + stream.num_released, stream.num_text)
    stream.num_released = 0


cdef inline void _release(TextStream* stream, uint32_t num_bytes, bint all_tokens, TextRelease* out) noexcept nogil:
    stream.num_released = num_bytes
    out.bytes = stream.text
    out.num_bytes = num_bytes
    out.num_tokens = 0
    if num_bytes > 0 or all_tokens:
        out.num_tokens = stream.num_tokens
        stream.num_tokens = 0


cdef uint32_t _held_back(const TextStream* stream) noexcept nogil:
    """Bytes at the end of the text that may become a stop string."""
    # Whole characters: stop strings are valid UTF-8, so each begins where one begins.
    cdef uint32_t i, held = 0
    for i in range(stream.stops.num_stops):
        held = max(held, <uint32_t>stream.matched[i])
    return held


cdef TextEnd _end(TextStream* stream, TextEnd how, TextRelease* out) noexcept nogil:
    """Release all that is left."""
    stream.ended = how
    _release(stream, stream.num_text, True, out)
    return how


cdef TextEnd text_flush(TextStream* stream, TextRelease* out) noexcept nogil:
    """End the text where it is (length, cancel, timeout, error): nothing is held back any more.

    A beginning of a character becomes one U+FFFD. TEXT_FLUSHED, or TEXT_STOP_STRING in
    the odd case that this completes a stop string. Releases nothing after an end.
    """
    return _finish(stream, TEXT_FLUSHED, out)


cdef TextEnd _finish(TextStream* stream, TextEnd how, TextRelease* out) noexcept nogil:
    _forget_released(stream)
    if stream.ended != TEXT_OPEN:
        _release(stream, 0, True, out)
        return stream.ended
    if stream.num_missing > 0 and _append_broken(stream):
        how = TEXT_STOP_STRING
    return _end(stream, how, out)


cdef TextEnd text_feed(TextStream* stream, int32_t token, TextRelease* out) noexcept nogil:
    """Take one token of the completion, and say what may leave now.

    TEXT_END_OF_TURN: the token ends the generation (it prints nothing and is not
    counted), and all that was held back is released. TEXT_STOP_STRING: a stop string is
    complete, what came before it is released, every token is counted. After an end
    nothing is taken any more.
    """
    cdef TokenText piece
    cdef uint32_t i
    if stream.ended != TEXT_OPEN or pieces_is_eog(stream.pieces, token):
        return _finish(stream, TEXT_END_OF_TURN, out)
    _forget_released(stream)
    stream.num_tokens += 1
    if stream.stops.num_stops > 0 and _is_stop_marker(stream, token):
        return _finish(stream, TEXT_STOP_STRING, out)
    pieces_text(stream.pieces, token, &piece)
    for i in range(piece.num_bytes):
        if _take(stream, <uint8_t>piece.bytes[i]):
            return _end(stream, TEXT_STOP_STRING, out)
    _release(stream, stream.num_text - _held_back(stream), False, out)
    return TEXT_OPEN


# ---- the face for tests -------------------------------------------------------------

@cython.final
cdef class TextProbe:
    """One text over a made-up vocabulary, driven from Python: for tests and benchmarks.

    `markers` are the own texts of tokens that print nothing, by token.
    """

    cdef PieceTable _pieces
    cdef StopSet _stops
    cdef TextStream _stream
    cdef readonly list num_tokens        # Of each release so far.

    def __cinit__(self, list token_pieces, list stop=None, object eog=(), dict markers=None):
        self.num_tokens = []
        if _pieces_from(&self._pieces, token_pieces, eog, markers or {}) != 0:
            raise MemoryError
        stops_fill(&self._stops, stop or [])
        if text_init(&self._stream, &self._pieces, &self._stops) != 0:
            raise MemoryError

    def __dealloc__(self):
        text_free(&self._stream)
        stops_free(&self._stops)
        pieces_free(&self._pieces)

    def feed(self, int32_t token):
        """The text that this token releases."""
        cdef TextRelease out
        text_feed(&self._stream, token, &out)
        self.num_tokens.append(out.num_tokens)
        return out.bytes[:out.num_bytes]

    def flush(self):
        """All that was held back."""
        cdef TextRelease out
        text_flush(&self._stream, &out)
        self.num_tokens.append(out.num_tokens)
        return out.bytes[:out.num_bytes]

    @property
    def end(self):
        """How the text ended: "stop_string", "end_of_turn", "flushed", or None while it is open."""
        return (None, "stop_string", "end_of_turn", "flushed")[<int>self._stream.ended]

    @property
    def stopped(self):
        """Whether the text has ended by itself."""
        return self._stream.ended in (TEXT_STOP_STRING, TEXT_END_OF_TURN)


cdef int _pieces_from(PieceTable* pieces, list prints, object eog, dict markers) except -1:
    """pieces_build for a made-up vocabulary; 0, or 1 without memory."""
    cdef Pile print_pile
    cdef Pile marker_pile
    cdef int32_t token
    cdef bytes text, marker
    if _pieces_alloc(pieces, <int32_t>len(prints)) != 0:
        return 1
    memset(&print_pile, 0, sizeof(Pile))
    memset(&marker_pile, 0, sizeof(Pile))
    for token in range(pieces.n_vocab):
        pieces.eog[token] = token in eog
        text, marker = prints[token], markers.get(token, b"")
        if _add_bytes(&print_pile, text, len(text)) != 0 or _add_bytes(&marker_pile, marker, len(marker)) != 0:
            return 1
        _end_token(pieces, token, &print_pile, &marker_pile)
    return 0
