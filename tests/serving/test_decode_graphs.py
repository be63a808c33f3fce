"""Decode graphs, whose replays run again what was captured (on the card, tests/gpu replays them):
static inputs, padding and tables give the tokens of steps without graphs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import GraphConfig, GraphMode, KernelsConfig, KernelSet
from engine.errors import ConfigError
from engine.kernels.lora_tables import TokenUse
from engine.runtime.decode_inputs import DecodeInputs, DecodeRow
from engine.serving.engine import Engine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tensors")
CASES = Path(__file__).parent.parent / "data" / "cases"
TRITON = KernelsConfig(ops=KernelSet.triton, attention=KernelSet.triton)
GRAPHS = GraphConfig(mode=GraphMode.decode, batch_sizes=[2, 4, 64])
NAMES = ("c00_control_all7", "c08_dora", "c23_lm_head_embed_lora")


def graph_engine(bases: Path, make_engine: Callable[..., Engine], **changes: Any) -> Engine:
    engine = make_engine(
        bases / "llama", kernels=TRITON, graph=GRAPHS, memory_bytes=256 << 20, **changes
    )
    for name in NAMES:
        engine.load_adapter(name, CASES / name / "adapter")
    return engine


def replays(engine: Engine) -> dict[tuple[int, bool], int]:
    """Counts of replays by (size, with adapters), from now on."""
    counts: dict[tuple[int, bool], int] = {}
    graphs = engine.runner.graphs._graphs
    for key, replay in graphs.items():

        def counted(key: Any = key, replay: Any = replay) -> None:
            counts[key] = counts.get(key, 0) + 1
            replay()

        graphs[key] = counted
    return counts


def test_tokens_are_those_of_peft(bases: Path, make_engine: Callable[..., Engine]) -> None:
    """Base, plain, DoRA and embedding adapters of several lengths in one batch that shrinks."""
    engine = graph_engine(bases, make_engine)
    counts = replays(engine)
    cases = {name: json.loads((CASES / name / "expected.json").read_text()) for name in NAMES}
    prompts = cases[NAMES[0]]["prompts"][:2]
    lengths = [2, 4, 3, 6, 2, 5]
    wanted = [None, *NAMES, None, NAMES[0]]
    used = [prompts[index % 2] for index in range(6)]
    ids = [
        engine.add_request(
            prompt, engine.sampling_params(max_tokens=length, ignore_eos=True), adapter
        )
        for prompt, length, adapter in zip(used, lengths, wanted, strict=True)
    ]
    served = engine.run_to_end(ids)
    assert [completion.error for completion in served] == [""] * 6
    for index, (completion, name) in enumerate(zip(served, wanted, strict=True)):
        case = cases[name or NAMES[0]]
        greedy = case["greedy_ids" if name else "base_greedy_ids"][index % 2]
        assert list(completion.token_ids) == greedy[: lengths[index]]
    assert {key[0] for key in counts} == {2, 4, 16} and all(lora for _, lora in counts)


def test_a_step_is_under_way_while_the_last_one_lands(
    bases: Path, make_engine: Callable[..., Engine]
) -> None:
    """Drawn tokens, stops and a late request give what an engine without graphs gives, and no
    page is lost.
    """
    prompts = json.loads((CASES / NAMES[0] / "expected.json").read_text())["prompts"][:3]
    wanted = [NAMES[0], None, NAMES[1]]

    def served(engine: Engine) -> list[Any]:
        longest = engine.sampling_params(temperature=0.9, seed=3, max_tokens=11, ignore_eos=True)
        ids = [
            engine.add_request(prompt, longest, name)
            for prompt, name in zip(prompts, wanted, strict=True)
        ]
        for _ in range(4):
            engine.step()
        late = engine.sampling_params(temperature=0.5, seed=4, max_tokens=6, top_k=5)
        ids.append(engine.add_request(prompts[0], late, NAMES[0]))
        for _ in range(3):
            engine.step()
        engine.abort(ids[1])
        return engine.run_to_end([ids[index] for index in (0, 2, 3)])

    plain = make_engine(bases / "llama", memory_bytes=256 << 20)
    for name in NAMES:
        plain.load_adapter(name, CASES / name / "adapter")
    engine = graph_engine(bases, make_engine)
    ahead = []
    run_ahead = engine.runner.run_ahead
    engine.runner.run_ahead = lambda *args: ahead.append(1) or run_ahead(*args)  # type: ignore
    expected, found = served(plain), served(engine)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    assert len(ahead) > 5
    assert not engine.has_work
    engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.prefix_cache.num_available == engine.scheduler.pages.num_pages


def test_what_must_know_the_last_token_waits_for_it(
    bases: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = graph_engine(bases, make_engine)
    engine.runner.run_ahead = None  # type: ignore
    prompt = json.loads((CASES / NAMES[0] / "expected.json").read_text())["prompts"][0]
    for changes in ({"repetition_penalty": 1.5}, {"logprobs": 1}, {"regex": "[ab]*"}):
        sampling = engine.sampling_params(max_tokens=4, ignore_eos=True, **changes)
        (completion,) = engine.generate([prompt], sampling)
        assert completion.error == "" and completion.token_ids


def test_a_stopped_answer_drops_the_step_under_way(
    bases: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = graph_engine(bases, make_engine)
    case = json.loads((CASES / NAMES[0] / "expected.json").read_text())
    greedy = case["base_greedy_ids"][0]
    stop = engine.sampling_params(max_tokens=9, stop_token_ids=[greedy[4]], ignore_eos=True)
    (completion,) = engine.generate([case["prompts"][0]], stop)
    assert list(completion.token_ids) == greedy[: greedy.index(greedy[4]) + 1]
    again = engine.sampling_params(max_tokens=6, ignore_eos=True)
    (completion,) = engine.generate([case["prompts"][1]], again, NAMES[0])
    assert list(completion.token_ids) == case["greedy_ids"][1][:6]
    engine.scheduler.check_integrity()


def test_base_rows_alone_run_the_graphs_without_adapters(
    bases: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = graph_engine(bases, make_engine)
    counts = replays(engine)
    case = json.loads((CASES / NAMES[0] / "expected.json").read_text())
    sampling = engine.sampling_params(max_tokens=4, ignore_eos=True)
    (served,) = engine.generate([case["prompts"][0]], sampling)
    assert list(served.token_ids) == case["base_greedy_ids"][0][:4]
    assert counts == {(2, False): 3}


def test_more_adapters_than_the_tables_hold_run_eagerly(
    bases: Path, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = graph_engine(bases, make_engine)
    counts = replays(engine)
    monkeypatch.setattr(engine.runner.graphs._lora, "fill", lambda uses: False)
    case = json.loads((CASES / NAMES[0] / "expected.json").read_text())
    sampling = engine.sampling_params(max_tokens=3, ignore_eos=True)
    (served,) = engine.generate([case["prompts"][0]], sampling, NAMES[0])
    assert list(served.token_ids) == case["greedy_ids"][0][:3]
    assert counts == {}


def test_tables_refuse_what_does_not_fit(bases: Path, make_engine: Callable[..., Engine]) -> None:
    batch = graph_engine(bases, make_engine).runner.graphs._lora
    room = batch.work.tables.blocks.max_items
    fits, too_many = TokenUse(0, 0, 16 * room), TokenUse(0, 0, 16 * room + 16)
    assert batch.fill([fits]) and int(batch.work.tables.blocks.starts[-1]) == room
    assert not batch.fill([too_many]) and int(batch.work.tables.blocks.starts[-1]) == room


def test_inputs() -> None:
    """Padding has no slot and no length; pages are written anew when any row's change."""
    inputs = DecodeInputs(4, 8, 2, torch.float32, torch.device("cpu"))
    inputs.fill([DecodeRow(7, 20, 9, [3, 1]), DecodeRow(8, 5, 2, [4])], 4)
    assert inputs.token_ids.tolist() == [7, 8, 0, 0]
    assert inputs.positions.tolist() == [20, 5, 0, 0]
    assert inputs.slots.tolist() == [9, 2, -1, -1]
    assert inputs.lengths.tolist() == [21, 6, 0, 0]
    assert inputs.page_table[:2, :2].tolist() == [[3, 1], [4, 0]]
    pages = [4]
    inputs.fill([DecodeRow(1, 6, 3, pages)], 1)
    assert inputs.page_table[0, 0] == 4 and inputs.lengths[0] == 7
    pages[0] = 6
    inputs.fill([DecodeRow(1, 6, 3, pages)], 1)
    assert inputs.page_table[0, 0] == 6


@pytest.mark.parametrize("key", ["ops", "attention"])
def test_plain_torch_cannot_be_captured(
    key: str, bases: Path, make_engine: Callable[..., Engine]
) -> None:
    kernels = KernelsConfig(**{"ops": KernelSet.triton, "attention": KernelSet.triton})
    setattr(kernels, key, KernelSet.reference)
    with pytest.raises(ConfigError, match=f"graph.mode: got decode with kernels.{key}=reference"):
        make_engine(bases / "llama", kernels=kernels, graph=GRAPHS)


def test_sizes() -> None:
    with pytest.raises(ConfigError, match=r"graph.batch_sizes: got \[\], allowed is at least one"):
        GraphConfig(mode=GraphMode.decode)
    with pytest.raises(ConfigError, match=r"graph\.batch_sizes: got 0"):
        GraphConfig(batch_sizes=[0])
