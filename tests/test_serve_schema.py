"""What is written in the server's own OpenAPI page, tried with what schemathesis makes of it: nothing brings a 500."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from served import PATIENCE_S, Served, tiny_lm

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
CHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tiny_lm(tmp_path_factory.mktemp("model"))) as made:
        yield made
        # the server's own count agrees
        assert made.metrics().get('dartspec:http_requests_total{,status="500"}', 0) == 0


@pytest.fixture(scope="module")
def api_schema(served: Served) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/dartspec/info"),
    ("POST", "/dartspec/reload"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda m: m.value)
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_request_brings_a_500(
    api_schema: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    """Requests that the page allows, and such that it does not."""
    operation = api_schema[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return  # there is nothing to get wrong

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=40 if operation.body else 5, deadline=None, derandomize=True, suppress_health_check=CHECKED)
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)

    ask()


def test_every_path_is_tried(api_schema: schemathesis.BaseSchema) -> None:
    """But one, which is refused with 501: a server's error to schemathesis (see test_serve.py)."""
    there = {(o.ok().method.upper(), o.ok().path) for o in api_schema.get_all_operations()}
    assert there - set(PATHS) == {("POST", "/v1/embeddings")}


def test_the_page_describes_what_is_served(served: Served) -> None:
    page = httpx.get(f"{served.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings", "/metrics"} <= page[
        "paths"
    ].keys()
    for path, methods in page["paths"].items():
        for name, operation in methods.items():
            assert operation["description"], f"{name} {path} says nothing"
