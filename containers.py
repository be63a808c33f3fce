"""The engine's composition root: read it from top to bottom, it is the order of a start.

Whoever is wired to `ledger` reserves memory and must be upstream of `memory_plan`; `engine.wiring`
reads that off this graph before anything is built. Components own their set-up; nothing but wiring
stands here.
"""

from dependency_injector import containers, providers

from engine.config import EngineConfig
from engine.device import Device
from engine.layers.opset import OpSet
from engine.lora.manager import LoRAManager
from engine.memory.audit import MemoryAudit
from engine.memory.kv_pool import KVPool
from engine.memory.ledger import MemoryLedger
from engine.memory.pages import PageAllocator
from engine.memory.plan import MemoryPlan
from engine.memory.prefix_cache import PrefixCache
from engine.models.decoder import DecoderModel
from engine.parallel.topology import Topology
from engine.runtime.attention import open_attention
from engine.runtime.attention_space import AttentionSpace
from engine.runtime.decode_graphs import DecodeGraphRunner
from engine.runtime.decode_space import DecodeSpace
from engine.runtime.graph_probe import GraphProbe
from engine.runtime.runner import ModelRunner
from engine.runtime.sampler import Sampler
from engine.runtime.workspace import Workspace
from engine.scheduling.scheduler import Scheduler
from engine.serving.engine import Engine
from engine.text.tokenizer import Tokenizer
from engine.weights.checkpoint import open_checkpoint
from engine.wiring import Component


class EngineContainer(containers.DeclarativeContainer):
    """Providers in start-up order. Build it with `engine.wiring.build(config)`, which checks it
    first.
    """

    config = providers.Dependency(instance_of=EngineConfig)
    cfg = config.provided

    # host: nothing here holds device memory
    device = providers.Singleton(Device, cfg=cfg.device)
    topology = providers.Singleton(Topology)
    ops = providers.Singleton(OpSet.select, cfg=cfg.kernels, device=device)
    checkpoint = providers.Singleton(open_checkpoint, cfg=cfg.model)
    tokenizer = providers.Singleton(Tokenizer.from_checkpoint, checkpoint=checkpoint)

    # reserve: whoever takes the ledger leaves a receipt
    ledger = providers.Singleton(MemoryLedger, cfg=cfg.memory, device=device)
    model = Component(
        DecoderModel,
        cfg=cfg.model,
        checkpoint=checkpoint,
        device=device,
        topology=topology,
        ops=ops,
        ledger=ledger,
    )
    lora_manager = Component(LoRAManager, cfg=cfg.lora, model=model, device=device, ledger=ledger)
    attention_space = providers.Singleton(
        AttentionSpace,
        cfg=cfg.kernels,
        limits=cfg.scheduler,
        paging=cfg.memory,
        model=model,
        device=device,
        ledger=ledger,
    )
    decode_space = providers.Singleton(
        DecodeSpace,
        cfg=cfg.graph,
        kernels=cfg.kernels,
        limits=cfg.scheduler,
        paging=cfg.memory,
        model=model,
        lora_manager=lora_manager,
        device=device,
        ledger=ledger,
    )
    graph_probe = providers.Singleton(
        GraphProbe,
        paging=cfg.memory,
        space=decode_space,
        attention_space=attention_space,
        model=model,
        device=device,
        ledger=ledger,
    )
    workspace = providers.Singleton(
        Workspace,
        cfg=cfg.scheduler,
        paging=cfg.memory,
        kernels=cfg.kernels,
        model=model,
        lora_manager=lora_manager,
        attention_space=attention_space,
        device=device,
        ledger=ledger,
    )

    # size: the plan seals the ledger, what is left becomes KV pages
    memory_plan = providers.Singleton(
        MemoryPlan.build,
        ledger=ledger,
        receipts=providers.List(
            model.provided.receipt,
            lora_manager.provided.receipt,
            attention_space.provided.receipt,
            decode_space.provided.receipt,
            graph_probe.provided.receipt,
            workspace.provided.receipt,
        ),
    )
    kv_pool = providers.Singleton(
        KVPool, cfg=cfg.memory, plan=memory_plan, model=model, device=device
    )

    # run: nothing below may allocate what lives longer than a step
    pages = providers.Singleton(PageAllocator, kv_pool=kv_pool)
    prefix_cache = providers.Singleton(PrefixCache, cfg=cfg.memory, pages=pages)
    attention = providers.Singleton(
        open_attention,
        cfg=cfg.kernels,
        kv_pool=kv_pool,
        model=model,
        device=device,
        space=attention_space,
    )
    graphs = providers.Singleton(
        DecodeGraphRunner, space=decode_space, model=model, attention=attention, device=device
    )
    runner = providers.Singleton(
        ModelRunner,
        model=model,
        attention=attention,
        graphs=graphs,
        lora_manager=lora_manager,
        device=device,
    )
    sampler = providers.Singleton(Sampler, device=device)
    scheduler = Component(
        Scheduler,
        cfg=cfg.scheduler,
        pages=pages,
        prefix_cache=prefix_cache,
        lora_manager=lora_manager,
    )
    audit = providers.Singleton(MemoryAudit, plan=memory_plan, kv_pool=kv_pool, device=device)
    engine = providers.Singleton(
        Engine,
        cfg=cfg.sampling,
        tokenizer=tokenizer,
        model=model,
        kv_pool=kv_pool,
        scheduler=scheduler,
        runner=runner,
        sampler=sampler,
        lora_manager=lora_manager,
        audit=audit,
    )
