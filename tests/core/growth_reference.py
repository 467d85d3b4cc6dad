"""Promises that grow, again in plain Python: the specification of core/growth.pxi and core/lengths.pxi."""

from . import reference

UNKNOWN = 256
SAMPLES_MIN = 16
PASSES_MAX = 16


def bucket_end(length):
    """The longest length that counts as this one: exact below 16, then four steps to each doubling."""
    if length < 16:
        return length
    step = 1 << (length.bit_length() - 3)
    return length // step * step + step - 1


class Lengths:
    """The lengths of answers, and the median of those that got so far."""

    def __init__(self):
        self.seen = []  # (model, key, length)

    def predict(self, key, model, max_tokens, made):
        of_key = [length for m, k, length in self.seen if (m, k) == (model, key)]
        of_model = [length for m, _, length in self.seen if m == model]
        for lengths in (of_key, of_model):
            tail = sorted(end for end in map(bucket_end, lengths) if end > made)
            if len(lengths) >= SAMPLES_MIN and tail:
                return min(tail[(len(tail) + 1) // 2 - 1], max_tokens)
        return min(UNKNOWN if made < UNKNOWN else 2 * made, max_tokens)


def standing(waiter):
    """Who gives way to whom: the larger one."""
    return waiter.level, waiter.order


class Scheduler(reference.Scheduler):
    """The round with device slots whose promises grow by `blocks[slot]` tokens; 0: they do not."""

    def __init__(self, backlog, slots, blocks):
        super().__init__(backlog, slots)
        self.blocks = blocks
        self.lengths = Lengths()
        self.num_started = 0
        self.num_passes = [0 for _ in slots]

    # --- what is promised -----------------------------------------------------------------

    def free(self, i):
        return self.slots[i].kv_tokens - sum(w.reserved for w in self.slots[i].running)

    def first_promise(self, i, waiter):
        return min(waiter.footprint, waiter.prompt + self.blocks[i]) if self.blocks[i] else waiter.footprint

    def expected_end(self, i, waiter, made):
        block = self.blocks[i]
        completion = self.lengths.predict(waiter.key, waiter.model, waiter.max_tokens, made)
        return min(waiter.footprint, waiter.prompt + ((completion + block // 2) // block + 1) * block)

    def peak(self, i, held, end):
        """Let all grow a token at a time, each until its end; the most that is held at once."""
        all_ = [(w.reserved, max(w.end - w.reserved, 0)) for w in self.slots[i].running if w.reserved]
        all_.append((held, max(end - held, 0)))
        return max(sum(h + t for h, left in all_ if left >= t) for _, t in all_)

    def promise(self, i, waiter, tokens):
        if waiter.out_tokens or waiter.is_short:
            self.num_passes[i] = 0
        waiter.reserved = tokens
        waiter.is_short = False
        if self.blocks[i]:
            made = max(tokens - waiter.prompt - self.blocks[i], 0)
            waiter.end = self.expected_end(i, waiter, made)

    # --- growing and coming back ------------------------------------------------------------

    def tend_promises(self):
        for i, slot in enumerate(self.slots):
            if self.blocks[i] and not slot.is_buried:
                self.grow(i)
                self.resume(i)

    def grow(self, i):
        running = self.slots[i].running
        asking = [w for w in running if 0 < w.reserved < min(w.wanted, w.footprint)]
        is_full = False
        for waiter in sorted(asking, key=standing):
            wish = min(waiter.wanted, waiter.footprint)
            if waiter.reserved == 0:
                continue
            if not is_full and self.make_way(i, waiter, wish - waiter.reserved):
                self.promise(i, waiter, wish)
            else:
                is_full = waiter.is_short = True

    def make_way(self, i, grower, tokens):
        running = self.slots[i].running
        behind = sum(w.reserved for w in running if standing(w) > standing(grower))
        if self.free(i) + behind < tokens:
            return False
        while self.free(i) < tokens:
            last = max((w for w in running if w.reserved), key=standing)
            last.out_tokens, last.reserved, last.is_short = last.reserved, 0, False
        return True

    def resume(self, i):
        slot = self.slots[i]
        while not any(w.is_short for w in slot.running):
            out = [w for w in slot.running if w.out_tokens]
            if not out:
                return
            first = min(out, key=standing)
            tokens = max(first.out_tokens, min(first.wanted, first.footprint))
            is_alone = len(out) == len(slot.running)
            if not is_alone and self.peak(i, tokens, max(first.end, tokens)) > slot.kv_tokens:
                return
            if tokens > self.free(i):
                return
            self.promise(i, first, tokens)
            first.out_tokens = 0

    # --- starting and ending ------------------------------------------------------------------

    def has_room(self, i, waiter):
        slot = self.slots[i]
        tokens = self.first_promise(i, waiter)
        if not slot.serves(waiter) or slot.is_kept or len(slot.running) == slot.num_sequences or tokens > self.free(i):
            return False
        if not self.blocks[i]:
            return True
        behind = [w for w in slot.running if w.out_tokens or w.is_short]
        if any(w.level <= waiter.level for w in behind) or (behind and self.num_passes[i] >= PASSES_MAX):
            return False
        return self.peak(i, tokens, self.expected_end(i, waiter, 0)) <= slot.kv_tokens

    def place(self, waiter, is_aged=False):
        able = [(len(slot.running) / slot.weight, i) for i, slot in enumerate(self.slots) if self.has_room(i, waiter)]
        if not able:
            return None
        slot = min(able)[1]
        is_pass = any(w.out_tokens or w.is_short for w in self.slots[slot].running)
        self.num_passes[slot] = self.num_passes[slot] + 1 if is_pass else 0
        waiter.order = self.num_started
        # A device slot that died took with it what its worker had asked for.
        waiter.wanted = 0
        self.num_started += 1
        self.promise(slot, waiter, self.first_promise(slot, waiter))
        return slot

    def settle(self, waiter, completion_tokens):
        super().settle(waiter, completion_tokens)
        if waiter.out_tokens or waiter.is_short:
            self.num_passes[waiter.slot] = 0
        waiter.reserved = waiter.out_tokens = 0
        if completion_tokens is not None:
            self.lengths.seen.append((waiter.model, waiter.key, completion_tokens))
