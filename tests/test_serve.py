"""The server through HTTP: OpenAI's shapes with OpenAI's own client, the text of plain decoding, and refusals."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from dartspec.types import SamplingParams
from served import Served, chat, events, plainly, said, tiny_lm, wait_until

PROMPTS = ["Once upon a time", "the the the the the", "in a on a in a on a", "12 + 12 =", "é漢字 😀 é漢字"]
AGAIN = {"65": 100}  # the same token again and again: copies are always right
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    {"temperature": 1.3, "min_p": 0.05, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1, "seed": 11, "repetition_penalty": 1.3, "logit_bias": {"65": 2.0, "66": -100}},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tiny_lm(tmp_path_factory.mktemp("model"))) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def params_of(kind: dict[str, Any]) -> dict[str, Any]:
    """A request's fields as the engine's."""
    made = dict(kind)
    if "logit_bias" in made:
        made["logit_bias"] = {int(k): v for k, v in made["logit_bias"].items()}
    return made


# -- the same text -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right(served: Served) -> dict[tuple[str, str], str]:
    """What plain decoding answers, by prompt and kind."""
    made = {}
    for kind in KINDS:
        prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
        results = served.lm.with_drafter("none").generate_batch(prompts, max_tokens=24, **params_of(kind))
        made |= {(p, str(kind)): r.text for p, r in zip(PROMPTS, results, strict=True)}
    return made


@pytest.mark.parametrize("drafter", ["prompt_lookup", "lookahead", "suffix", "plain"])
def test_many_at_once_get_the_text_of_plain_decoding(
    served: Served, right: dict[tuple[str, str], str], drafter: str
) -> None:
    cases = [(prompt, kind, i % 2) for i, prompt in enumerate(PROMPTS) for kind in KINDS]

    def ask(case: tuple[str, dict[str, Any], int]) -> tuple[str, dict[str, Any]]:
        prompt, kind, streamed = case
        body = chat(prompt, max_tokens=24, dartspec={"drafter": drafter}, **kind)
        if streamed:
            parts = served.stream({**body, "stream_options": {"include_usage": True}})
            return said(parts), parts[-1]["usage"]["dartspec"]
        answer = served.post(body=body).json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["dartspec"]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, cases))
    accepted = 0
    for (prompt, kind, _), (text, usage) in zip(cases, answers, strict=True):
        assert text == right[prompt, str(kind)]
        assert usage["drafter"] == drafter
        accepted += usage["accepted"]
    assert (accepted > 0) == (drafter != "plain")


def test_several_answers_are_those_of_the_library(served: Served) -> None:
    body = {"prompt": PROMPTS[:3], "n": 3, "max_tokens": 12, "temperature": 1, "seed": 9}
    answer = served.post("/v1/completions", body).json()
    assert [c["index"] for c in answer["choices"]] == list(range(9))
    right = [t for p in PROMPTS[:3] for t in plainly(served.lm, p, n=3, max_tokens=12, temperature=1, seed=9)]
    assert [c["text"] for c in answer["choices"]] == right
    parts = served.stream(body, "/v1/completions")
    assert [said(parts, i) for i in range(9)] == right


@pytest.mark.parametrize("speculate", ["auto", "off", 2, 0])
def test_speculate_changes_the_speed_alone(served: Served, speculate: str | int) -> None:
    body = chat("the the the the", max_tokens=40, temperature=0, speculate=speculate)
    answer = served.post(body=body).json()
    [right] = plainly(served.lm, body["messages"], max_tokens=40)
    assert answer["choices"][0]["message"]["content"] == right
    usage = answer["usage"]["dartspec"]
    assert (usage["drafted"] > 0) == (speculate not in ("off", 0))
    assert usage["M"] == pytest.approx(39 / usage["rounds"], abs=1e-3)  # the first token belongs to no round


def test_a_stop_ends_the_text_before_it_and_a_seed_brings_it_again(served: Served) -> None:
    first = served.post(body=chat("a", max_tokens=40)).json()
    text, seed = first["choices"][0]["message"]["content"], first["usage"]["dartspec"]["seed"]
    assert seed < 2**53
    again = served.post(body=chat("a", max_tokens=40, seed=seed)).json()
    assert again["choices"][0]["message"]["content"] == text
    stop = text[5:7]
    cut = served.post(body=chat("a", max_tokens=40, seed=seed, stop=stop)).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert served.post(body=chat("a", max_tokens=4, seed=-1)).json()["usage"]["dartspec"]["seed"] == 2**64 - 1


def test_a_stream_holds_whole_characters(served: Served) -> None:
    """Byte-level tokens of a random model cut characters in pieces: every event is whole UTF-8 all the same."""
    for seed in range(6):
        parts = served.stream(chat("é漢字", max_tokens=60, seed=seed))
        [right] = plainly(served.lm, [{"role": "user", "content": "é漢字"}], max_tokens=60, temperature=1, seed=seed)
        assert said(parts) == right
        shown = [c["delta"].get("content", "") for p in parts for c in p["choices"]]
        assert "".join(piece.encode().decode() for piece in shown) == right
    # one character of three bytes, forced token by token: nothing is shown before the third
    ids = served.lm.text.encode("漢")
    assert len(ids) == 3
    for k, token in enumerate(ids):
        prompt = [*served.lm.text.encode("x"), *ids[:k]]
        parts = served.stream(
            {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logit_bias": {str(token): 100}, "stream": True},
            "/v1/completions",
        )
        assert served.lm.text.token(token)[0].startswith("bytes:")
        assert "漢" not in said(parts)


# -- OpenAI's own client -----------------------------------------------------------------------------------------------


def test_openai_client_chats(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=served.service.model_name,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_completion_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        n=2,
    )
    assert answer.headers["x-request-id"]
    made = answer.parse()
    assert made.object == "chat.completion"
    assert made.id.startswith("chatcmpl-")
    assert len(made.choices) == 2
    first = made.choices[0]
    assert first.message.role == "assistant"
    assert first.finish_reason in ("stop", "length")
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert made.usage is not None
    assert len(first.logprobs.content) == made.usage.completion_tokens // 2
    for token in first.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
        # greedy: the likeliest is the one taken
        assert token.top_logprobs[0].token == token.token
        assert token.bytes is not None
    raw = b"".join(bytes(t.bytes or []) for t in first.logprobs.content)
    assert raw.decode("utf-8", "replace").removesuffix("<|im_end|>") == first.message.content
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    speculation = made.usage.model_extra or {}
    assert {"M", "drafted", "accepted", "rounds", "times_ms"} <= speculation["dartspec"].keys()


def test_openai_client_streams(served: Served, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=served.service.model_name,
        messages=[{"role": "user", "content": "the the the"}],
        max_tokens=30,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculate": 4},
    )
    chunks = list(stream)
    assert len({c.id for c in chunks}) == 1
    assert all(c.object == "chat.completion.chunk" for c in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    *pieces, last = chunks
    assert [c.choices[0].finish_reason for c in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == []
    assert last.usage is not None
    assert all(c.usage is None for c in pieces)
    text = "".join(c.choices[0].delta.content or "" for c in pieces)
    [right] = plainly(served.lm, [{"role": "user", "content": "the the the"}], max_tokens=30, temperature=1, seed=4)
    assert text == right


def test_openai_client_completes(served: Served, client: openai.OpenAI) -> None:
    made = client.completions.create(model=served.service.model_name, prompt="in a on a", logprobs=2, temperature=0)
    assert made.object == "text_completion"
    assert made.usage is not None
    assert made.usage.completion_tokens <= 16  # OpenAI's default
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == made.usage.completion_tokens
    assert made.choices[0].text == plainly(served.lm, "in a on a", max_tokens=16)[0]
    assert [m.id for m in client.models.list()] == [served.service.model_name]
    assert client.models.retrieve(served.service.model_name).id == served.service.model_name


def extras(made: Any) -> set[str]:
    """Names of fields that OpenAI's types do not have, at any depth."""
    if isinstance(made, list):
        return set().union(*map(extras, made))
    if not isinstance(made, openai.BaseModel):
        return set()
    own = set(made.model_extra or {})
    return own.union(*(extras(getattr(made, name)) for name in type(made).model_fields))


def test_every_field_is_one_of_openais_types_or_ours(served: Served) -> None:
    """The client itself takes anything; its types, asked to validate, do not."""
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    chatting = chat("Hi", max_tokens=9, n=2, logprobs=True, top_logprobs=2)
    completing = {"prompt": "Hi", "max_tokens": 9, "logprobs": 2}
    usage = {"stream_options": {"include_usage": True}}
    found: set[str] = set()
    found |= extras(ChatCompletion.model_validate(served.post(body=chatting).json()))
    found |= extras(Completion.model_validate(served.post("/v1/completions", completing).json()))
    for part in served.stream({**chatting, **usage, "dartspec": {"rounds": True}}):
        found |= extras(ChatCompletionChunk.model_validate(part))
    for part in served.stream({**completing, **usage}, "/v1/completions"):
        for choice in part["choices"]:  # null until the end, as OpenAI's own, whose type does not say so
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        found |= extras(Completion.model_validate(part))
    for model in served.get("/v1/models").json()["data"]:
        found |= extras(Model.model_validate(model))
    assert found == {"dartspec", "max_model_len"}


def test_log_probabilities_say_where_each_token_begins(served: Served) -> None:
    body = {"prompt": "in a on a", "max_tokens": 40, "seed": 6, "logprobs": 1, "ignore_eos": True}
    whole = served.post("/v1/completions", body).json()["choices"][0]
    parts = [p["choices"][0]["logprobs"] for p in served.stream(body, "/v1/completions")]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for p in parts for x in p[name]] == whole["logprobs"][name]
    placed = list(zip(whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], strict=True))
    plain = [(t, at) for t, at in placed if t.isascii() and t.isprintable() and len(t) == 1]
    assert len(plain) > 5
    assert all(whole["text"][at] == t for t, at in plain)


def test_openai_client_understands_refusals(served: Served, client: openai.OpenAI) -> None:
    name = served.service.model_name
    with pytest.raises(openai.NotFoundError, match="is not served"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="constrained decoding") as refused:
        client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hi"}], response_format={"type": "json_object"}
        )
    assert refused.value.param == "response_format"
    with pytest.raises(openai.InternalServerError, match="embeddings are not served"):
        client.embeddings.create(model=name, input="Hi")


def test_openai_client_async_streams_side_by_side(served: Served) -> None:
    async def one(client: openai.AsyncOpenAI, drafter: str) -> str:
        stream = await client.chat.completions.create(
            model=served.service.model_name,
            messages=[{"role": "user", "content": "a on a"}],
            max_tokens=40,
            seed=2,
            stream=True,
            extra_body={"dartspec": {"drafter": drafter}},
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def race() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, d) for d in ("plain", "prompt_lookup", "suffix")))

    texts = asyncio.run(race())
    assert len(set(texts)) == 1
    assert texts[0]


# -- what is ours ------------------------------------------------------------------------------------------------------


def test_rounds_are_told_as_they_happen(served: Served) -> None:
    body = chat("the the", max_tokens=32, temperature=0, dartspec={"rounds": True}, logit_bias=AGAIN)
    parts = served.stream({**body, "stream_options": {"include_usage": True}})
    rounds = [p["dartspec"]["round"] for p in parts if "dartspec" in p]
    usage = parts[-1]["usage"]
    assert [r["index"] for r in rounds] == list(range(usage["dartspec"]["rounds"]))
    assert sum(r["num_accepted"] for r in rounds) == usage["dartspec"]["accepted"] > 0
    assert sum(r["num_drafted"] for r in rounds) == usage["dartspec"]["drafted"]
    assert 1 + sum(len(r["new"]) for r in rounds) == usage["completion_tokens"]
    ends: list[int] = []
    for r in rounds:
        tree, path = r["tree"], r["path"]
        n = len(tree["ids"])
        assert n == len(tree["texts"]) == len(tree["parents"]) == len(tree["scores"]) == r["num_drafted"] + 1
        assert tree["probs"] is None  # the number of nodes is fixed: nothing is estimated
        assert path[0] == 0
        assert all(tree["parents"][b] == a for a, b in itertools.pairwise(path))
        accepted = [tree["ids"][node] for node in path[1:]]
        assert [t["id"] for t in r["new"]][: len(accepted)] == accepted[: len(r["new"])]
        if ends:
            assert tree["ids"][0] == ends[-1]  # the root is the last round's last token
        ends.append(r["new"][-1]["id"])
        assert set(r["times_ms"]) == {"draft", "search", "verify", "pick", "rest"}
    by_position = usage["dartspec"]["accepted_by_position"]
    assert by_position == [sum(r["num_accepted"] > i for r in rounds) for i in range(len(by_position))]


def test_info_models_health_and_the_page(served: Served) -> None:
    info = served.get("/dartspec/info").json()
    assert info["drafters"][0] == "plain"
    assert info["default_drafter"] == "prompt_lookup"
    assert info["context_length"] == 128
    assert info["max_nodes"] == 6
    assert info["dtype"] == "float32"
    assert info["plain_tokens_per_s"] > 0
    assert served.get("/health").json() == {"status": "ok"}
    assert served.get("/ready").json() == {"status": "ready"}
    for path in (
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/nothing.js",
    ):
        assert served.get(path).status_code == 404
    policy = served.get("/health").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


def test_adaptive_servers_say_how_likely_nodes_are(tmp_path: Any) -> None:
    from dartspec.api import LM, Chosen
    from dartspec.budget import Calibration

    lm = tiny_lm(tmp_path)
    lm = LM(lm.target, lm.text, Chosen(lm.drafter, "prompt_lookup", "", Calibration()), "auto", "")
    with Served(lm) as made:
        parts = made.stream(chat("the the", max_tokens=60, temperature=0, dartspec={"rounds": True}, logit_bias=AGAIN))
        trees = [p["dartspec"]["round"]["tree"] for p in parts if "dartspec" in p]
        assert trees
        for tree in trees:
            assert len(tree["probs"]) == len(tree["ids"])
            assert tree["probs"][0] == 1
            assert all(0 <= p <= 1 for p in tree["probs"])


def test_prompts_that_begin_alike_are_counted(served: Served) -> None:
    before = served.metrics()
    long = "in the beginning " * 5
    for _ in range(2):
        usage = served.post(body={"prompt": long, "max_tokens": 2}, path="/v1/completions").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    after = served.metrics()
    assert after["vllm:prefix_cache_hits_total"] > before["vllm:prefix_cache_hits_total"]


# -- tools and templates -----------------------------------------------------------------------------------------------

TOOL_TEMPLATE = (
    "{% if tools %}TOOLS{% for t in tools %} {{ t['function']['name'] }}{% endfor %}|{% endif %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}|{% endfor %}{{ mood }}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tools_reach_a_template_that_has_a_place_for_them(tmp_path: Any) -> None:
    import tiny_cli

    tiny_cli.model().save_pretrained(tmp_path)
    tiny_cli.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    lm = tiny_lm(tmp_path)
    lm.text.tokenizer.chat_template = TOOL_TEMPLATE
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
    ]
    with Served(lm) as made:
        body = {"messages": messages, "tools": [TOOL], "max_tokens": 8, "temperature": 0}
        answer = made.post(body={**body, "chat_template_kwargs": {"mood": "!"}}).json()
        rendered = "TOOLS weather|system:Be kind.|user:Rain?|assistant:[weather Rome]|tool:dry|!"
        ids = lm.text.encode(rendered)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["choices"][0]["message"]["content"] == plainly(lm, ids, max_tokens=8)[0]
        without = made.post(body={**body, "tool_choice": "none"}).json()
        assert without["usage"]["prompt_tokens"] == len(lm.text.encode(rendered.removeprefix("TOOLS weather|")[:-1]))
        refused = made.post(body={**body, "tool_choice": "required"})
        assert refused.status_code == 400
        for own in ("chat_template", "tokenize", "add_generation_prompt"):
            refused = made.post(body={**body, "chat_template_kwargs": {own: "x"}})
            assert refused.status_code == 400


# -- refusals ----------------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]
BAD: list[tuple[Any, str]] = [
    ({}, "messages"),
    ([], "the request"),
    ("text", "the request"),
    (None, "the request"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "no content"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "role"),
    ({"messages": [{"content": "Hi"}]}, "role"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "'image_url'.*text only"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'text' without text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode|unicode"),
    ({"messages": HI, "temperature": -1}, "temperature"),
    ({"messages": HI, "temperature": 3}, "temperature"),
    ({"messages": HI, "temperature": 1e-9}, "temperature"),
    ({"messages": HI, "temperature": "hot"}, "temperature"),
    ({"messages": HI, "temperature": "1"}, "temperature"),
    ({"messages": HI, "temperature": True}, "temperature"),
    ({"messages": HI, "top_p": 0}, "top_p"),
    ({"messages": HI, "top_p": 1.5}, "top_p"),
    ({"messages": HI, "min_p": -0.1}, "min_p"),
    ({"messages": HI, "n": 0}, "n:"),
    ({"messages": HI, "n": 17}, "n:"),
    ({"messages": HI, "n": 10**30}, "n:"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_tokens": -5}, "max_tokens"),
    ({"messages": HI, "max_tokens": 10**9}, "max_tokens"),
    ({"messages": HI, "max_tokens": 2.5}, "max_tokens"),
    ({"messages": HI, "seed": 2**64}, "seed"),
    ({"messages": HI, "seed": "x"}, "seed"),
    ({"messages": HI, "stop": [""]}, "stop"),
    ({"messages": HI, "stop": ["x"] * 17}, "stop: list should have at most 16 items"),
    ({"messages": HI, "stop_token_ids": [10**7]}, "stop_token_ids names token 10000000"),
    ({"messages": HI, "stop_token_ids": [-1]}, "stop_token_ids names token -1"),
    ({"messages": HI, "chat_template_kwargs": {"self": 1}}, "may not hold 'self'"),
    ({"messages": HI, "chat_template_kwargs": {"conversations": 1}}, "may not hold 'conversations'"),
    ({"messages": HI, "stop": "x" * 1001}, "stop"),
    ({"messages": HI, "presence_penalty": 2.1}, "presence_penalty"),
    ({"messages": HI, "frequency_penalty": -3}, "frequency_penalty"),
    ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias"),
    ({"messages": HI, "logit_bias": [5]}, "logit_bias"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "top_logprobs": 2}, "logprobs"),
    ({"messages": HI, "speculate": -1}, "speculate: input should be greater than or equal to 0"),
    ({"messages": HI, "speculate": "always"}, "speculate"),
    ({"messages": HI, "speculate": True}, "speculate"),
    ({"messages": HI, "dartspec": {"drafter": "../../etc/passwd"}}, "is not offered"),
    ({"messages": HI, "dartspec": {"drafter": "eagle3"}}, "is not offered"),
    ({"messages": HI, "dartspec": {"rounds": True}}, "rounds"),
    ({"messages": HI, "dartspec": {"what": 1}}, "what"),
    ({"messages": HI, "stream_options": {"include_usage": True}}, "stream"),
    ({"messages": HI, "stream": "yes"}, "stream"),
    ({"messages": HI, "tools": [TOOL]}, "no place for tools"),
    ({"messages": HI, "functions": []}, "use tools"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "constrained decoding"),
    ({"messages": HI, "guided_json": {}}, "constrained decoding"),
    ({"messages": HI, "temprature": 1}, "temprature"),
    ({"messages": [{"role": "user", "content": "long " * 200}]}, "shorten the prompt"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]}, "tool call"),
]


@pytest.mark.parametrize(("body", "match"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_requests_get_one_sentence(served: Served, body: Any, match: str) -> None:
    data = json.dumps(body).encode()
    answer = served.post(content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert re.search(match, error["message"]), error["message"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["x", ""], [-1], [10**7], [10**30], [1.5], ["x", 5], [["x"]], {"a": 1}, 7, "x" * 5000]
)
def test_bad_prompts_get_one_sentence(served: Served, prompt: Any) -> None:
    answer = served.post("/v1/completions", {"prompt": prompt})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("prompt", None), answer.text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "Hi"}], "model": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "\\ud800": 1}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "stop": "\\udfff"}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "tools": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_request(served: Served, data: bytes) -> None:
    answer = served.post(content=data, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]
    assert "parsing the body" not in answer.text  # the framework's own words say nothing of the cause


def test_other_content_types_paths_and_methods_are_refused(served: Served) -> None:
    data = json.dumps(chat("Hi")).encode()
    # what a foreign page's form could send without asking
    for headers, found in (({"content-type": "text/plain"}, "'text/plain'"), ({}, "no content type")):
        answer = served.post(content=data, headers=headers)
        assert answer.status_code == 400
        assert re.search(f"{found}.*application/json", answer.json()["error"]["message"])
    for method, path, status in (("GET", "/v1/chat/completions", 405), ("POST", "/v1/nothing", 404), ("PUT", "/", 405)):
        answer = served.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_more_answers_than_may_wait_are_refused(served: Served) -> None:
    answer = served.post("/v1/completions", {"prompt": ["x"] * 33, "n": 2})
    assert answer.status_code == 400
    assert "66 answers" in answer.json()["error"]["message"]


def test_longest_prompt_and_answer_fit_exactly(served: Served) -> None:
    text = "x" * 127
    assert served.post("/v1/completions", {"prompt": text, "max_tokens": 9}).json()["usage"]["completion_tokens"] == 1
    answer = served.post("/v1/completions", {"prompt": text + "x", "max_tokens": 9})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    whole = served.post(body=chat("x", temperature=0, ignore_eos=True)).json()
    assert whole["usage"]["total_tokens"] == 128  # without max_tokens, up to the room there is
    assert whole["choices"][0]["finish_reason"] == "length"


# -- counted -----------------------------------------------------------------------------------------------------------


def test_metrics_count_what_was_done(served: Served) -> None:
    before = served.metrics()
    answers = [served.post(body=chat("the", max_tokens=20, temperature=0, logit_bias=AGAIN)).json() for _ in range(3)]
    wait_until(lambda: served.metrics()["vllm:e2e_request_latency_seconds_count"] >= 3)
    after = served.metrics()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    usage = [a["usage"] for a in answers]
    assert grown("vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usage)
    assert grown("vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
    assert grown("vllm:spec_decode_num_draft_tokens_total") == sum(u["dartspec"]["drafted"] for u in usage) > 0
    accepted = sum(u["dartspec"]["accepted"] for u in usage)
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == accepted > 0
    by_position = sum(grown(n) for n in after if n.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total"))
    assert by_position == accepted
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"vllm:{name}_count") == 3
    assert sum(grown(n) for n in after if n.startswith("vllm:request_success_total")) == 3
    rounds = sum(u["dartspec"]["rounds"] for u in usage)
    assert grown('dartspec:rounds_total{,drafter="prompt_lookup"}') == rounds
    assert after["vllm:num_requests_running"] == 0


def test_metrics_page_is_prometheus_text(served: Served) -> None:
    answer = served.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    line = re.compile(r'[a-z_]+:[a-z0-9_]+(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? (\+Inf|-?[0-9.e+-]+)')
    names = set()
    for row in answer.text.splitlines():
        if row.startswith("# TYPE"):
            assert row.split()[2] not in names
            names.add(row.split()[2])
        elif not row.startswith("#"):
            assert line.fullmatch(row), row


def test_first_pieces_come_before_the_answer_is_whole(served: Served) -> None:
    body = chat("a", temperature=0, ignore_eos=True, stream=True, speculate="off")
    with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for _ in itertools.islice(events(answer), 3):
            pass
        assert served.in_use == 1


def test_params_are_the_engines() -> None:
    """Every field of the engine's parameters can be asked for, but those that need code."""
    from dartspec.serve.protocol import ChatRequest

    known = set(ChatRequest.model_fields)
    assert set(SamplingParams.__dataclass_fields__) - known == {"processors"}
