"""`bench endpoint` against servers that this test plays, and `bench table`: counts and texts, never times."""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from dartspec.bench.endpoint import (
    Server,
    Timing,
    acceptance,
    against,
    ask,
    counters,
    events,
    measure,
    percentiles,
    row,
)
from dartspec.bench.export import export, spec_bench
from dartspec.bench.suites import Prompt
from dartspec.cli.main import app
from dartspec.errors import DartspecError
from test_bench_report import result

PROMPTS = [Prompt(f"p/{i}", "p", (f"prompt {i}",)) for i in range(4)]
VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6.0
vllm:request_success_total{engine="0"} 7.0
"""


@contextmanager
def server(*, usage: bool = True, broken: str = "", word: str = "word ") -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every prompt with four words in two pieces. broken: how it fails."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "tiny"}]}))
            elif self.path == "/metrics":
                done = sum("messages" in s for s in seen)
                counted = {"drafts": done, "accepted_tokens": 2 * done}
                self._send(200, "".join(f"dartspec:spec_decode_num_{k}_total {v}\n" for k, v in counted.items()))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            if broken == "refuses":
                self._send(400, '{"error": "no\\nroom"}')
                return
            out = [{"choices": [{"delta": {"role": "assistant"}}]}]
            out += [{"choices": [{"delta": {"content": word * 2}}]}] * 2
            if broken == "fails":
                out.append({"error": "out of memory"})
            elif broken != "stops":
                out.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            if usage:
                out.append({"choices": [], "usage": {"completion_tokens": 4}})
            lines = [f"data: {json.dumps(o)}\n\n" for o in out] + [": comment\n\n", "data: [DONE]\n\n"]
            self._send(200, "".join(lines))

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}", seen
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def test_time_per_token_is_not_the_gap_between_pieces() -> None:
    t = Timing((100.0, 130.0, 160.0), 7, 161.0)
    assert (t.first_ms, t.per_token_ms, t.gaps_ms) == (100.0, 10.0, [30.0, 30.0])
    assert Timing((100.0,), 1, 101.0).per_token_ms is None


def test_figures_of_known_answers() -> None:
    records = [
        {"num_tokens": 11, "per_token_ms": 10.0, "first_ms": 50.0, "gaps_ms": [20.0] * 5, "counted_by": "server"},
        {"num_tokens": 31, "per_token_ms": 20.0, "first_ms": 70.0, "gaps_ms": [20.0], "counted_by": "server"},
        {"num_tokens": 1, "per_token_ms": None, "first_ms": 60.0, "gaps_ms": [], "counted_by": "server"},
    ]
    r = row(records)
    assert r["per_token_ms"][0] == pytest.approx((10 * 10 + 30 * 20) / 40)
    assert r["first_ms"]["p50"] == 60.0
    assert r["num_tokens"] == 43
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {}


def test_what_servers_tell_of_their_speculation() -> None:
    found = counters(VLLM)
    assert "vllm:request_success_total" not in found
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total[1]"] == 6
    assert acceptance(found, []) == {"A": 1.5, "drafted": 4.0, "rounds": 10}
    llama = [{"timings": {"draft_n": 8, "draft_n_accepted": 6}}, {"timings": {"predicted_ms": 1}}]
    assert acceptance({}, llama) == {"draft_acceptance_rate": 0.75}
    assert acceptance({}, [{}]) == {}


def test_pairs_are_compared_answer_by_answer() -> None:
    records = [
        {"server": s, "id": str(i), "repeat": 0, "per_token_ms": ms * (i + 1), "text": "a" if i else s}
        for s, ms in (("x", 20.0), ("y", 10.0))
        for i in range(3)
    ]
    assert against(records, "x", "y") == {
        "speed_up": [2.0, 2.0, 2.0],
        "median_pair": [2.0, 2.0, 2.0],
        "num_equal": 2,
        "num_pairs": 3,
    }


def test_every_prompt_goes_to_each_server_in_turn() -> None:
    with server() as (a, at_a), server(word="other ") as (b, at_b):
        made = measure(
            [Server(a), Server(f"{b}/v1")], PROMPTS, {"max_tokens": 9, "temperature": 0}, concurrency=2, repeats=2
        )
    assert [r["server"] for r in made["records"]] == [a, a, f"{b}/v1", f"{b}/v1"] * 4
    assert len(at_a) == len(at_b) == 1 + 8  # the warm-up
    first = next(body for body in at_a[1:3] if "0" in body["messages"][0]["content"])  # two come at once
    assert first == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "prompt 0"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0,
    }
    first, second = made["rows"]
    assert (first["num_answers"], first["num_tokens"], first["A"]) == (8, 32, 2.0)
    assert second["against_first"]["num_equal"] == 0
    assert made["records"][0]["text"] == "word word word word "


def test_a_server_that_counts_nothing_is_said_so() -> None:
    with server(usage=False) as (url, _):
        record = ask(Server(url), "tiny", PROMPTS[0], {})
    assert (record["num_tokens"], record["counted_by"]) == (2, "pieces")


@pytest.mark.parametrize(
    ("broken", "said"), [("refuses", "HTTP 400.*no"), ("fails", "out of memory"), ("stops", "broke off prompt p/0")]
)
def test_failures_are_one_sentence(broken: str, said: str) -> None:
    with server(broken=broken) as (url, _), pytest.raises(DartspecError, match=said) as raised:
        ask(Server(url), "tiny", PROMPTS[0], {})
    assert "\n" not in str(raised.value)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(DartspecError, match="does not answer"):
        Server("http://127.0.0.1:1").model_name()
    with pytest.raises(DartspecError, match="is no address of a server"):
        Server("ftp://x").model_name()
    with pytest.raises(DartspecError, match="is token ids"):
        ask(Server("http://127.0.0.1:1"), "m", Prompt("i", "s", (), (1, 2)), {})
    assert Server("http://127.0.0.1:1").counters() == {}
    assert list(events(iter([b"event: x\n", b"data: {}\n", b"data: [DONE]\n", b'data: {"a": 1}\n']))) == [{}]


def test_the_verb_prints_a_table_and_json() -> None:
    with server() as (url, _):
        done = CliRunner().invoke(app, ["bench", "endpoint", url, "--suite", "qa", "--per-set", "2"])
        twice = CliRunner().invoke(app, ["bench", "endpoint", url, url, "--suite", "qa"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rows"][0]["num_answers"] == 2
    assert twice.exit_code == 2
    assert "given twice" in twice.stderr


def test_tables_of_other_programs() -> None:
    made = result()
    rows = list(csv.DictReader(io.StringIO(export(made, "csv"))))
    assert len(rows) == len(made["rows"])
    d = next(r for r in rows if r["method"] == "d@8")
    m = next(r for r in made["rows"] if r["method"] == "d@8")
    assert float(d["speed_up_high"]) == m["speed_up"][2]
    assert float(d["ms_per_round.verify"]) == m["ms_per_round"]["verify"]
    assert float(d["acceptance_by_position.2"]) == m["acceptance_by_position"][1]
    assert export(made, "markdown").splitlines()[1].count("---") == 9
    latex = export(made, "latex")
    assert r"tokens\_per\_s" in latex
    assert latex.count(r"\\") == len(rows) + 1
    with pytest.raises(DartspecError, match="format is 'word'"):
        export(made, "word")


def test_waits_as_tables() -> None:
    wait = {"p50": [1.5, 1.0, 2.0], "p90": [3.0, 2.0, 4.0], "p99": None}
    row = {"rate": 2.0, "service": "plain", "num_requests": 3, "tokens_per_s": 10.0}
    row |= dict.fromkeys(("first_ms", "per_token_ms", "end_ms"), wait)
    made = {"kind": "latency", "rows": [row, row | {"service": "d", "against_first": {"end_ms": wait}}]}
    rows = list(csv.DictReader(io.StringIO(export(made, "csv"))))
    assert (rows[0]["end_ms.p50"], rows[0]["end_ms.p50_high"]) == ("1.5", "2.0")
    assert export(made, "markdown").splitlines()[3].startswith("| 2.00 | d | 3 | 10.00 | 1.50 [1.00, 2.00] |")
    assert export(made, "latex").count("&") == 3 * 13


def test_answers_as_spec_bench_reads_them() -> None:
    """Its speed.py sums new_tokens and wall_time of choice 0, and lists accept_lengths and category."""
    uncut = {"rounds": 2}
    base = {"method": "d@8", "threads": 1, "temperature": 0.0, "seed": 0, "batch": 1, "repeat": 0, "suite": "qa"}
    records = [
        base | {"id": "qa/81", "turn": t, "text": f"answer {t}", "accept_lengths": [3, t], "uncut": uncut}
        | {"num_new_tokens": 4 + t, "wall_ms": 500.0}
        for t in (0, 1)
    ]  # fmt: skip
    records += [r | {"repeat": 1, "text": "again"} for r in records]
    made = {"kind": "run", "rows": [], "records": records, "provenance": {"date": "2026-01-01T00:00:00Z"}}
    (line,) = spec_bench(made, "d@8").splitlines()
    answer = json.loads(line)
    assert (answer["question_id"], answer["category"], answer["model_id"]) == (81, "qa", "d@8")
    first, second = answer["choices"]
    assert first["turns"] == ["answer 0", "answer 1"]
    assert (sum(first["new_tokens"]), sum(first["wall_time"]), first["accept_lengths"]) == (9, 1.0, [3, 0, 3, 1])
    assert (first["index"], second["index"], second["turns"]) == (0, 1, ["again", "again"])
    with pytest.raises(DartspecError, match="no method 'x'; it has d@8"):
        spec_bench(made, "x")
    with pytest.raises(DartspecError, match="measure with bench run --texts"):
        spec_bench(made | {"records": [{k: v for k, v in records[0].items() if k != "text"}]}, "d@8")
