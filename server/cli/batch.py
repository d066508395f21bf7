"""`engine batch`: answer a file of requests, with an engine of its own or a server that runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.server.batch import Batch, Post, Reply, Tally
from engine.server.batch_files import Answers, BatchError, read_ids

if TYPE_CHECKING:
    import httpx

    from engine.config.model import EngineConfig

_CONCURRENCY = 64
_HIGHEST = 65536


@click.command("batch")
@click.argument("requests", metavar="IN.jsonl", type=click.Path(path_type=Path))
@click.argument("answers", metavar="OUT.jsonl", type=click.Path(path_type=Path))
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of CONFIG; repeatable.")
@click.option("--url", help="Send the requests to this server instead of starting an engine.")
@click.option("--key", help="API key for --url.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, _HIGHEST),
    default=_CONCURRENCY,
    show_default=True,
    help="Requests under way at once.",
)
def command(
    requests: Path,
    answers: Path,
    config: Path | None,
    overrides: tuple[str, ...],
    url: str | None,
    key: str | None,
    concurrency: int,
) -> None:
    """Answer the requests of IN.jsonl, in OpenAI's batch format, into OUT.jsonl.

    Every line that is answered is kept: after an interruption run the same command again, and it goes on where it was.
    The exit code is 1 if a request was refused or failed.

    \b
    engine batch requests.jsonl answers.jsonl engine.yaml
    engine batch requests.jsonl answers.jsonl --url http://127.0.0.1:8000
    """
    if url is not None and (config is not None or overrides):
        raise click.UsageError("--url uses a server as it is; CONFIG and --set are for an engine started here")
    ids = read_ids(requests)
    with Answers(answers) as file:
        done = file.read_ids()
        if strangers := done - ids:
            raise BatchError(f"{answers} answers {min(strangers)!r}, which is not in {requests}; name another file")
        tally = Tally(skipped=len(done))
        if ids - done:
            server = _own_engine(config, overrides) if url is None else _running(url, key)
            tally = asyncio.run(_run(requests, file, ids, done, server, concurrency))
    click.echo(f"{tally.answered} answered, {tally.failed} failed, {tally.skipped} had an answer already", err=True)
    sys.exit(1 if tally.failed else 0)


async def _run(
    requests: Path,
    answers: Answers,
    ids: set[str],
    done: set[str],
    server: AbstractAsyncContextManager[Post],
    concurrency: int,
) -> Tally:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=len(ids), completed=len(done))

        def show(tally: Tally) -> None:
            failed = f", {tally.failed} failed" if tally.failed else ""
            progress.update(
                bar, completed=tally.answered + tally.failed + tally.skipped, description=f"answering{failed}"
            )

        async with server as post:
            return await Batch(requests, answers, post, done, show).run(concurrency)


@asynccontextmanager
async def _own_engine(config: Path | None, overrides: tuple[str, ...]) -> AsyncGenerator[Post]:
    """The server's routes over an engine of our own, which ends with this process however that ends. No socket."""
    import httpx

    from engine.client import EngineClient
    from engine.compose import resolve_source
    from engine.config.components import check
    from engine.config.load import load_config
    from engine.registry import Registry
    from engine.server.app import create_app
    from engine.server.metrics import Metrics
    from engine.server.reading import load_texts
    from engine.server.state import ServerState

    loaded = load_config(config, ["logging.level=warning", *overrides])
    section = _without_keys(loaded.config)
    registry = Registry.discover(section.plugins.allow, section.plugins.deny)
    check(loaded, registry)
    files = resolve_source(section, registry, lambda share, words: None, loaded.origins)
    client = await EngineClient.spawn(section, files.path)
    try:
        model = section.model.name or files.name
        state = ServerState(client=client, config=section, model=model, metrics=Metrics(model))
        state.tokenizer = load_texts(state, registry, files.path)
        await client.wait_ready()
        transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
        async with _client("http://engine", None, transport) as http:

            async def post(path: str, body: bytes) -> Reply:
                reply = _reply(await http.post(path, content=body))
                if client.failed is not None:
                    raise BatchError(f"the engine has stopped: {client.failed}")
                return reply

            yield post
    finally:
        await client.close()


def _without_keys(config: EngineConfig) -> EngineConfig:
    """No stranger can reach an engine without a socket."""
    return config.model_copy(update={"server": config.server.model_copy(update={"api_keys": []})})


@asynccontextmanager
async def _running(url: str, key: str | None) -> AsyncGenerator[Post]:
    """A server at an address."""
    import httpx

    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    async with _client(base, key, None) as http:

        async def post(path: str, body: bytes) -> Reply:
            try:
                return _reply(await http.post(path, content=body))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = str(error) or type(error).__name__
                raise BatchError(f"no server answers at {base}: {reason}; run this again to go on") from None

        yield post


def _client(base: str, key: str | None, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    import httpx

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base, headers=headers, timeout=None, limits=limits, transport=transport)


def _reply(response: httpx.Response) -> Reply:
    stated = response.headers.get("retry-after", "")
    return Reply(
        status=response.status_code, body=response.content, retry_after=float(stated) if stated.isdigit() else 1.0
    )


__all__ = ["command"]
