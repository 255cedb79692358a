"""Tokens a second of transformers' ``generate``, unmodified, in four ways, each in a process of its own.

usage: python tools/bench/decode.py [MODELS ...] [--tokens N] [--rounds N] [--device cuda|cpu] [--out FILE]

``generate`` with a static cache compiles the decoding step by itself. Weights are random, sampling is greedy, batch 1.
Ways take turns. A step's time is from one token to the next; ``generate`` waits for the GPU after each. README.md has
the details.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from child import Child, answering
from processes import end_on_termination

WAYS = ("eager", "compile", "upstream", "ours")
PROMPT = 16  # tokens
_TURN_S = 400.0  # time limit of a turn; the first turn compiles
_1B = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
MODELS: Mapping[str, Mapping[str, Any]] = {  # sizes
    "llama": {"model_type": "llama", "num_key_value_heads": 8, "tie_word_embeddings": True, **_1B},  # Llama 3.2 1B
    "gpt2": {"model_type": "gpt2"},  # GPT-2 with 124 million parameters
    "small": {"model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},  # as a trial
}


def generating(model: str, way: str, device: str, tokens: int) -> Callable[[], dict[str, Any]]:
    """A function that generates tokens and returns them, with the µs of each step."""
    if way == "ours":
        import pygraph_trees  # noqa: F401  its patches are measured
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, StoppingCriteria

    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[model], bos_token_id=1, eos_token_id=None, pad_token_id=0)
    net = AutoModelForCausalLM.from_config(config).eval()
    net.to(device, torch.bfloat16 if device == "cuda" else torch.float32)

    class Clock(StoppingCriteria):  # type: ignore[misc]  # the package has no types
        """Notes the time of each token, and never stops."""

        def __call__(self, ids: torch.Tensor, _: Any, **kwargs: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    compiling = CompileConfig(mode="default" if way == "compile" else "reduce-overhead")
    compiling._compile_all_devices = device == "cpu"
    how = {"disable_compile": True} if way == "eager" else {"compile_config": compiling}
    ids = torch.arange(2, 2 + PROMPT, device=device)[None]

    def generate() -> dict[str, Any]:
        clock = Clock()
        clock.times = [time.perf_counter()]
        with torch.inference_mode():
            found = net.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                cache_implementation="static",
                stopping_criteria=[clock],
                **how,
            )
        steps = [(after - before) * 1e6 for before, after in zip(clock.times, clock.times[1:], strict=False)]
        return {"tokens": found[0, PROMPT:].tolist(), "steps_us": steps[1:], "all_s": clock.times[-1] - clock.times[0]}

    return generate


def work(job: str) -> int:
    """The process of one way: answers each command with what it has generated."""
    say = answering()
    generate = generating(**json.loads(job))
    for _ in sys.stdin:
        say(generate())
    return 0


def measure(model: str, device: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The results of all ways of a model."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="decode_") as folder:
        job, command = {"model": model, "device": device, "tokens": tokens}, [__file__, "--worker"]
        ways = {way: Child(command, {**job, "way": way}, Path(folder) / way, dict(os.environ)) for way in WAYS}
        try:
            for number in range(3 + rounds):  # the first three compile, record, and choose a way
                for way in WAYS if number % 2 else reversed(WAYS):
                    ways[way].tell(do="generate")
                    answer = ways[way].answer(time.monotonic() + _TURN_S)
                    if "error" in answer:
                        raise RuntimeError(f"{model}, {way}: {answer['error']}")
                    found[way] += [answer] if number >= 3 else []
        finally:
            for child in ways.values():
                child.end()
    wanted = found["compile"][0]["tokens"]
    return [{"model": model, "way": way, **_result(answers, wanted)} for way, answers in found.items()]


def _result(answers: list[dict[str, Any]], wanted: list[int]) -> dict[str, Any]:
    medians = sorted(round(statistics.median(answer["steps_us"]), 1) for answer in answers)
    return {
        "step_us": (step_us := statistics.median(medians)),
        "spread_us": [medians[0], medians[-1]],
        "tokens_per_s": round(1e6 / step_us, 1),
        "generate_s": round(statistics.median(answer["all_s"] for answer in answers), 4),
        "as_compile": sum(map(int.__eq__, answers[-1]["tokens"], wanted)) / len(wanted),  # the share of its tokens
    }


def main(arguments: list[str] | None = None) -> int:
    from bench.figures import has_gpu, one_of, write_figures

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("models", nargs="*", type=one_of(MODELS), metavar="MODELS", help="default: llama gpt2")
    parser.add_argument("--tokens", type=int, default=160, help="to generate (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: as a trial")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of the figures")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not has_gpu():
        return 2
    results = []
    for model in options.models or ("llama", "gpt2"):
        for one in measure(model, options.device, options.tokens, options.rounds):
            print(one, flush=True)
            results.append(one)
    write_figures(options.out, results, tokens=options.tokens, rounds=options.rounds, prompt=PROMPT)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(work(sys.argv[2]))
    end_on_termination()
    sys.exit(main())
