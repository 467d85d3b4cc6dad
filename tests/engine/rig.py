"""A worker with its scheduler, driven from a test: the server's engine room without HTTP."""

import array
import functools
import select
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from lqs import _core, _engine

LIMIT_S = 120.0


@dataclass
class Answer:
    """What one request got: the sink that the scheduler's poll returns events for."""

    handle: int = 0
    text: bytes = b""
    num_tokens: int = 0
    logprobs: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    outcome: Any = None
    ended: int | None = None
    settled: bool = False
    started: bool = False

    def on(self, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == _core.EV_STARTED:
            self.started = True
        elif kind == _core.EV_OUTPUT:
            self.text += event[2]
            self.pieces.append(event[2])
            self.num_tokens += event[3]
            self.logprobs += event[4] or b""
        elif kind == _core.EV_FINISHED:
            self.outcome = event[2]
        elif kind == _core.EV_SETTLED:
            self.settled = True
        else:
            self.ended = kind


class Rig:
    """One scheduler and its workers with their threads. Use it as a context manager."""

    def __init__(
        self,
        model: Any,
        *,
        num_slots: int = 1,
        n_ctx: int = 2048,
        n_seq: int = 4,
        n_extra: int = 0,
        fine_level: int = 255,
        out_buffer_bytes: int = 65536,
        kv_block: int = 0,
        kv_tokens: int | None = None,
        **worker: Any,
    ) -> None:
        self.engine = _engine
        self.model = model
        self.scheduler = _core.Scheduler(
            table_capacity=1024,
            level_caps=[512] * 5,
            total_cap=1024,
            num_keys=8,
            key_weights=[1.0] * 8,
            aging_step_ns=60_000_000_000,
            aged_every=4,
            fine_level=fine_level,
            out_buffer_bytes=out_buffer_bytes,
        )
        self.workers = []
        # What is computed before anybody is let in has tests of its own.
        worker = {"n_warm": 1} | worker
        for _ in range(num_slots):
            slot = self.scheduler.add_device_slot(
                kv_tokens=kv_tokens or n_ctx, num_sequences=n_seq, num_extra=n_extra, kv_block=kv_block
            )
            worker |= {"n_ctx": n_ctx, "n_seq": n_seq, "n_extra": n_extra}
            self.workers.append(self.engine.Worker(self.scheduler, slot, model, **worker))
        self.worker = self.workers[0]
        self._threads: list[threading.Thread] = []
        self._poller = select.poll()
        self._poller.register(self.scheduler.loop_fd, select.POLLIN)

    def __enter__(self) -> "Rig":
        for worker in self.workers:
            worker.open()
        bodies = [worker.run for worker in self.workers]
        self._rounds = self.engine.SchedulerThread(self.scheduler)
        bodies.append(self._rounds.run)
        self._threads = [threading.Thread(target=body, daemon=True) for body in bodies]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop()
        for worker, thread in zip(self.workers, self._threads, strict=False):
            if not worker.is_parked:
                thread.join(LIMIT_S)
        self._rounds.stop()
        self._threads[-1].join(LIMIT_S)
        for worker in self.workers:
            if not worker.is_parked:
                worker.close()

    def submit(
        self,
        prompt: "str | list[int] | array.array[int]",
        *,
        max_tokens: int = 16,
        level: int = 2,
        lane: int = 0,
        key: int = 0,
        stop_ns: int = 0,
        expire_ns: int = 0,
        **options: Any,
    ) -> Answer:
        ids = self.model.tokenize(prompt.encode(), False, True) if isinstance(prompt, str) else array.array("i", prompt)
        work = self.engine.Completion(self.model, ids, max_tokens=max_tokens, **options)
        assert self.scheduler.try_enter(level)
        answer = Answer()
        answer.handle = self.scheduler.submit(
            work,
            answer,
            key=key,
            model=0,
            level=level,
            lane=lane,
            arrival_ns=time.monotonic_ns(),
            expire_ns=expire_ns,
            stop_ns=stop_ns,
            deadline_ns=0,
            num_prompt_tokens=len(ids),
            max_tokens=max_tokens,
            footprint_tokens=len(ids) + max_tokens,
        )
        return answer

    def pump(self, until: Any, limit_s: float = LIMIT_S) -> None:
        """Handle events until `until()` holds; fails the test at the limit."""
        end = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < end, "the engine did not get there in time"
            self._poller.poll(100)
            for event in self.scheduler.poll():
                event[1].on(event)

    def finish(self, *answers: Answer) -> None:
        self.pump(lambda: all(a.settled for a in answers))

    def ask(self, prompt: Any, **options: Any) -> Answer:
        answer = self.submit(prompt, **options)
        self.finish(answer)
        return answer


@functools.cache
def grammar(model: Any, rule: str) -> Any:
    """One for all tests that want it, so that `alone` knows it again."""
    return _engine.Grammar(model, rule)


_ALONE: dict[tuple[str, str, str], tuple[Answer, dict[str, Any]]] = {}


def alone(model: Any, prompts: "list[str] | list[array.array[int]]", **options: Any) -> list[Answer]:
    """What each says with a context for itself. Each is computed once in a run, for all tests that want it."""
    keys = [(model.path, repr(prompt), repr(sorted(options.items()))) for prompt in prompts]
    new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in _ALONE}
    if new:
        with Rig(model, num_slots=min(2, len(new)), n_ctx=1024, n_seq=1, threads=1, prefix_cache=False) as rig:
            answers = {key: rig.submit(prompt, **options) for key, prompt in new.items()}
            rig.finish(*answers.values())
        # The options are kept as well: what is known by its address must not make room for another.
        _ALONE.update((key, (answer, options)) for key, answer in answers.items())
    return [_ALONE[key][0] for key in keys]
