"""The real app, gate, desk and scheduler; the worker and the HTTP server are played by the test."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import msgspec

from lqs._core import Work
from lqs.admission.fleet import Fleet
from lqs.admission.gate import Gate
from lqs.admission.keys import KeyRing
from lqs.admission.prompts import Prompts
from lqs.api.app import Services, create_app
from lqs.api.services import Control, Reloaded
from lqs.config import Config
from lqs.engine.keeper import Keeper
from lqs.engine.opening import Seat
from lqs.engine.residents import Resident, Residents
from lqs.engine.slot import Slot
from lqs.engine.template import ChatTemplate
from lqs.engine.tokens import compile_markers
from lqs.observe.alerts import Alerts, Level
from lqs.observe.log import Log
from lqs.observe.metrics import Metrics
from lqs.process import in_thread
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")
HI = {"model": "M", "messages": [{"role": "user", "content": "hi"}]}


class ByteModel:
    """A model whose tokens are bytes, 0 to 255, then the control texts. `<s>` is its start token."""

    n_vocab = 256 + len(SPECIAL)
    bos = 258
    longest_piece_bytes = None
    markers = compile_markers(SPECIAL)

    def __init__(self, *, add_bos: bool = False) -> None:
        self.add_bos = add_bos
        self.works: list[dict[str, Any]] = []

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> array[int]:
        ids: array[int] = array("i", [self.bos] if add_special and self.add_bos else [])
        cuts = re.compile(b"(" + b"|".join(re.escape(t.encode()) for t in SPECIAL) + b")")
        for piece in cuts.split(text) if parse_special else [text]:
            if parse_special and piece.decode(errors="replace") in SPECIAL:
                ids.append(256 + SPECIAL.index(piece.decode()))
            else:
                ids.extend(piece)
        return ids

    def detokenize(self, ids: Sequence[int]) -> bytes:
        return b"".join(SPECIAL[i - 256].encode() if i >= 256 else bytes([i]) for i in ids)

    def grammar(self, gbnf: str) -> object:
        return object()

    def work(self, prompt: array[int], scope: int, sampling: Any, **rest: Any) -> Work:
        self.works.append({"prompt": prompt, "scope": scope, "sampling": sampling, **rest})
        return Work()


def the_fleet(config: Config, models: Any, log: Log) -> Fleet:
    """All models are there for good."""
    residents = Residents({name: Resident({}, is_pinned=True) for name in models.names()}, {}, 0)
    for name in models.names():
        residents.loaded(name, 0)
    return Fleet(config, models, residents, in_thread=in_thread, plan=lambda served: None, log=log)  # type: ignore[arg-type,return-value]


class House:
    """Everything behind the routes, and the app in front of it."""

    def __init__(
        self,
        *,
        template: str | None = CHATML,
        template_error: str | None = None,
        keys: Sequence[str] | None = None,
        tmp_path: Any = None,
        n_ctx: int = 4096,
        slots: int = 1,
        add_bos: bool = False,
        **sections: dict[str, Any],
    ) -> None:
        if keys is not None:
            sections["keys"] = {"file": self._key_file(tmp_path, keys)}
        self.config = msgspec.convert(sections, Config)
        self.model = ByteModel(add_bos=add_bos)
        self.served = SimpleNamespace(
            name="M", index=0, config=self.config.model, is_prefix_shared=False, created=1, n_ctx=n_ctx,
            template=template and ChatTemplate(template, special_texts=SPECIAL, bos_text="<s>"),
            template_error=template_error, is_loading=False, is_absent=False, is_on_demand=False,
            has_healthy_device=True, loaded=self.model,
            slots=[], load_time_left_s=lambda now_ns: 3.0, meta=lambda: {"n_ctx": n_ctx, "state": "ready"},
        )  # fmt: skip
        self.models = SimpleNamespace(
            names=lambda: ["M"], find={"M": self.served}.get, is_loading=False, has_healthy_device=True,
            fallback_of=lambda served: None, all=lambda: [self.served],
            route=lambda name, version: None if version else {"M": self.served}.get(name or "M"),
            find_all=lambda name: [self.served] if name == "M" else [],
            seats_of=lambda served: [Seat(0, "cpu:0", 0, SimpleNamespace(group="cpu:0"), 0)],
        )  # fmt: skip
        self.fleet = the_fleet(self.config, self.models, Log(self.config.log, io.StringIO()))
        self.log_text = io.StringIO()
        log = Log(self.config.log, self.log_text)
        self.ring = KeyRing(self.config)
        observer = Switch()
        scheduler = make_scheduler(self.config, self.ring.weights())
        self.ring.follow(scheduler.set_key_weight)
        outlook = make_outlook(self.config, scheduler)
        self.desk = Desk(scheduler, observer, door=make_door(self.config), outlook=outlook)
        self.prompts = Prompts(self.config.prompts)
        self.gate = Gate(self.config, desk=self.desk, models=self.models, prompts=self.prompts, fleet=self.fleet)
        self.metrics = Metrics(
            self.config, model_name="M", core=scheduler.snapshot, workers=dict,
            closed_reason=self.gate.closed_reason, door=self.desk.entrance.figures,
        )  # fmt: skip
        observer.target = self.metrics
        self.alerts = Alerts(self.config.alerts, log, {Level.DEGRADE: self.gate.degrader.force})
        self.slot = scheduler.add_device_slot(model=0, kv_tokens=100_000, num_sequences=slots)
        self.worker = SimpleNamespace(
            state="ready", is_parked=False, death="", step_began_ns=0, calibration={},
            snapshot=lambda: {"num_steps": 7, "step_ns": 0},
        )  # fmt: skip
        self.served.slots.append(Slot("cpu:0", self.worker, 100_000, self.slot))  # type: ignore[arg-type]
        self.models.slots, self.models.set_weight = self.served.slots, scheduler.set_weight
        self.keeper = Keeper(self.config, self.models, scheduler, log)  # type: ignore[arg-type]
        self.asked: list[str] = []  # Of the process.
        self.reload_problem = ""
        self.reload_waiting: list[str] = []
        self.restart_problem = ""
        self.successor = "none"
        services = Services(
            config=self.config,
            gate=self.gate,
            desk=self.desk,
            keys=self.ring,
            models=self.models,
            metrics=self.metrics,
            alerts=self.alerts,
            log=log,
            fleet=self.fleet,
            keeper=self.keeper,
            control=Control(self._drain, self._reload, self._restart, self._successor),
        )
        self.app = create_app(services, cors_origins=self.config.server.cors_origins)
        self.started: list[int] = []  # Taken by the worker, not yet looked at by the test.

    def _drain(self) -> None:
        self.asked.append("drain")

    def _reload(self) -> Reloaded:
        self.asked.append("reload")
        return Reloaded(self.reload_problem, self.reload_waiting)

    async def _restart(self) -> str:
        return self.restart_problem

    async def _successor(self) -> str:
        return self.successor

    def _key_file(self, tmp_path: Any, keys: Sequence[str]) -> str:
        path = tmp_path / "keys"
        lines = [
            json.dumps({"name": f"tenant{n}", "sha256": hashlib.sha256(key.encode()).hexdigest(), "tier": "normal"})
            for n, key in enumerate(keys)
        ]
        path.write_text("".join(line + "\n" for line in lines))
        path.chmod(0o600)
        return str(path)

    # The HTTP server's part.

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Call:
        """Begin a request; its answer comes while the test goes on."""
        return Call(self.app, method, path, body, **options)

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Call:
        """Make a request that needs no worker, and wait for its answer."""
        return await self.call(method, path, body, **options).done()

    # The worker's part.

    async def starts(self, num: int = 1) -> list[int]:
        """Let the scheduler work until that many requests have started; their handles."""
        await until(lambda: self.turn() or len(self.started) >= num)
        handles, self.started = self.started[:num], self.started[num:]
        return handles

    def turn(self) -> None:
        """One round of the scheduler, its events delivered."""
        self.desk.scheduler.round(time.monotonic_ns())
        self.started += self.desk.scheduler.take(self.slot)
        self.desk.drain_events()

    def emit(self, handle: int, *texts: str | bytes, logprobs: bytes = b"") -> None:
        for text in texts:
            assert self.desk.scheduler.emit(handle, text if isinstance(text, bytes) else text.encode())
        if logprobs:
            assert self.desk.scheduler.emit(handle, logprobs, 0, 2)
        self.desk.drain_events()

    def finish(self, handle: int, finish: int = 1, **facts: int) -> None:
        self.desk.scheduler.finish(handle, finish, **facts)
        self.turn()
        self.turn()

    async def serve(self, call: Call, *texts: str | bytes, finish: int = 1, **facts: int) -> Call:
        """Play the worker for one request to its end."""
        (handle,) = await self.starts()
        self.emit(handle, *texts)
        self.finish(handle, finish, num_completion_tokens=len(texts), **facts)
        return await call.done()

    async def is_well(self) -> bool:
        """The next ordinary request still answers 200."""
        call = await self.serve(self.call("POST", "/v1/chat/completions", HI, key=self.any_key), "ok")
        return call.status == 200

    any_key: str | None = None


class Switch:
    """Lets the desk be made before the metrics that it reports to."""

    target: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


class Call:
    """One HTTP request, the server's side of it played."""

    def __init__(
        self, app: Any, method: str, path: str, body: Any, *, key: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (), chunks: Sequence[bytes] | None = None, complete: bool = True,
        query: bytes = b"", taker: Callable[[bytes], Awaitable[None]] | None = None, **extensions: Any,
    ) -> None:  # fmt: skip
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = [(b"host", b"h"), *headers]
        if key is not None:
            sent.append((b"authorization", b"Bearer " + key.encode()))
        self.scope = {
            "type": "http", "method": method, "path": path, "query_string": query, "headers": sent,
            "root_path": "", "extensions": extensions,
        }  # fmt: skip
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        parts = [raw] if chunks is None else list(chunks)
        for number, part in enumerate(parts):
            more = not complete or number + 1 < len(parts)
            self.inbox.put_nowait({"type": "http.request", "body": part, "more_body": more})
        self.num_received = 0
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self._taker = taker
        self._changed = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(app(self.scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        message = await self.inbox.get()
        self.num_received += len(message.get("body", b""))
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        assert not self.is_complete, "a message after the end of the answer"
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status is not None
            self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
        self._changed.set()
        if self._taker is not None:
            await self._taker(message.get("body", b""))

    def leave(self) -> None:
        """The client closes its connection."""
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def done(self) -> Call:
        await asyncio.wait_for(self.task, 10)
        return self

    async def shows(self, text: bytes) -> None:
        """Wait until the answer has this in it."""
        async with asyncio.timeout(10):
            while text not in self.body:
                self._changed.clear()
                await self._changed.wait()

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse_constant)

    @property
    def error(self) -> dict[str, Any]:
        """The error, its shape checked."""
        assert self.status is not None
        assert self.status >= 400
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["x-request-id"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, comments left out, [DONE] as a string."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        datas = [line.removeprefix("data: ") for line in lines]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]

    @property
    def text(self) -> str:
        """The text of a chat stream."""
        return "".join(c["delta"].get("content", "") for e in self.events[:-1] for c in e.get("choices", ()))


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not strict JSON")


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 What it waits for is made by the test itself.
            await asyncio.sleep(0)


def driven(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
