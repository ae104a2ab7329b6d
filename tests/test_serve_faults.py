"""What goes wrong around a server stays where it went wrong: clients, drafters, indexes, memory, signals."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import tiny_cli
from dartspec.errors import DartspecError
from dartspec.ngram import NgramIndex
from dartspec.serve.lanes import Lanes
from dartspec.serve.run import JsonLines
from dartspec.serve.service import Settings
from dartspec.types import Committed, TokenTree
from served import PATIENCE_S, SMALL, Served, chat, events, pieces, plainly, said, tiny_lm, wait_until

LONG = {"temperature": 0, "ignore_eos": True, "speculate": "off"}  # to the end of the room


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cli.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(tiny_lm(folder)) as made:
        yield made


class Slow:
    """Holds every round of a server until it is let go, so that a test knows where requests are."""

    def __init__(self, served: Served) -> None:
        self.gate = threading.Semaphore(0)
        self._open = False
        for scheduler in served.service.lanes.all:
            step = scheduler.step

            def held(step: Callable[[], bool] = step) -> bool:
                if not self._open:
                    self.gate.acquire(timeout=PATIENCE_S)
                return step()

            scheduler.step = held  # type: ignore[method-assign]

    def let(self, rounds: int) -> None:
        self.gate.release(rounds)

    def open(self) -> None:
        self._open = True
        self.gate.release(1000)


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_vanishes_frees_its_slot_and_its_memory(served: Served, streamed: bool) -> None:
    slow = Slow(served)
    gone = served.half_open(chat("bye", stream=streamed, n=2, **LONG))
    slow.let(3)
    wait_until(lambda: served.in_use == 2 and served.service.jobs)
    job = weakref.ref(next(iter(served.service.jobs)))
    held = [weakref.ref(h._running) for h in job()._handles]  # type: ignore[union-attr]
    gone.close()
    wait_until(lambda: (j := job()) is None or j.why == "gone")
    slow.open()  # one more round, and the slots are free
    wait_until(lambda: served.in_use == 0)
    wait_until(lambda: gc.collect() >= 0 and job() is None and all(h() is None for h in held))
    [scheduler] = served.service.lanes.all
    assert scheduler.counts.num_cancelled == 2
    assert scheduler.counts.num_new_tokens < 2 * 100
    assert served.metrics()['dartspec:requests_cancelled_total{,reason="gone"}'] == 1
    # and the next one is served
    [right] = plainly(served.lm, chat("hello")["messages"], max_tokens=9)
    answer = served.post(body=chat("hello", max_tokens=9, temperature=0))
    assert answer.json()["choices"][0]["message"]["content"] == right


def test_a_client_that_vanishes_from_the_queue_leaves_it(folder: Path) -> None:
    with Served(tiny_lm(folder), limits=replace(SMALL, num_slots=1)) as served:
        slow = Slow(served)
        first = served.half_open(chat("one", stream=True, **LONG))
        slow.let(2)
        wait_until(lambda: served.service.lanes.all[0].num_running == 1)
        second = served.half_open(chat("two", stream=True, **LONG))
        wait_until(lambda: served.service.lanes.all[0].num_waiting == 1)
        second.close()
        wait_until(lambda: served.service.lanes.all[0].num_waiting == 0)  # though no round has passed
        first.close()
        slow.open()
        wait_until(lambda: served.in_use == 0)


def test_a_slow_reader_holds_up_nobody(folder: Path) -> None:
    with Served(tiny_lm(folder)) as served:
        patient = served.service.settings
        served.service.settings = replace(patient, timeout_s=3.0)
        # far more than the sockets hold: every round's tree, for sixteen answers
        body = chat("slow", n=16, temperature=0, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20)
        readers = [served.half_open(body) for _ in range(3)]
        wait_until(lambda: len(served.service.jobs) == 3)
        served.service.settings = patient
        [right] = plainly(served.lm, chat("hello")["messages"], max_tokens=9)
        answer = served.post(body=chat("hello", max_tokens=9, temperature=0))
        assert answer.json()["choices"][0]["message"]["content"] == right
        wait_until(lambda: served.in_use == 0)  # they are decoded although nobody reads
        wait_until(lambda: not served.service.jobs)  # and given up when their time is over
        for reader in readers:
            reader.close()


def test_two_hundred_connections_at_once(folder: Path) -> None:
    """Every one gets its whole right answer, or is told to come again."""
    with Served(tiny_lm(folder), limits=replace(SMALL, num_waiting=40)) as served:
        right = {k: plainly(served.lm, chat(f"number {k}")["messages"], max_tokens=8)[0] for k in range(10)}
        together = threading.Barrier(200)

        def ask(i: int) -> tuple[int, httpx.Response]:
            with httpx.Client(timeout=PATIENCE_S, verify=False) as client:
                together.wait()
                body = chat(f"number {i % 10}", max_tokens=8, temperature=0, stream=True)
                return i % 10, client.post(f"{served.url}/v1/chat/completions", json=body)

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, range(200)))
        served_well = 0
        for k, answer in answers:
            if answer.status_code == 200:
                assert said(pieces(answer.text)) == right[k]
                served_well += 1
            else:
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
        assert served_well >= 44  # slots and queue
        assert served.in_use == 0
        assert served.get("/health").status_code == 200


def test_a_full_queue_says_when_to_come_again(folder: Path) -> None:
    with Served(tiny_lm(folder), limits=replace(SMALL, num_slots=1, num_waiting=2)) as served:
        slow = Slow(served)
        held = [served.half_open(chat("wait", stream=True, **LONG))]
        slow.let(2)
        wait_until(lambda: served.service.lanes.all[0].num_running == 1)
        held += [served.half_open(chat("wait", stream=True, **LONG)) for _ in range(2)]
        wait_until(lambda: served.service.lanes.all[0].num_waiting == 2)
        answer = served.post(body=chat("too many"))
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-should-retry"] == "true"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        # several answers are taken whole or not at all
        held[2].close()
        wait_until(lambda: served.service.lanes.all[0].num_waiting == 1)
        assert served.post(body=chat("two", n=2)).status_code == 429
        assert served.service.lanes.all[0].num_waiting == 1
        assert served.metrics()["vllm:num_requests_waiting"] == 1
        for one in held:
            one.close()
        slow.open()
        wait_until(lambda: served.in_use == 0)


def test_an_answer_that_takes_too_long_ends_with_a_reason(folder: Path) -> None:
    with Served(tiny_lm(folder), timeout_s=1.0) as served:
        slow = Slow(served)
        slow.let(4)
        answer = served.post(body=chat("whole", **LONG))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
        slow.let(6)
        with served.client.stream("POST", "/v1/chat/completions", json=chat("s", stream=True, **LONG)) as stream:
            seen = list(events(stream))
        assert seen[-1]["error"]["code"] == "timeout"
        assert all("error" not in piece for piece in seen[:-1])
        slow.open()
        wait_until(lambda: served.in_use == 0)
        assert served.metrics()['dartspec:requests_cancelled_total{,reason="timeout"}'] == 2


def test_sizes_hosts_keys_and_origins(folder: Path) -> None:
    with Served(
        tiny_lm(folder),
        body_bytes=4096,
        hosts=("localhost", "127.0.0.1"),
        origins=("https://friend.example",),
        api_key="sesame",
    ) as served:
        key = {"authorization": "Bearer sesame"}
        assert served.post(body=chat("x" * 5000), headers=key).status_code == 413

        def drops() -> Iterator[bytes]:  # without a length
            for _ in range(50):
                yield b" " * 1000

        answer = served.post(content=drops(), headers={**key, "content-type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        for wrong in (
            {},
            {"authorization": "Bearer sesam"},
            {"authorization": "sesame"},
            {"authorization": "Bearer é"},
        ):
            for path in ("/v1/models", "/dartspec/info"):
                given = {k: v.encode() for k, v in wrong.items()}
                answer = served.get(path, headers=given)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert served.get("/v1/models", headers=key).status_code == 200
        assert served.get("/health").status_code == 200  # what watches a server needs no key
        rebound = served.get("/health", headers={"host": "evil.example"})
        assert rebound.status_code == 403
        assert served.get("/health", headers={"host": f"localhost:{served.port}"}).status_code == 200
        mine = served.get("/v1/models", headers={**key, "origin": "https://friend.example"})
        assert mine.headers["access-control-allow-origin"] == "https://friend.example"
        asked = served.client.options("/v1/chat/completions", headers={"origin": "https://friend.example"})
        assert asked.status_code == 204
        other = served.get("/v1/models", headers={**key, "origin": "https://foe.example"})
        assert "access-control-allow-origin" not in other.headers
        assert served.client.options("/v1/models", headers={"origin": "https://foe.example"}).status_code in (401, 405)


def test_garbage_on_the_wire_hurts_nobody(served: Served) -> None:
    for data in (
        b"\x00\xff\x16\x03\x01",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{}",  # and leaves
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000,
        b"GET /%00%ff/../.. HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /page/%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", served.port), 5) as one:
            one.sendall(data)
            one.settimeout(0.2)
            answer = one.recv(4096)
            assert b" 500 " not in answer.split(b"\r\n")[0]
    assert served.get("/health").status_code == 200
    assert served.metrics().get('dartspec:http_requests_total{,status="500"}', 0) == 0


# -- drafters ----------------------------------------------------------------------------------------------------------


class Faulty:
    """Drafts well, then as told."""

    taps: tuple[int, ...] = ()

    def __init__(self, how: Callable[[TokenTree], TokenTree], when: int) -> None:
        self._how, self._when = how, when

    def reset(self, slots: Sequence[int]) -> None: ...

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        trees = []
        for c in new:
            root = int(c.history[-1])
            tree = TokenTree(
                torch.tensor([root, 5], dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32), torch.zeros(2)
            )
            trees.append(self._how(tree) if len(c.history) > self._when else tree)
        return trees


def raises(tree: TokenTree) -> TokenTree:
    raise RuntimeError("out of luck")


def not_a_number(tree: TokenTree) -> TokenTree:
    return tree._replace(scores=torch.full((2,), torch.nan))


def no_tree(tree: TokenTree) -> TokenTree:
    return tree._replace(parents=torch.tensor([-1, 1], dtype=torch.int32))


@pytest.mark.parametrize("how", [raises, not_a_number, no_tree])
def test_a_drafter_that_fails_is_left_out_counted_and_logged_once(
    folder: Path, how: Callable[[TokenTree], TokenTree], caplog: pytest.LogCaptureFixture
) -> None:
    lm = tiny_lm(folder).with_drafter(Faulty(how, when=30))
    with Served(lm) as served, caplog.at_level(logging.WARNING, "dartspec"):
        for seed in range(3):
            [right] = plainly(lm, chat("go")["messages"], max_tokens=40, temperature=1, seed=seed)
            answer = served.post(body=chat("go", max_tokens=40, seed=seed)).json()
            assert answer["choices"][0]["message"]["content"] == right
            assert answer["usage"]["dartspec"]["drafted"] > 0  # until it failed
        assert served.metrics()["dartspec:downgraded_sequences_total"] == 3
    assert [r.name for r in caplog.records if "drafter failed" in r.getMessage()] == ["dartspec.engine"]


def test_a_forward_that_fails_ends_its_round_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from dartspec.target.target import Session

    score, count = Session.score, itertools.count()

    def once(self: Session, *args: Any, **kwargs: Any) -> Any:
        if next(count) == 3:
            raise MemoryError("no more")
        return score(self, *args, **kwargs)

    monkeypatch.setattr(Session, "score", once)
    answer = served.post(body=chat("one", max_tokens=30, temperature=0))
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "MemoryError" in error["message"]
    [right] = plainly(served.lm, chat("two")["messages"], max_tokens=9)
    again = served.post(body=chat("two", max_tokens=9, temperature=0)).json()
    assert again["choices"][0]["message"]["content"] == right


def test_a_lane_that_breaks_is_made_anew(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    [scheduler] = served.service.lanes.all

    def broken() -> bool:
        raise RuntimeError("a fault of ours")

    scheduler.step = broken  # type: ignore[method-assign]
    parts = served.post(body=chat("one", max_tokens=30, stream=True)).text
    assert json.loads(parts.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    [right] = plainly(served.lm, chat("two")["messages"], max_tokens=9)
    again = served.post(body=chat("two", max_tokens=9, temperature=0)).json()
    assert again["choices"][0]["message"]["content"] == right
    assert served.service.lanes.all != [scheduler]
    assert served.get("/health").status_code == 200


# -- reloading ---------------------------------------------------------------------------------------------------------


def index_of(lm: Any, text: str, path: Path) -> None:
    sizes = {"vocab_size": lm.target.vocab_size, "fingerprint": lm.text.fingerprint}
    NgramIndex.build([lm.text.encode(text)], name="tiny", description="a test", **sizes).save(path)


def test_an_index_is_replaced_under_a_running_server(folder: Path, tmp_path: Path) -> None:
    plain = tiny_lm(folder)
    path = tmp_path / "x.ngram"
    index_of(plain, "in a on a in a on", path)
    lm = plain.with_drafter("index", index=path)
    with Served(lm, again=lambda: plain.with_drafter("index", index=path), api_key="k") as served:
        served.client.headers["authorization"] = "Bearer k"
        body = chat("in a on", max_tokens=60, temperature=0)
        [right] = plainly(lm, body["messages"], max_tokens=60)
        slow = Slow(served)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(served.post, body=body)
            slow.let(3)
            wait_until(lambda: served.in_use == 1)
            index_of(plain, right * 3, tmp_path / "new.ngram")
            os.replace(tmp_path / "new.ngram", path)
            [old] = served.service.lanes.all
            answer = served.post("/dartspec/reload")
            assert answer.json() == {"reloaded": "index"}
            assert served.service.lanes.all[1] is old  # it has an answer to finish
            slow.open()
            assert running.result().json()["choices"][0]["message"]["content"] == right
        wait_until(lambda: old not in served.service.lanes.all)
        after = served.post(body=body).json()
        assert after["choices"][0]["message"]["content"] == right
        assert after["usage"]["dartspec"]["accepted"] > 10  # the new index knows the answer
        # one that cannot be read changes nothing
        path.write_bytes(b"no index")
        refused = served.post("/dartspec/reload")
        assert refused.status_code == 400
        assert "nothing was reloaded" in refused.json()["error"]["message"]
        again = served.post(body=body).json()
        assert again["choices"][0]["message"]["content"] == right
        metrics = served.metrics()
        assert metrics['dartspec:reloads_total{,result="done"}'] == 1
        assert metrics['dartspec:reloads_total{,result="failed"}'] == 1


def test_an_index_of_another_tokenizer_is_not_taken(folder: Path, tmp_path: Path) -> None:
    plain = tiny_lm(folder)
    path = tmp_path / "x.ngram"
    index_of(plain, "in a on a in a on", path)
    lm = plain.with_drafter("index", index=path)
    with Served(lm, again=lambda: plain.with_drafter("index", index=path), api_key="k") as served:
        served.client.headers["authorization"] = "Bearer k"
        other = NgramIndex.build(
            [[1, 2, 3]], vocab_size=lm.target.vocab_size, fingerprint="another", name="n", description="d"
        )
        other.save(path)
        refused = served.post("/dartspec/reload")
        assert refused.status_code == 400
        assert "another" in refused.json()["error"]["message"]
        assert served.post(body=chat("x", max_tokens=3)).status_code == 200


def test_an_index_that_is_cut_off_in_place_makes_drafts_worse_and_no_more(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tiny_lm(folder)
    path = tmp_path / "x.ngram"
    chance = random.Random(0)
    index_of(plain, "".join(chance.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(60_000)), path)
    with Served(plain.with_drafter("index", index=path)) as served:
        body = chat("abc", max_tokens=60, temperature=0)
        [right] = plainly(plain, body["messages"], max_tokens=60)
        assert path.stat().st_size > 12_000
        with path.open("r+b") as file:
            file.truncate(4096)
        for text in ("abc", "xyz", "q e", "the end"):
            [right] = plainly(plain, chat(text)["messages"], max_tokens=60, temperature=1, seed=2)
            answer = served.post(body=chat(text, max_tokens=60, seed=2)).json()
            assert answer["choices"][0]["message"]["content"] == right
        assert served.metrics()["dartspec:index_lost_pages_total"] > 0
    assert len([r for r in caplog.records if "was cut off" in r.getMessage()]) == 1


def test_reload_needs_a_key(served: Served) -> None:
    answer = served.post("/dartspec/reload")
    assert answer.status_code == 403
    assert "API key" in answer.json()["error"]["message"]


# -- lanes -------------------------------------------------------------------------------------------------------------


def test_lanes_take_turns_and_make_room_for_one_another(folder: Path) -> None:
    with Served(tiny_lm(folder), most_lanes=2) as served:
        order: list[str] = []
        for name in ("prompt_lookup", "plain"):
            scheduler = served.service.lanes.scheduler(name)
            decode = scheduler._decode

            def noted(name: str = name, decode: Callable[[], None] = decode) -> None:
                order.append(name)
                decode()

            scheduler._decode = noted  # type: ignore[method-assign]
        both = [served.half_open(chat("go", stream=True, dartspec={"drafter": d}, **LONG)) for d in ("plain", "auto")]
        wait_until(lambda: len(served.service.jobs) == 2)
        busy = served.post(body=chat("third", dartspec={"drafter": "suffix"}))
        if busy.status_code == 429:
            assert "drafters are at work" in busy.json()["error"]["message"]
        for one in both:
            assert b"200 OK" in one.recv(100)
        wait_until(lambda: served.in_use == 0)
        wait_until(lambda: not served.service.jobs)
        first = next(i for i in range(len(order)) if len(set(order[i : i + 2])) == 2)
        shared = order[first : first + 40]
        assert all(a != b for a, b in itertools.pairwise(shared))
        # idle lanes make room
        assert served.post(body=chat("x", max_tokens=3, dartspec={"drafter": "suffix"})).status_code == 200
        assert served.post(body=chat("x", max_tokens=3, dartspec={"drafter": "lookahead"})).status_code == 200
        wait_until(lambda: len(served.service.lanes.all) == 2)
        for one in both:
            one.close()


def test_a_lane_that_cannot_be_made_refuses_its_request_alone(folder: Path) -> None:
    made = 0

    with Served(tiny_lm(folder)) as served:
        make = served.service._make

        def once(name: str) -> Any:
            nonlocal made
            made += 1
            if name == "suffix":
                raise DartspecError("no memory for it")
            return make(name)

        served.service.lanes._make = once
        answer = served.post(body=chat("x", dartspec={"drafter": "suffix"}))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "no memory for it"
        assert made == 1
        assert served.post(body=chat("x", max_tokens=2)).status_code == 200


def test_closed_lanes_end_what_they_hold(folder: Path) -> None:
    from dartspec.engine import Request
    from dartspec.scheduler import Scheduler

    lm = tiny_lm(folder)
    lanes = Lanes(lambda name: Scheduler(lm.target, lm.drafter, text=lm.text, num_nodes=3, limits=SMALL), most=2)
    handles = lanes.submit("a", [Request([5, 6, 7])])
    assert lanes.schedulers.keys() == {"a"}
    lanes.close()
    assert handles[0].finish == "cancelled"
    with pytest.raises(DartspecError):
        lanes.submit("b", [Request([5])])


# -- logs --------------------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    made = JsonLines()
    return [json.loads(made.format(r)) for r in caplog.records if r.getMessage() == "request"]


def test_logs_hold_numbers_and_no_text(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    secret = "my secret words"
    with caplog.at_level(logging.INFO, "dartspec"):
        answer = served.post(body=chat(secret, max_tokens=5, seed=1), headers={"x-request-id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        served.post(body={"messages": [{"role": secret, "content": secret}]})
        served.post(body=chat(secret * 100))
        served.post("/v1/completions", {"prompt": secret, "max_tokens": 5}, headers={"x-request-id": "no\x01good"})
        wait_until(lambda: len(lines(caplog)) == 4)
    one = next(line for line in lines(caplog) if line["request_id"] == "abc-1")
    assert one["status"] == 200
    assert one["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert one["seed"] == 1
    assert {"first_token_ms", "queue_ms", "drafted", "accepted", "finish", "ms"} <= one.keys()
    everything = "\n".join(map(json.dumps, lines(caplog)))
    assert "secret" not in everything
    assert len({line["request_id"] for line in lines(caplog)}) == 4


def test_logs_hold_text_where_it_was_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Served(tiny_lm(folder), log_prompts=True) as served, caplog.at_level(logging.INFO, "dartspec"):
        answer = served.post(body=chat("my secret", max_tokens=5)).json()
        wait_until(lambda: lines(caplog))
    [line] = lines(caplog)
    assert line["prompt"] == [{"role": "user", "content": "my secret"}]
    assert line["answer"] == [answer["choices"][0]["message"]["content"]]


# -- start and end -----------------------------------------------------------------------------------------------------


def test_told_to_stop_it_finishes_or_says_why_not(folder: Path) -> None:
    for grace, whole in ((PATIENCE_S, True), (0.2, False)):
        with Served(tiny_lm(folder), grace_s=grace) as served:
            slow = Slow(served)
            body = chat("last words", stream=True, max_tokens=60, **LONG)
            with served.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                slow.let(4)
                parts = events(stream)
                next(parts)
                wait_until(lambda: served.in_use == 1)
                served.server.handle_exit(signal.SIGTERM, None)
                wait_until(lambda: served.service.state == "stopping")
                if whole:
                    slow.open()
                    got = list(parts)
                    right = plainly(served.lm, body["messages"], max_tokens=60, ignore_eos=True)
                    assert said(got) == right[0]
                else:
                    wait_until(lambda: all(j.why for j in served.service.jobs))
                    slow.open()
                    got = list(parts)
                    assert got[-1]["error"]["code"] == "shutting_down"
            served.stop()
        assert served.in_use == 0


def test_while_it_starts_it_says_how_far_it_is(folder: Path) -> None:
    from dartspec.serve.run import listen, make_server
    from dartspec.serve.service import Service

    service = Service(Settings(limits=SMALL))
    service.stage = "loading the model"
    bound = listen("127.0.0.1", 0)
    server = make_server(service)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
    thread.start()
    wait_until(lambda: server.started)
    with httpx.Client(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=PATIENCE_S) as client:
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading the model"})
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/chat/completions", json=chat("Hi"))
        assert answer.status_code == 503
        assert "loading the model" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert client.get("/metrics").status_code == 200
        service.begin(tiny_lm(folder))
        assert client.get("/ready").json() == {"status": "ready"}
        assert client.post("/v1/chat/completions", json=chat("Hi", max_tokens=2)).status_code == 200
        service.stop_taking()
        assert client.get("/ready").json() == {"status": "stopping"}
        assert client.post("/v1/chat/completions", json=chat("Hi")).status_code == 503
    server.handle_exit(signal.SIGTERM, None)
    thread.join(PATIENCE_S)
    service.close()


def test_the_program_serves_reloads_and_stops(folder: Path, tmp_path: Path) -> None:
    """The whole of it: start, a request with a key, SIGHUP, SIGTERM, exit code 0."""
    path = tmp_path / "log"
    command = [sys.executable, "-m", "dartspec", "serve", str(folder), "--port", "0", "--threads", "1"]
    command += ["--nodes", "4", "--drafter", "prompt_lookup", "--memory-mib", "64", "--dtype", "float32"]
    environment = {**os.environ, "DARTSPEC_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    with path.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: "ready: " in path.read_text() or process.poll() is not None)
        text = path.read_text()
        assert "ready: " in text, text
        url = text.split("listening on ")[1].split(";")[0]
        key = {"authorization": "Bearer sesame"}
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 401
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=chat("Hi", max_tokens=3), headers=key, timeout=PATIENCE_S
        )
        assert answer.status_code == 200
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: '"reloaded"' in path.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        log_lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
        assert [line["event"] for line in log_lines] == ["request", "request", "reloaded", "stopping"]
    finally:
        process.kill()
        process.wait()


def test_a_model_that_cannot_be_loaded_ends_the_program_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dartspec", "serve", str(tmp_path / "nothing"), "--port", "0"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert made.returncode == 2
    last = made.stderr.strip().splitlines()[-1]
    assert last.startswith("dartspec: ")
    assert "nothing" in last
    assert "Traceback" not in made.stderr


def test_a_taken_port_and_odd_settings_are_refused_in_one_sentence() -> None:
    from dartspec.serve.run import listen

    with listen("127.0.0.1", 0) as taken, pytest.raises(DartspecError, match="another --port"):
        listen("127.0.0.1", taken.getsockname()[1])
    for wrong in ({"timeout_s": 0}, {"grace_s": -1}, {"body_bytes": 0}, {"most_lanes": 0}, {"api_key": " "}):
        with pytest.raises(DartspecError):
            Settings(**wrong)  # type: ignore[arg-type]


def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    code = "import runpy, sys; sys.modules['uvicorn'] = None; runpy.run_module('dartspec', run_name='__main__')"
    made = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert made.returncode == 2
    assert "pip install 'dartspec[serve]'" in made.stderr
    assert "Traceback" not in made.stderr


def test_importing_the_package_imports_no_server() -> None:
    code = "import sys, dartspec, dartspec.cli.main; assert not {'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
