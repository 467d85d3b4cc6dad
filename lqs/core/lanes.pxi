# Lanes that follow the load: their shares, and the border between them.
#
# A lane's share is configured, and so is the least that it may come down to. In between it
# follows the work that waits: half way from its own share to its part of the backlog. The
# border, in tokens, moves between two bounds. Up while requests above the upper one have
# more than their part of the work waiting, so that those in between need not stand behind
# them; down in the other case. Requests in between do not raise it: a flood of them would
# turn short and stand in front of the short ones.
#
# Nothing flaps: both look once in FOLLOW_NS, do nothing within a dead band, and otherwise
# go one small step; with nothing waiting both go back to where they began.
#
# Owner: the scheduler's thread; the border is read by the loop.

cdef struct Books           # round.pxi

cdef enum:
    FOLLOW_NS = 1_000_000_000

cdef double SHARE_STEP = 0.05       # of the whole: how far a share moves at once
cdef double SHARE_BAND = 0.05       # nearer to its target than that, a share rests
cdef double BORDER_BAND = 0.10      # the same for the border, in parts of the work waiting

cdef struct LanesState:
    bint is_following
    double share                    # of the short lane, as configured
    double share_min, share_max
    uint64_t border_min, border_max  # tokens
    uint64_t border_tokens          # atomic, one writer
    int64_t moved_ns


# Two lanes and something to move are needed; else nothing ever moves.
cdef void lanes_init(LanesState* lanes, BacklogState* b, double share_min_short,
                     double share_min_long, uint64_t border_min,
                     uint64_t border_max) noexcept nogil:
    lanes.is_following = b.num_lanes == 2
    lanes.share = b.lane_weights[LANE_SHORT] / b.lane_weight_sum
    lanes.share_min = min(share_min_short, lanes.share)
    lanes.share_max = max(1 - share_min_long, lanes.share)
    lanes.border_min = lanes.border_tokens = border_min
    lanes.border_max = max(border_min, border_max)
    b.far_above_tokens = lanes.border_max


# The short lane's part of the work that waits beside that of others; its own share where
# there is none.
cdef double demand_beside(const LanesState* lanes, uint64_t short_tokens,
                          uint64_t others) noexcept nogil:
    cdef uint64_t total = short_tokens + others
    return short_tokens / <double> total if total else lanes.share


# The share that the short lane has, a step nearer to what it should have.
cdef double moved_share(const LanesState* lanes, double share, double demand) noexcept nogil:
    cdef double target = min(max((lanes.share + demand) / 2, lanes.share_min), lanes.share_max)
    if target > share + SHARE_BAND:
        share = min(target, share + SHARE_STEP)
    elif target < share - SHARE_BAND:
        share = max(target, share - SHARE_STEP)
    elif demand == lanes.share:
        # Home again: nothing waits that would say otherwise.
        share = lanes.share
    return share


cdef inline void set_share(BacklogState* b, double share) noexcept nogil:
    b.lane_weights[LANE_SHORT] = share
    b.lane_weights[LANE_LONG] = 1 - share
    b.lane_weight_sum = 1


cdef void move_border(LanesState* lanes, uint64_t far_tokens, double demand) noexcept nogil:
    cdef uint64_t border = lanes.border_tokens
    if demand < lanes.share - BORDER_BAND:
        border = min(border + max(border // 8, <uint64_t> 1), lanes.border_max)
    elif demand > lanes.share + BORDER_BAND or far_tokens == 0:
        border = max(border - border // 8, lanes.border_min)
    store_relaxed(&lanes.border_tokens, border)


# By the backlogs of all models together: their lanes have one border and the same shares.
cdef void lanes_follow(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef LanesState* lanes = &books.shares
    cdef uint64_t short_tokens = 0, long_tokens = 0, far_tokens = 0
    cdef double share
    cdef uint32_t i
    if not lanes.is_following or now_ns - lanes.moved_ns < FOLLOW_NS:
        return
    lanes.moved_ns = now_ns
    for i in range(books.num_models):
        if books.models[i] != NULL:
            short_tokens += books.models[i].backlog.lane_waiting_tokens[LANE_SHORT]
            long_tokens += books.models[i].backlog.lane_waiting_tokens[LANE_LONG]
            far_tokens += books.models[i].backlog.far_waiting_tokens
    share = books.backlog.lane_weights[LANE_SHORT] / books.backlog.lane_weight_sum
    share = moved_share(lanes, share, demand_beside(lanes, short_tokens, long_tokens))
    for i in range(books.num_models):
        if books.models[i] != NULL:
            set_share(&books.models[i].backlog, share)
    move_border(lanes, far_tokens, demand_beside(lanes, short_tokens, far_tokens))
