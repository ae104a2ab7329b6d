"""`bench endpoint`: the same prompts and statistics against any server that speaks OpenAI's API.

What is seen from outside is when pieces of text come. Time per output token is (end - first) / (n - 1), n as the server
counts it; gaps between pieces are another thing (a piece may hold several tokens) and stand apart.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dartspec.bench.stats import Estimate, median, ratio_of_sums
from dartspec.bench.suites import Prompt
from dartspec.errors import DartspecError

# counters by which servers tell what their speculation did: ours and vLLM's, SGLang's
_COUNTER = re.compile(
    r"^([a-z_:]*(?:spec_decode|spec_accept|spec_verify)[a-z_]*)(?:\{([^}]*)\})? ([-+.\deE]+)$", re.MULTILINE
)


@dataclass(frozen=True)
class Server:
    """url: up to and with /v1, or without it. key: sent as a bearer token where it is given."""

    url: str
    model: str | None = None
    key: str | None = None
    timeout_s: float = 600.0

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        """The open answer to one request; the path is below the server's root."""
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DartspecError(f"{self.url!r} is no address of a server, such as http://localhost:8000")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        root = parts.path.rstrip("/").removesuffix("/v1")
        try:
            connection.request(method, root + path, json.dumps(body) if body is not None else None, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise DartspecError(f"{self.url} does not answer: {error}") from error

    def model_name(self) -> str:
        """The model asked for, or the first that the server offers."""
        if self.model:
            return self.model
        answer = self.request("GET", "/v1/models")
        try:
            return str(json.load(answer)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DartspecError(
                f"{self.url}/v1/models names no model (HTTP {answer.status}): give --served-model"
            ) from error

    def counters(self) -> dict[str, float]:
        """What /metrics says about speculation; empty where there is no such page."""
        try:
            answer = self.request("GET", "/metrics")
            text = answer.read().decode("utf-8", "replace") if answer.status == 200 else ""
        except (DartspecError, OSError):
            return {}
        return counters(text)


def counters(page: str) -> dict[str, float]:
    """Speculation's counters of a Prometheus page, summed over labels other than the position."""
    found: dict[str, float] = {}
    for name, labels, value in _COUNTER.findall(page):
        position = re.search(r'position="(\d+)"', labels)
        key = f"{name}[{position[1]}]" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


@dataclass(frozen=True)
class Timing:
    """One answer, in milliseconds from the request. pieces: when each piece of text came."""

    pieces: tuple[float, ...]
    num_tokens: int
    end_ms: float

    @property
    def first_ms(self) -> float:
        return self.pieces[0]

    @property
    def per_token_ms(self) -> float | None:
        """(end - first) / (n - 1); None for a single token."""
        return (self.pieces[-1] - self.first_ms) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps_ms(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "num_tokens": self.num_tokens,
            "first_ms": round(self.first_ms, 3),
            "per_token_ms": None if self.per_token_ms is None else round(self.per_token_ms, 4),
            "end_ms": round(self.end_ms, 3),
            "gaps_ms": [round(g, 2) for g in self.gaps_ms],
        }


def ask(
    server: Server, model: str, prompt: Prompt, settings: Mapping[str, Any], since: float | None = None
) -> dict[str, Any]:
    """One streamed answer and its record. Raises DartspecError when the server refuses or breaks off.

    since: `time.perf_counter()` that times count from; None: when the request is sent.
    """
    if not prompt.turns:
        raise DartspecError(f"prompt {prompt.id} is token ids; a server is asked in text: give it turns")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt.turns[0]}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **settings,
    }
    began = time.perf_counter() if since is None else since
    answer = server.request("POST", "/v1/chat/completions", body)
    if answer.status != 200:
        said = answer.read(2000).decode("utf-8", "replace")
        raise DartspecError(f"{server.url} refused prompt {prompt.id} (HTTP {answer.status}): {' '.join(said.split())}")
    text, pieces, finish, usage, timings = "", [], None, None, None
    for event in events(answer):
        now = 1e3 * (time.perf_counter() - began)
        if "error" in event:
            raise DartspecError(f"{server.url} broke off prompt {prompt.id}: {event['error']}")
        usage, timings = event.get("usage") or usage, event.get("timings") or timings
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            if piece:
                text += piece
                pieces.append(now)
            finish = choice.get("finish_reason") or finish
    if not pieces or finish is None:
        raise DartspecError(f"{server.url} broke off prompt {prompt.id} without an end: {len(pieces)} pieces came")
    timing = Timing(
        tuple(pieces), int((usage or {}).get("completion_tokens") or len(pieces)), 1e3 * (time.perf_counter() - began)
    )
    return {
        "id": prompt.id,
        "suite": prompt.suite,
        "server": server.url,
        "counted_by": "server" if usage else "pieces",
        **timing.record(),
        "finish": finish,
        "text": text,
        **({"timings": timings} if timings else {}),
    }


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in lines:
        kind, _, data = line.strip().partition(b":")
        if kind != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        yield json.loads(data)


def measure(
    servers: Sequence[Server],
    prompts: Sequence[Prompt],
    settings: Mapping[str, Any],
    *,
    concurrency: int = 1,
    repeats: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Every prompt at each server in turn (A B A B), `concurrency` prompts at a time; rows by server.

    The first server is what the others are compared with.
    """
    models = [s.model_name() for s in servers]
    before = [s.counters() for s in servers]
    warm = dict(settings) | {"max_tokens": 4}
    for server, model in zip(servers, models, strict=True):
        ask(server, model, prompts[0], warm)

    def one(place: tuple[int, int, Prompt]) -> dict[str, Any]:
        k, repeat, prompt = place
        return ask(servers[k], models[k], prompt, settings) | {"repeat": repeat}

    records: list[dict[str, Any]] = []
    with ThreadPoolExecutor(concurrency) as pool:
        for repeat in range(repeats):
            for start in range(0, len(prompts), concurrency):
                for k in range(len(servers)):
                    group = [(k, repeat, p) for p in prompts[start : start + concurrency]]
                    records += pool.map(one, group)
                    advance()
    rows = []
    for k, server in enumerate(servers):
        after = server.counters()
        moved = {name: round(v - before[k].get(name, 0.0), 4) for name, v in after.items()}
        own = [r for r in records if r["server"] == server.url]
        rows.append({"server": server.url, "model": models[k], **row(own), **acceptance(moved, own), "counters": moved})
    for r in rows[1:]:
        r["against_first"] = against(records, servers[0].url, r["server"])
    return {"rows": rows, "records": records}


def row(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Percentiles over answers, and time per token as a ratio of sums (all answers' time over all their tokens)."""
    timed = [r for r in records if r["per_token_ms"] is not None]
    gaps = sorted(g for r in records for g in r["gaps_ms"])
    after_first = [(r["per_token_ms"] * (r["num_tokens"] - 1), r["num_tokens"] - 1) for r in timed]
    per_token = ratio_of_sums(*zip(*after_first, strict=True)).rounded() if timed else None
    return {
        "num_answers": len(records),
        "num_tokens": sum(r["num_tokens"] for r in records),
        "first_ms": percentiles([r["first_ms"] for r in records]),
        "per_token_ms": per_token,
        "per_token_percentiles_ms": percentiles([r["per_token_ms"] for r in timed]),
        "gap_ms": percentiles(gaps),
        "counted_by": sorted({r["counted_by"] for r in records}),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99."""
    if not values:
        return {}
    if len(values) == 1:
        return dict.fromkeys(("p50", "p90", "p99"), round(values[0], 3))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{p}": round(cuts[p - 1], 3) for p in (50, 90, 99)}


def acceptance(moved: Mapping[str, float], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A and drafts a round, from the counters of /metrics (by whatever prefix) or llama.cpp's timings."""
    ending = {name.rpartition(":")[2].removesuffix("_total"): v for name, v in moved.items()}
    rounds = ending.get("spec_decode_num_drafts", 0.0)
    if rounds:
        accepted, drafted = (ending.get(f"spec_decode_num_{n}_tokens", 0.0) for n in ("accepted", "draft"))
        return {"A": round(accepted / rounds, 4), "drafted": round(drafted / rounds, 4), "rounds": int(rounds)}
    told = [r["timings"] for r in records if "draft_n" in r.get("timings", {})]
    if told:
        drafted, accepted = (sum(t.get(k, 0) for t in told) for k in ("draft_n", "draft_n_accepted"))
        return {"draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0}
    return {}


def against(records: Sequence[Mapping[str, Any]], first: str, other: str) -> dict[str, Any]:
    """How much faster `other` writes than `first`, over the answers that both gave in more than one token; how many
    texts are the same."""
    by = {(r["server"], r["id"], r["repeat"]): r for r in records}
    pairs = [(by[first, i, n], by[other, i, n]) for s, i, n in by if s == other and (first, i, n) in by]
    timed = [(a, b) for a, b in pairs if a["per_token_ms"] and b["per_token_ms"]]
    equal = sum(a["text"] == b["text"] for a, b in pairs)
    if not timed:
        return {"num_equal": equal, "num_pairs": len(pairs)}
    ratio: Estimate = median([a["per_token_ms"] / b["per_token_ms"] for a, b in timed])
    sums = ratio_of_sums([a["per_token_ms"] for a, _ in timed], [b["per_token_ms"] for _, b in timed])
    return {"speed_up": sums.rounded(), "median_pair": ratio.rounded(), "num_equal": equal, "num_pairs": len(pairs)}
