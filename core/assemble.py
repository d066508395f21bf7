"""A composition made real: reads the weights, cuts the KV pool, and joins the parts into an engine."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.capabilities import Flag
from engine.compiling import Compiling
from engine.compose import compose
from engine.composition import Composition
from engine.config.model import EngineConfig
from engine.costs import active_weights
from engine.device import detect
from engine.drafting import Drafter
from engine.engine import Engine
from engine.errors import ResourceError
from engine.grammars import GrammarLimits, Grammars, token_table
from engine.handover import Handover
from engine.kv_memory import count_pages, cut_pool, pool_bytes
from engine.observation import Observation
from engine.ops import select
from engine.ops.kernels import missing
from engine.pacing import LatencyTarget, Pacing
from engine.registry import Registry
from engine.resident.assembly import Speculation, load_resident, moves_of, plan_speculation
from engine.runner import KVPool, Runner
from engine.scheduler import Limits, Scheduler
from engine.specs.attention import AttentionBackend, AttentionShape, KVLayout
from engine.specs.kv_connector import KVConnector, KVSchema, Role
from engine.specs.model import Model, ModelProfile
from engine.specs.speculator import Speculator
from engine.specs.weight_loader import WeightSource
from engine.speculation.controller import Controller
from engine.trace import HostStamps, Stamps, Tracer
from engine.transfer import Link, TransferLedger
from engine.weight_progress import ReportedWeights

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Report = Callable[[str, float, str], None]
"""Called with a phase, the share of it that is done (0..1) and a few words."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A running engine and what it is made of."""

    engine: Engine
    composition: Composition
    num_pages: int
    page_size: int


def assemble(
    config: EngineConfig,
    model_path: Path,
    report: Report = lambda name, progress, detail: None,
    wake: Callable[[], None] = lambda: None,
    registry: Registry | None = None,
) -> Assembled:
    """Compose and build an engine.

    Args:
        model_path: what `resolve_source` found.
        wake: called from other threads when the engine should step although nobody sent anything.
        registry: the installed plugins if unset.

    Raises:
        EngineError: the parts don't fit, or a file or memory is missing; one sentence says which.
    """
    report("composing", 0.0, "")
    plugins = registry or Registry.discover(config.plugins.allow, config.plugins.deny)
    for told in (warning for entry in plugins.load() for warning in entry.warnings):
        log.warning("%s", told)
    composition = compose(config, plugins, detect(config.device.kind), model_path)
    for part, choice in composition.parts():
        log.info("%s: %s (%s)", part, choice.name, choice.why)
    return _Assembly(composition, report, wake, plugins).build()


class _Assembly:
    """The steps of building, which share the composition."""

    def __init__(self, composition: Composition, report: Report, wake: Callable[[], None], registry: Registry) -> None:
        self.composition, self.report, self.wake, self.registry = composition, report, wake, registry
        self.config, self.choices = composition.config, composition.choices
        self.device = torch.device(composition.device.kind)
        self.dtype: torch.dtype = getattr(torch, composition.dtype)
        self.threads = self.config.device.threads or composition.device.cores
        self.page_size = composition.page_size
        self.tracer = Tracer(_stamps(self.device))

    def build(self) -> Assembled:
        composition, config = self.composition, self.config
        backend = self._attention()
        layout = backend.kv_layout()
        speculation = plan_speculation(composition, self.registry, backend)
        num_pages = self._count_pages(layout, speculation)
        max_context = min(composition.max_context, num_pages * self.page_size)
        if max_context < composition.max_context:
            log.warning(
                "the context is cut from %d to %d tokens, since the KV pool holds no more; raise kv_cache.memory",
                composition.max_context,
                max_context,
            )
        profile = replace(composition.profile, max_context=max_context)
        self._check_memory(profile, pool_bytes(layout, profile.layers, num_pages) + speculation.bytes(num_pages))
        observers = [choice.build() for choice in composition.observers]
        weights = self._open_weights()
        engine_id = uuid.uuid4().hex
        connectors = self._connectors(layout, num_pages, weights.digest(), engine_id)
        self.report("allocating KV", 0.0, f"{num_pages} pages of {self.page_size} tokens")
        pool = self._pool(layout, num_pages, connectors)
        drafter, grammars = self._drafter(profile, speculation), self._grammars(profile)
        executor = self.choices["executor"].build(
            make_runner=lambda: self._runner(profile, weights, backend, pool, speculation, grammars)
        )
        cache = self.choices["kv_cache"].build(num_pages=num_pages, page_size=self.page_size)
        observation = Observation(observers)
        handover = self._handover(connectors, pool, engine_id)
        section = config.scheduler
        scheduler = Scheduler(
            cache,
            self.choices["scheduler"].build(),
            Limits(
                max_running=section.max_running,
                max_waiting=section.max_waiting,
                token_budget=section.token_budget,
                prefill_chunk=section.prefill_chunk or section.token_budget,
            ),
            drafts=drafter,
            transfers=handover,
            pacing=self._pacing(profile),
            emit=observation.emit,
        )
        handover.attach(scheduler)
        engine = Engine(
            scheduler,
            executor,
            handover,
            observation,
            drafter=drafter,
            overlap=section.overlap,
            max_context=max_context,
            eos=frozenset(profile.eos_token_ids),
            vocab_size=profile.vocab_size,
            compiling=Compiling(grammars),
            tracer=self.tracer,
        )
        return Assembled(engine, composition, num_pages, self.page_size)

    def _pacing(self, profile: ModelProfile) -> Pacing:
        """What holds steps to the latency target. A pair of positions costs a product with the key and one with the
        value per head and layer, a token one with every weight that takes part."""
        target = self.config.scheduler.latency_target_ms
        if target is None:
            return Pacing()
        weights = active_weights(self.choices["model"].offer, self.composition.model_config, profile)
        pair = profile.layers * profile.heads * (profile.head_dim + profile.v_head_dim)
        return LatencyTarget(target / 1e3, pair / weights)

    def _attention(self) -> AttentionBackend:
        composed, packed = self.composition, self.config.kv_cache.dtype == "fp8"
        shape = AttentionShape.of(composed.profile, composed.dtype, packed=packed)
        backend: AttentionBackend = self.choices["attention"].build(
            shape=shape, page_size=self.page_size, device=self.composition.device
        )
        return backend

    def _count_pages(self, layout: KVLayout, speculation: Speculation) -> int:
        return count_pages(
            self.config.kv_cache,
            layout,
            self.composition.profile.layers,
            self.composition.device,
            max_running=self.config.scheduler.max_running,
            max_context=self.composition.max_context,
            page_size=self.page_size,
            beside=speculation.page_bytes(),
        )

    def _check_memory(self, profile: ModelProfile, pool: int) -> None:
        """Refuse what can't fit before anything is read; `pool` is the KV pool's bytes."""
        device, weights = self.composition.device, profile.parameters * self.dtype.itemsize
        if weights + pool > device.memory_bytes:
            raise ResourceError(
                f"the weights take {weights / 2**20:,.0f} MiB in {self.composition.dtype} and the KV pool "
                f"{pool / 2**20:,.0f} MiB, but {device.name} has {device.memory_bytes / 2**20:,.0f} MiB free; "
                "use a smaller model or dtype, or lower kv_cache.memory"
            )

    def _open_weights(self) -> WeightSource:
        path, config = self.composition.model_path, dict(self.composition.model_config)
        with _named_failures(path):
            weights: WeightSource = self.choices["loader"].build().open(path, config)
        return weights

    def _model(self, profile: ModelProfile, weights: WeightSource) -> Model:
        """The model with its weights in memory; the source is closed."""
        reported = ReportedWeights(weights, lambda share: self.report("loading weights", share, ""))
        with _named_failures(self.composition.model_path), closing(reported):
            model: Model = self.choices["model"].build(
                config=dict(self.composition.model_config),
                profile=profile,
                weights=reported,
                linears=self.choices["quantization"].build(device=self.composition.device, dtype=self.dtype),
                ops=select(self.composition.device, self.dtype),
                device=self.device,
                dtype=self.dtype,
            )
        return model

    def _connectors(self, layout: KVLayout, num_pages: int, digest: str, engine_id: str) -> list[KVConnector]:
        schema = KVSchema(
            weights=digest,
            layers=self.composition.profile.layers,
            page_size=self.page_size,
            parts=layout.parts,
            dtype=layout.dtype,
            num_pages=num_pages,
            axes=layout.axes,
        )
        return [
            choice.build(role=Role(section.role), schema=schema, engine_id=engine_id)
            for choice, section in zip(self.composition.connectors, self.config.kv_connectors, strict=True)
        ]

    def _pool(self, layout: KVLayout, num_pages: int, connectors: Sequence[KVConnector]) -> KVPool:
        """KV memory, from the first connector that wants to provide it."""

        def memory(num_bytes: int) -> Tensor | None:
            return next((m for c in connectors if (m := c.allocate(num_bytes)) is not None), None)

        return cut_pool(layout, self.composition.profile.layers, num_pages, self.device, memory)

    def _handover(self, connectors: Sequence[KVConnector], pool: KVPool, engine_id: str) -> Handover:
        links = []
        sections, choices = self.config.kv_connectors, self.composition.connectors
        for connector, section, choice in zip(connectors, sections, choices, strict=True):
            connector.start(pool, self.wake)
            links.append(
                Link(
                    name=choice.core.name,
                    connector=connector,
                    role=Role(section.role),
                    lease_seconds=section.lease_seconds,
                    fetch_timeout=section.fetch_timeout,
                )
            )
        tokens = len(pool[0][0]) * self.page_size
        return Handover(
            TransferLedger(links, time.monotonic),
            engine_id=engine_id,
            page_size=self.page_size,
            token_bytes=sum(part.nbytes for parts in pool for part in parts) // tokens,
        )

    def _drafter(self, profile: ModelProfile, speculation: Speculation) -> Drafter | None:
        if speculation.speculator is None:
            return None
        section = self.config.speculator
        resident = speculation.resident is not None
        adaptive = Controller(section.max_draft, section.loss_limit, resident=resident) if section.controller else None
        return Drafter(
            speculation.speculator,
            max_draft=section.max_draft,
            vocab_size=profile.vocab_size,
            trees=speculation.trees,
            name=self.choices["speculator"].core.name,
            lengths=adaptive,
        )

    def _grammars(self, profile: ModelProfile) -> Grammars | None:
        if "grammar" not in self.choices:
            return None
        section, path = self.config.grammar, self.composition.model_path
        loader, grammar = self.choices["loader"], self.choices["grammar"]
        grammars = Grammars(
            lambda: token_table(loader.build().tokenizer(path), profile.vocab_size, profile.eos_token_ids),
            lambda tokens: grammar.build(tokens=tokens),
            GrammarLimits(
                max_size=section.max_size, max_depth=section.max_depth, compile_seconds=section.compile_seconds
            ),
            self.wake,
        )
        if section.preload:
            grammars.prepare()
        return grammars

    def _may_capture(self) -> bool:
        """Whether decodes may run as CUDA graphs; what runs inside must claim that it can."""
        safe = all(Flag.GRAPH_SAFE in self.choices[p].offer.capabilities.flags for p in ("attention", "model"))
        return self.config.device.cuda_graphs and safe

    def _runner(
        self,
        profile: ModelProfile,
        weights: WeightSource,
        backend: AttentionBackend,
        pool: KVPool,
        speculation: Speculation,
        grammars: Grammars | None,
    ) -> Runner:
        """Load the model and run once, on the thread that will run the steps.

        The weights are made there too: a thread that has run one parallel operation keeps a pool of OpenMP threads, and
        with two such pools the threads of neither spin for work any more (one stream then takes 14 ms a step, not 8).
        """
        torch.set_num_threads(self.threads)  # kept per thread
        make: Callable[..., Runner] = Runner
        if self.device.type == "cuda" and find_spec("triton") is not None:
            from engine.cuda import kernel_cache
            from engine.cuda.runner import CudaRunner

            kernel_cache.use(self.config.device.kernel_cache)
            make = partial(CudaRunner, token_budget=self.config.scheduler.token_budget, graphs=self._may_capture())
        elif self.device.type == "cpu" and missing(self.composition.device) is None:
            from engine.taped_runner import TapedRunner

            make = TapedRunner
        model, speculator, resident = self._model(profile, weights), speculation.speculator, None
        max_len = profile.max_context + (self.config.speculator.max_draft if speculator else 0)
        if speculation.resident:
            self.report("loading the speculator", 0.0, "")
            resident = load_resident(speculation.resident, self.composition, model, len(pool[0][0]), max_len + 1)
        runner = make(
            model,
            backend,
            pool,
            page_size=self.page_size,
            slots=self.config.scheduler.max_running,
            max_len=max_len,
            device=self.device,
            taps=speculator.taps() if isinstance(speculator, Speculator) else None,
            resident=resident,
            moves=moves_of(speculation, backend, pool, self.page_size),
            grammars=grammars,
            tracer=self.tracer,
        )
        self.report("warming up", 0.0, "")
        runner.warm_up()
        return runner


def _stamps(device: torch.device) -> Stamps:
    """The clock of a device."""
    if device.type != "cuda":
        return HostStamps()
    from engine.cuda.stamps import CudaStamps

    return CudaStamps()


@contextmanager
def _named_failures(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a checkpoint is told with its path."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ResourceError(f"the weights at {path} can't be loaded: {text}") from error


__all__ = ["Assembled", "Report", "assemble"]
