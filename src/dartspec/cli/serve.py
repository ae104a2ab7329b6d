"""`dartspec serve`: an OpenAI-compatible server and its page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dartspec.api import LM
    from dartspec.serve.service import Service

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def serve(
    model: o.ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is reached from this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DARTSPEC_API_KEY", help="Key that clients must send; better given by the variable."),
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="The model's name to clients; default: its own.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Answers written at once, at most.")] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; one more gets 429.")] = 128,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a text, prompt and answer; default: the model's context.")
    ] = None,
    memory_mib: Annotated[int, typer.Option(min=1, help="Memory for keys and values, MiB.")] = 2048,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take, waiting included.")] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds to finish answers when told to stop.")] = 30.0,
    max_body_kib: Annotated[int, typer.Option(min=1, help="Size of a request at most, KiB.")] = 1024,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name by which this server is called; may be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of a web page that may call it (CORS); may be repeated.")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")] = False,
    drafter: o.DrafterOption = "auto",
    index: o.IndexOption = "auto",
    nodes: o.NodesOption = "auto",
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    fast: o.FastOption = True,
    revision: o.RevisionOption = None,
    trust_remote_code: o.TrustOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Serve a model to any OpenAI client, with a page that shows each round's tree.

    Open the address in a browser, or give it to a client as base_url with /v1. Logs are JSON lines on stderr.
    SIGTERM and Ctrl-C finish the answers in progress; SIGHUP reads drafter and index again.

    \b
    Examples:
      dartspec serve
      dartspec serve ./my-model --port 9000 --slots 16
      DARTSPEC_API_KEY=secret dartspec serve --host 0.0.0.0
      curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}'
    """
    term = Terminal(json=False, no_color=no_color)
    try:
        from dartspec.serve import run
        from dartspec.serve.service import Settings
    except ImportError as error:
        raise DartspecError(
            f"the server needs packages that are not installed ({error.name}): pip install 'dartspec[serve]'"
        ) from None
    from dartspec.scheduler import Limits

    is_local = host in LOOPBACK
    settings = Settings(
        limits=Limits(num_slots=slots, num_waiting=queue, max_length=max_length, memory_bytes=memory_mib << 20),
        name=served_name,
        api_key=api_key,
        timeout_s=timeout,
        grace_s=grace,
        body_bytes=max_body_kib << 10,
        hosts=(*LOOPBACK, *(h.lower() for h in allow_host or ())) if is_local and api_key is None else (),
        origins=tuple(allow_origin or ()),
        log_prompts=log_prompts,
    )
    bound = run.listen(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
    term.note(f"listening on {address}; {address}/ready says when the model is there")
    if not is_local and api_key is None:
        term.note("anybody who reaches this address may use the model: give an API key (DARTSPEC_API_KEY)")
    run.log_to_stderr(10 if debug else 20)
    loading = o.Loading(model, drafter, index, nodes, dtype, device, threads, fast, revision, trust_remote_code)

    def load(say: Callable[[str], None]) -> LM:
        say("loading the model")
        return loading.load(term)

    def again(lm: LM) -> LM:
        return lm.with_drafter(drafter, index=None if index == "none" else index)

    def on_ready(service: Service) -> None:
        for name, scheduler in service.lanes.schedulers.items():
            term.note(f"{name}: {scheduler}")
        term.note(f"plain decoding alone: {service.plain_tokens_per_s:.1f} tokens/s")
        term.note(f"ready: {service.model_name} at {address} (page) and {address}/v1 (OpenAI clients)")

    run.serve(settings, bound, load, again, on_ready)
    term.note("stopped")
