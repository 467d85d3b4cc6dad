"""Reads a server's /metrics, tolerant of names that it has not."""

from __future__ import annotations

import math
from collections import defaultdict

from bench.load.client import Client


class Metrics:
    """Values by name, summed over labels."""

    def __init__(self, values: dict[str, float]) -> None:
        self._values = values

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read the Prometheus text format."""
        values: defaultdict[str, float] = defaultdict(float)
        for line in text.splitlines():
            name, found, value = line.rpartition(" ")
            if found and not line.startswith("#"):
                values[name.partition("{")[0]] += float(value)
        return cls(dict(values))

    def get(self, name: str) -> float:
        """Return a value; NaN for one that the server has not."""
        return self._values.get(name, math.nan)

    def since(self, earlier: Metrics) -> Metrics:
        """Return how much each value has grown."""
        return Metrics({n: v - earlier._values.get(n, 0.0) for n, v in self._values.items()})

    def host_us_per_token(self) -> float:
        """Return the worker's time outside llama_decode per token that its steps made, in us."""
        host_s = self.get("lqs_step_seconds_total") - self.get("lqs_decode_seconds_total")
        num_tokens = self.get("lqs_step_tokens_total")
        return host_s / num_tokens * 1e6 if num_tokens else math.nan


async def read_metrics(client: Client) -> Metrics:
    """Get and read /metrics; empty when there is none."""
    reply = await client.get("/metrics")
    return Metrics.parse(reply.text) if reply.status == 200 else Metrics({})
