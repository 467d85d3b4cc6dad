"""What a config means on this machine: devices, threads, memory and how much context fits.

Everything is computed from the config, the model file's header and what the machine has; nothing
is loaded. `lqs check` prints it, `lqs serve` does it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lqs.config import Config
from lqs.engine.gguf import Header, read_header
from lqs.errors import ConfigError, StartError

_CGROUP = Path("/sys/fs/cgroup")
_MB = 1_000_000
_F16_BYTES = 2
# A default for all: that many whole contexts of the model, but not beyond this many tokens.
_AUTO_CONTEXTS = 4
_AUTO_TOKENS_MAX = 32_768
_PAD_TOKENS = 256  # llama.cpp rounds the size of a context up to that.


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to use: cores this process may run on, and memory not yet taken."""

    num_cores: int
    memory_free_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome. `kv_tokens` and `threads` are per device slot."""

    machine: Machine
    devices: tuple[str, ...]
    threads: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    request_tokens_max: int
    n_ctx_train: int
    num_extra: int  # Sequences for urgent requests.

    @property
    def num_cells(self) -> int:
        """KV cells of a device slot as llama.cpp makes them: rounded up."""
        return -(-self.kv_tokens // _PAD_TOKENS) * _PAD_TOKENS

    @property
    def kv_bytes(self) -> int:
        """KV cache of all device slots."""
        return self.kv_tokens * self.kv_bytes_per_token * len(self.devices)


def make_plan(config: Config, path: Path, machine: Machine | None = None) -> Plan:
    """Plan the config for the model file. Raises ModelFileError, ConfigError."""
    header = read_header(path)
    machine = machine or probe_machine()
    devices = resolve_devices(config.engine.devices)
    n_ctx_train = _number(header, "context_length") or 2048
    kv_bytes_per_token = _kv_bytes_per_token(header)
    kv_tokens = config.engine.ctx or _auto_tokens(
        config, header, machine, n_ctx_train, kv_bytes_per_token, len(devices)
    )
    per_sequence = kv_tokens if config.engine.kv_unified else kv_tokens // config.engine.parallel
    return Plan(
        machine=machine,
        devices=devices,
        threads=config.engine.threads or max(machine.num_cores // len(devices), 1),
        weights_bytes=header.size_bytes - header.data_offset,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_tokens=kv_tokens,
        request_tokens_max=min(per_sequence, n_ctx_train),
        n_ctx_train=n_ctx_train,
        num_extra=_num_extra(config, kv_tokens),
    )


def _num_extra(config: Config, kv_tokens: int) -> int:
    """Sequences for urgent requests: as many as are wanted and llama.cpp and a step have room for.

    One of its 256 lays the cells out. A cache that is split would be cut smaller for them.
    """
    engine = config.engine
    left = min(255, engine.n_batch, kv_tokens) - engine.parallel
    return max(min(engine.urgent_sequences, left), 0) if engine.kv_unified else 0


def check_fits(config: Config, plan: Plan) -> None:
    """Raises StartError unless weights, KV and margin are within the memory that is free."""
    left = plan.machine.memory_free_bytes - plan.weights_bytes - config.engine.kv_margin_mb * _MB
    if plan.kv_bytes <= left:
        return
    most = left // max(plan.kv_bytes_per_token * len(plan.devices), 1) // _PAD_TOKENS * _PAD_TOKENS
    lower = f"at most {most}" if most > 0 else "or engine.kv_margin_mb lower, or a smaller model"
    raise StartError(f"It does not fit: engine.ctx {plan.kv_tokens} is too large here; {lower}, or free some memory.")


def resolve_devices(names: tuple[str, ...]) -> tuple[str, ...]:
    """The device slots that the config's names mean. Raises ConfigError."""
    found = tuple("cpu:0" if name in ("auto", "cpu") else name for name in names)
    for name in found:
        kind, _, number = name.partition(":")
        if kind != "cpu" or not number.isdecimal():
            raise ConfigError(f"engine.devices: {name!r} is not a device slot; there are auto and cpu:0, cpu:1, ...")
    if len(set(found)) < len(found):
        raise ConfigError("engine.devices: a device slot is there twice.")
    return found


def probe_machine() -> Machine:
    """Cores that this process may use, and memory that is available, cgroup limits included."""
    return Machine(len(os.sched_getaffinity(0)), _memory_free_bytes())


def _memory_free_bytes() -> int:
    free = [_meminfo_available(Path("/proc/meminfo").read_text())]
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free.append(int(text) - int(used.read_text()))
    return max(min(free), 0)


def _meminfo_available(text: str) -> int:
    """Bytes of the line `MemAvailable:  1234 kB`."""
    lines = (line.split() for line in text.splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def _kv_bytes_per_token(header: Header) -> int:
    """Bytes of one cell over all layers, keys and values as f16."""
    num_heads = _number(header, "attention.head_count") or 1
    num_kv_heads = _number(header, "attention.head_count_kv") or num_heads
    head_size = _number(header, "embedding_length") // num_heads
    key_size = _number(header, "attention.key_length") or head_size
    value_size = _number(header, "attention.value_length") or head_size
    return _number(header, "block_count") * num_kv_heads * (key_size + value_size) * _F16_BYTES


def _number(header: Header, key: str) -> int:
    """A number of the model's architecture, 0 where it is missing or differs by layer."""
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    return value if isinstance(value, int) else 0


def _auto_tokens(
    config: Config,
    header: Header,
    machine: Machine,
    n_ctx_train: int,
    kv_bytes_per_token: int,
    num_devices: int,
) -> int:
    """As many cells as are useful and fit beside the weights and the margin; at least one pad."""
    left = machine.memory_free_bytes - header.size_bytes - config.engine.kv_margin_mb * _MB
    fitting = left // max(kv_bytes_per_token * num_devices, 1)
    useful = min(_AUTO_CONTEXTS * n_ctx_train, max(_AUTO_TOKENS_MAX, n_ctx_train))
    tokens = min(fitting, useful)
    if tokens < _PAD_TOKENS:
        raise ConfigError(
            f"engine.ctx: the model does not fit: {machine.memory_free_bytes // _MB} MB are free, its weights "
            f"take {header.size_bytes // _MB} MB. Free some memory, take a smaller model, or lower "
            "engine.kv_margin_mb."
        )
    return tokens // _PAD_TOKENS * _PAD_TOKENS
