"""The series that only show what the core, the door and the workers publish: their names and sentences."""

# (name, doc, the core's name) of what it shows by class.
LEVEL_GAUGES = (
    ("lqs_queue_depth", "Waiting, by class.", "num_waiting"),
    ("lqs_queue_places_taken", "Places taken, by class.", "num_entered"),
    ("lqs_queue_drain_rate", "Starts per second while it had a queue.", "drain_rate"),
)
LEVEL_COUNTERS = (
    ("lqs_queue_entered", "Requests that came to wait.", "num_enqueued"),
    ("lqs_queue_started", "Requests that left for a device slot.", "num_started"),
    ("lqs_queue_expired", "Requests that waited too long.", "num_expired"),
    ("lqs_queue_cancelled", "Requests cancelled while they waited.", "num_cancelled"),
    ("lqs_queue_no_device", "Requests that no device slot was left for.", "num_no_device"),
    ("lqs_queue_promotions", "Classes gained by waiting.", "num_promoted"),
    ("lqs_queue_aged_starts", "Starts owed to waiting.", "num_aged_starts"),
    ("lqs_queue_evictions", "Requests that had to leave for a better class.", "num_evicted"),
)
# (name, doc, the door's name) of what it shows and counts by class.
DOOR_GAUGES = (
    ("lqs_queue_places", "Places, by class.", "cap"),
    ("lqs_place_waiting", "Arrivals that wait for a place.", "num_place_waiting"),
    ("lqs_breaker_state", "0 closed, 1 half-open, 2 open.", "breaker"),
)
DOOR_COUNTERS = (
    ("lqs_queue_overflows", "Arrivals that found no place, whatever became of them.", "num_overflows"),
    ("lqs_queue_demotions", "Arrivals that came in with a lower class.", "num_demoted"),
    ("lqs_place_waits", "Arrivals that waited for a place.", "num_place_waits"),
    ("lqs_place_waits_lost", "Arrivals that waited for a place in vain.", "num_place_waits_lost"),
    ("lqs_breaker_refusals", "Arrivals that found the breaker open.", "num_broken"),
    ("lqs_breaker_openings", "Times that the breaker opened.", "num_breaker_openings"),
)
# (name, doc, the core's name) of what it shows by lane.
LANE_GAUGES = (
    ("lqs_lane_depth", "Waiting, by lane.", "num_waiting"),
    ("lqs_lane_running", "Running, by lane.", "num_running"),
    ("lqs_lane_share", "Its part of the sequences and KV tokens while both lanes wait.", "share"),
)
# (name, doc, the core's name) of what the ledger promises by device slot.
LEDGER_GAUGES = (
    ("lqs_device_kv_tokens", "KV tokens that may be promised.", "capacity"),
    ("lqs_device_kv_reserved", "KV tokens promised to those that run.", "reserved"),
    ("lqs_device_kv_headroom", "KV tokens that may still be promised to who starts.", "headroom"),
    ("lqs_device_drained", "1 if nobody may start there.", "is_drained"),
    ("lqs_device_sequences", "Sequences that may run.", "num_sequences"),
    ("lqs_device_sequences_running", "Sequences that run.", "num_running"),
    ("lqs_kv_paused", "Running requests that wait for more KV with what they hold.", "num_short"),
    ("lqs_kv_out", "Running requests that gave up their KV for better ones.", "num_out"),
)
LEDGER_COUNTERS = (
    ("lqs_kv_promises", "Promises of KV that were made: starts and growths.", "num_promises"),
    ("lqs_kv_growths", "Promises made to running requests.", "num_growths"),
    ("lqs_kv_growths_refused", "Growths that found no room at once: the request paused.", "num_growths_refused"),
    ("lqs_kv_put_out", "Running requests told to give up their KV.", "num_put_out"),
    ("lqs_kv_resumed", "Those of them that were promised KV again.", "num_resumed"),
)
# (name, doc, the worker's name) of what it shows, and of what it counts.
DEVICE_GAUGES = (
    ("lqs_device_healthy", "1 if it works.", "is_healthy"),
    ("lqs_device_threads", "Threads that compute just now.", "threads"),
    ("lqs_device_kv_cells", "KV cells that hold a token.", "cells_used"),
    ("lqs_device_kv_garbage", "KV cells that were dropped and are not free yet.", "cells_garbage"),
    ("lqs_device_cached_sequences", "Finished sequences kept as prefix cache.", "num_cached_sequences"),
    ("lqs_swap_bytes", "Host memory that holds KV of running requests.", "kept_bytes"),
)
DEVICE_COUNTERS = (
    ("lqs_device_steps", "Steps made.", "num_steps"),
    ("lqs_step_tokens", "Tokens made by steps.", "generated_tokens"),
    ("lqs_device_decodes", "Calls of llama_decode.", "num_decodes"),
    ("lqs_device_prefill_tokens", "Prompt tokens computed.", "prefill_tokens"),
    ("lqs_device_failed_decodes", "Decodes that failed.", "num_failed_decodes"),
    ("lqs_device_kv_failures", "Decodes without room in the KV cache; expected 0.", "num_kv_failures"),
    ("lqs_device_cache_evictions", "Finished sequences that gave up their cells.", "num_cache_evictions"),
    ("lqs_device_compactions", "Times that the cells were put in order.", "num_compactions"),
    ("lqs_swaps_out", "Requests whose KV was copied to host memory.", "num_swaps_out"),
    ("lqs_swaps_in", "Requests whose KV was copied back.", "num_swaps_in"),
    ("lqs_swapped_bytes", "KV copied to host memory and back.", "swapped_bytes"),
    ("lqs_recomputed_tokens", "Tokens computed again because their KV was given up or lost.", "recomputed_tokens"),
    ("lqs_requests_taken_over", "Requests that went on here after another device slot died.", "num_taken_over"),
)
DEVICE_CLOCKS = (
    ("lqs_step_seconds", "Time in steps.", "step_ns"),
    ("lqs_decode_seconds", "Time in llama_decode, part of the time in steps.", "decode_ns"),
    ("lqs_swap_seconds", "Time copying KV, part of the time in steps.", "swap_ns"),
)
# (name, doc, the core's name) of what it counts once.
CORE_COUNTERS = (
    ("lqs_decisions", "Requests looked at for a start, those among them that found no room.", "num_decisions"),
    ("lqs_passes", "Starts ahead of a request that did not fit.", "num_passes"),
    ("lqs_holds", "Times that a device slot was held for one that did not fit.", "num_holds"),
    ("lqs_rounds", "Rounds of the scheduler.", "num_rounds"),
    ("lqs_out_buffers_full", "Times a worker found no room for text, because its reader is slow.", "num_starved"),
    ("lqs_requests_lost", "Times that the device slot of a running request died.", "num_lost"),
    ("lqs_requests_restarted", "Of these, gone on at another device slot.", "num_restarted"),
    ("lqs_steps_stalled", "Steps that never ended, as far as could be seen.", "num_stalled"),
    ("lqs_core_broken", "Broken rules of the core; expected 0.", "num_broken"),
)
