"""Times the engine on one GPU with RWKV-6 1.6B or RWKV-7 1.5B and random weights, beside its targets.

    python benchmarks/engine.py [--model rwkv7] --out FILE.json [--only decode,mixed] [--streams 1,128] [--seconds 230] [--tiny]

First the tokens of an engine with CUDA graphs and overlap are compared with those of plain steps. Ceilings: all weights but the embeddings
are read once a step, the state of each sequence is read and written once, at the rate of a large copy on the same GPU. ``--tiny`` runs
everything on a small model, also on a CPU.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable

import torch
from engine_host import KINDS
from random_models import config_of, model_of

from penstock.engine import Engine, SamplingParams
from penstock.engine.graphs import StepGraphs
from penstock.engine.pace import Pace
from penstock.engine.transfer import ToHost

PEAK = 700e12
"""Operations a second of large matrix products on one H100 or H200."""
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ASKED = {
    "rwkv6": {1: 0.65, 128: 0.55, "invariant": 1.3},
    "rwkv7": {1: 0.70, 128: 0.60, "invariant": 1.25},
}
"""Parts of the ceiling that one stream and 128 streams are asked to reach, and the most that ``batch_invariant`` may cost."""
ROWS: list[dict] = []


class Letters:
    """A tokenizer of one letter a token, as large as the model's vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def stream(self, after: object = ()) -> "Letters":
        return self

    def push(self, token: int) -> str:
        return chr(97 + token % 26)

    def finish(self) -> str:
        return ""


def row(name: str, value: float | None = None, unit: str = "", target: str = "", met: bool | None = None, **more) -> None:
    """Print and keep one figure."""
    ROWS.append({"name": name, "value": value, "unit": unit, "target": target, "met": met, **more})
    shown = "" if value is None else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    verdict = "" if met is None else "met" if met else "MISSED"
    rest = ", ".join(f"{key} {one:.4g}" if isinstance(one, float) else f"{key} {one}" for key, one in more.items() if key != "kernels")
    print(f"{name:<52} {shown:>9} {unit:<9} {target:<14} {verdict:<7} {rest}", flush=True)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def copy_rate() -> float:
    """Bytes a second of a large copy, read and written: the median of ten."""
    source = torch.empty(2**32 if GPU else 2**26, dtype=torch.uint8, device=DEVICE)
    target, taken = torch.empty_like(source), []
    for _ in range(11):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        synchronize()
        taken.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(taken[1:])


class Bench:
    def __init__(self, name: str, tiny: bool, streams: tuple[int, ...]) -> None:
        self.name, self.tiny, self.asked = name, tiny, ASKED[name]
        self.streams, self.several, self.steps = 128, streams or (1, 128, 384, 512), 192
        self.prompt, self.long, self.short = 2048, 8192, 4096
        if tiny:
            self.streams, self.several, self.steps = 8, streams or (1, 8, 12), 70
            self.prompt, self.long, self.short = 128, 256, 256
        begin, config = time.perf_counter(), config_of(name, tiny)
        self.vocab_size = config.vocab_size
        self.model = model_of(config, torch.bfloat16 if GPU else torch.float32, DEVICE)
        synchronize()
        counted = [p for name, p in self.model.named_parameters() if name != "embeddings.weight"]
        self.parameters = sum(p.numel() for p in counted)
        self.weight_bytes = sum(p.nbytes for p in counted)
        self.state_bytes = sum(x.nbytes for layer in self.model.initial_state(1) for part in layer for x in part)
        self.bandwidth = copy_rate()
        row("copy", self.bandwidth / 1e12, "TB/s")
        row("weights", self.weight_bytes / 1e9, "GB", state_mib=self.state_bytes / 2**20, build_s=time.perf_counter() - begin)

    def ceiling(self, streams: int) -> float:
        """Tokens a second."""
        return streams * self.bandwidth / (self.weight_bytes + 2 * streams * self.state_bytes)

    def engine(self, streams: int, **options) -> Engine:
        options = {"cache_bytes": 0, "token_budget": streams + 1024, **options}
        return Engine(self.model, slots=streams, **options)

    def running(self, engine: Engine, streams: int, kind: list[SamplingParams] | None = None, sink=None) -> list:
        """Fill an engine with streams that complete their chunks at different steps; returns the requests."""
        params = itertools.cycle(kind or [SamplingParams(max_tokens=10**6, temperature=0)])
        begin = time.perf_counter()
        prompts = [random_tokens(1 + (n * 64 // max(streams, 64)) % 64, self.vocab_size, n) for n in range(streams)]
        requests = [engine.submit(prompt, next(params), sink=sink) for prompt in prompts]
        while not all(request.result.tokens for request in requests):
            engine.step()
        for _ in range(66):  # every kind of step once
            engine.step()
        synchronize()
        self.warm_s = time.perf_counter() - begin
        return requests

    def step_times(self, engine: Engine, steps: int) -> tuple[list[float], float]:
        """Milliseconds of each step, and tokens a second of all."""
        found, before, begin = [], engine.stats.generated_tokens, time.perf_counter()
        for _ in range(steps):
            last = time.perf_counter()
            engine.step()
            found.append((time.perf_counter() - last) * 1e3)
        synchronize()
        return found, (engine.stats.generated_tokens - before) / (time.perf_counter() - begin)

    # measures

    def check(self) -> None:
        """Tokens of graphs and overlap in float32, several requests that come and go."""
        sizes = {} if self.tiny else {"vocab_size": 4096, "hidden_size": 512, "num_layers": 3}
        config = config_of(self.name, self.tiny, **sizes)
        model = model_of(config, torch.float32, DEVICE)
        prompts = [random_tokens(1 + 37 * n, config.vocab_size, n) for n in range(9)]
        params = [SamplingParams(max_tokens=5 + 20 * n, seed=n, temperature=float(n % 2)) for n in range(9)]
        plain = Engine(model, slots=1, token_budget=512, cache_bytes=0, overlap=False, cuda_graphs=False)
        wanted = [plain.generate([prompt], some)[0].tokens for prompt, some in zip(prompts, params)]
        engine = Engine(model, slots=6, token_budget=512)
        for again in ("first", "second"):  # the second time with graphs that exist, and with the cache
            results = engine.generate(prompts, params)
            equal = [result.tokens == one for result, one in zip(results, wanted)]
            errors = {str(result.error)[:200] for result in results if result.error is not None}
            row(f"equal tokens, {again} run", float(sum(equal)), f"of {len(equal)}", "all", all(equal), errors=errors or "none")
        engine.check_integrity()

    def decode(self) -> None:
        for streams in self.several:
            begin = time.perf_counter()
            engine = self.engine(streams)
            if streams == self.streams:
                engine.warm_up()
                synchronize()
                row(f"all graphs of {streams} slots", time.perf_counter() - begin, "s", count=self.graphs_of(engine))
            requests = self.running(engine, streams)
            times, rate = self.step_times(engine, self.steps)
            share = self.asked.get(128 if streams == self.streams else streams)
            row(
                f"decode, {streams} streams", rate, "tokens/s", "" if share is None else f"{share * self.ceiling(streams):,.0f}",
                None if share is None else rate >= share * self.ceiling(streams), of_ceiling=rate / self.ceiling(streams),
                median_ms=statistics.median(times), p99_ms=sorted(times)[int(len(times) * 0.99)], warm_s=self.warm_s,
                graphs=self.replays(engine), errors=Counter(str(one.result.error)[:200] for one in requests if one.result.error) or "none",
            )  # fmt: skip
            if streams in (1, self.streams):
                self.profile(engine, f"profile of 5 steps, {streams} streams")
            engine.close()
            del engine, requests
            gc.collect()

    def graphs_of(self, engine: Engine) -> int:
        graphs = engine._steps.runner.graphs
        return 0 if graphs is None else len(graphs._graphs)

    def replays(self, engine: Engine) -> str:
        """Milliseconds of each captured graph, one after another without Python between."""
        graphs = engine._steps.runner.graphs
        found = []
        for (tokens, rows), graph in sorted(graphs._graphs.items()) if graphs is not None else ():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(5):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(f"{tokens}{f' in {rows}' if rows else ''}: {begin.elapsed_time(end) / 5:.3f} ms")
        return "; ".join(found) or "none"

    def profile(self, engine: Engine, name: str) -> None:
        """Kernels of five steps by time, and how long the device is idle between the first and the last."""
        activities = [torch.profiler.ProfilerActivity.CUDA if GPU else torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as seen:
            for _ in range(5):
                engine.step()
            synchronize()
        total: Counter = Counter()
        counts: Counter = Counter()
        spans = []
        for event in seen.events():
            if GPU and event.device_type != torch.autograd.DeviceType.CUDA:
                continue
            total[event.name[:100]] += event.time_range.elapsed_us() / 5
            counts[event.name[:100]] += 1
            spans.append((event.time_range.start, event.time_range.end))
        spans.sort()
        busy, last, gaps = 0.0, spans[0][0], []
        for begin, end in spans:
            if begin > last:
                gaps.append(begin - last)
            busy += max(0.0, end - max(begin, last))
            last = max(last, end)
        whole = last - spans[0][0]
        kernels = {key: [round(us, 2), counts[key] / 5] for key, us in total.most_common(30)}
        row(
            name, busy / 5e3, "ms busy", "", None, whole_ms=whole / 5e3, idle=1 - busy / whole, kernels_a_step=len(spans) / 5,
            largest_gaps_us=str([round(gap) for gap in sorted(gaps)[-6:]]), gaps_above_20us=sum(gap > 20 for gap in gaps), kernels=kernels,
        )  # fmt: skip
        for key, (us, count) in list(kernels.items())[:16]:
            print(f"    {us:9.1f} us a step  {count:7.1f} x  {key}")

    def prompts(self) -> None:
        count = 8
        engine = self.engine(count, token_budget=count * self.prompt + 256)
        rates = []
        for again in range(4):
            prompts = [random_tokens(self.prompt, self.vocab_size, 100 * again + n) for n in range(count)]
            synchronize()
            begin = time.perf_counter()
            engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0))
            rates.append(count * self.prompt / (time.perf_counter() - begin))
        share = 2 * self.parameters * max(rates[1:]) / PEAK
        row(
            f"prompts, {count} x {self.prompt}", share * 100, "%", "45 of 700 TF/s", share >= 0.45, tokens_per_s=max(rates), first=rates[0]
        )  # fmt: skip
        engine.close()

    def mixed(self) -> None:
        """Time between tokens of streams while long prompts come one after another."""
        engine = self.engine(self.streams + 2, token_budget=self.streams + 2 + 1024)
        self.running(engine, self.streams)
        alone, _ = self.step_times(engine, 128)
        median, number = statistics.median(alone), 0
        for budget in (1024, 512, 256, None):
            engine._steps.pace = Pace(engine._steps.scheduler.token_budget) if budget is None else None
            engine._steps.scheduler.prompt_budget = budget or 0
            waiting: list = []
            gaps: list[float] = []
            begin = last = time.perf_counter()
            measured, done = 0.3 if self.tiny else 2.0, 0
            while last - begin < 2 * measured:  # in the first half, graphs are captured
                waiting = [one for one in waiting if not one.done]
                while len(waiting) < 2:
                    number += 1
                    tokens = random_tokens(self.long, self.vocab_size, number)
                    waiting.append(engine.submit(tokens, SamplingParams(max_tokens=1, temperature=0)))
                engine.step()
                now = time.perf_counter()
                if last - begin > measured:
                    gaps.append((now - last) * 1e3)
                    works = engine._steps._flight.works if engine._steps._flight else []  # none without overlap
                    done += sum(work.end - work.begin for work in works if work.begin < len(work.sequence.request.prompt))
                last = now
            gaps.sort()
            p99 = gaps[int(len(gaps) * 0.99)]
            row(
                f"mixed, {self.streams} streams, {budget or 'adaptive'} tokens of prompts a step", p99 / median, "x median", "2 (p99)",
                p99 <= 2 * median,
                decode_median_ms=median, p50_ms=statistics.median(gaps), p99_ms=p99, most_ms=gaps[-1],
                prompt_tokens_per_s=done / sum(gaps) * 1e3, steps=len(gaps), budget=engine.stats.prompt_budget,
            )  # fmt: skip
            for one in waiting:
                engine.cancel(one)
        engine.close()

    def first_token(self) -> None:
        """Time to the first token of a prompt whose first tokens are cached."""
        engine = self.engine(4, token_budget=self.short + 512, cache_bytes=2**31)
        params = SamplingParams(max_tokens=1, temperature=0)
        times: dict[bool, list[float]] = {False: [], True: []}
        for again in range(8):
            prefix = random_tokens(self.short, self.vocab_size, again)
            for cached in (False, True):
                prompt = prefix + random_tokens(20, self.vocab_size, 50 + cached)
                synchronize()
                begin = time.perf_counter()
                request = engine.submit(prompt, params, boundaries=(self.short,))
                while not request.done:
                    engine.step()
                times[cached].append((time.perf_counter() - begin) * 1e3)
                assert request.result.cached_tokens == self.short * cached, request.result.cached_tokens
        cold, warm = (statistics.median(times[cached][3:]) for cached in (False, True))
        row(f"first token, {self.short} cached tokens", warm / cold, "of cold", "0.1", warm <= cold / 10, cold_ms=cold, cached_ms=warm)
        engine.close()

    def invariant(self) -> None:
        """What ``batch_invariant`` costs a step."""
        for streams in (1, 8, self.streams):
            found = {}
            for name, options in {
                "graphs": {}, "eager": {"cuda_graphs": False}, "invariant": {"batch_invariant": True}
            }.items():  # fmt: skip
                begin = time.perf_counter()
                try:
                    engine = self.engine(streams, **options)
                except Exception as error:
                    row(f"batch_invariant, {streams} streams", None, "", "", False, error=str(error)[:300])
                    return
                made = time.perf_counter() - begin
                self.running(engine, streams)
                times, _ = self.step_times(engine, 70)
                found[name] = statistics.mean(times[:64])
                block = engine._block
                engine.close()
            ratio = found["invariant"] / found["graphs"]
            asked = self.asked["invariant"]
            row(f"batch_invariant, {streams} streams", ratio, "x", str(asked), ratio <= asked, block=block, made_s=made, **found)

    def python(self) -> None:
        """Host time of a step without the time that it waits for the device. ``engine_host.py`` has the same without a device.

        ``launch_ms``: of it, launching the graph, where the driver may wait too.
        """
        waits: list[float] = []
        launches: list[float] = []
        value, run = ToHost.value, StepGraphs.run

        def timed(function: Callable, times: list[float]) -> Callable:
            def call(*given):
                begin = time.perf_counter()
                found = function(*given)
                times.append((time.perf_counter() - begin) * 1e3)
                return found

            return call

        ToHost.value, StepGraphs.run = timed(value, waits), timed(run, launches)  # type: ignore[method-assign]
        engine = self.engine(self.streams, tokenizer=Letters(self.vocab_size))
        for name, kind in KINDS.items():
            requests = self.running(engine, self.streams, kind, sink=lambda request, event: None)
            times, works = [], []
            launches.clear()
            for _ in range(128):
                waits.clear()
                begin = time.perf_counter()
                engine.step()
                times.append((time.perf_counter() - begin) * 1e3)
                works.append(times[-1] - sum(waits))
            work = statistics.median(works)
            row(
                f"Python of a step, {self.streams} streams, {name}", work, "ms", "1.5", work <= 1.5, step_ms=statistics.median(times),
                waits_ms=statistics.median(times) - work, most_ms=max(works),
                launch_ms=statistics.median(launches or [0.0]),
            )  # fmt: skip
            for request in requests:
                engine.cancel(request)
        engine.close()
        ToHost.value, StepGraphs.run = value, run  # type: ignore[method-assign]


MEASURES = ("check", "decode", "prompts", "python", "mixed", "first_token", "invariant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=ASKED, default="rwkv6")
    parser.add_argument("--streams", type=lambda given: tuple(map(int, given.split(","))), default=(), help="of decode")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default=",".join(MEASURES))
    parser.add_argument("--seconds", type=float, default=230, help="begin no further measure after this time")
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    bench = Bench(given.model, given.tiny, given.streams)
    for name in given.only.split(","):
        if time.perf_counter() - begin > given.seconds:
            row(f"{name}: left out, no time")
            continue
        started = time.perf_counter()
        try:
            getattr(bench, name)()
        except Exception as error:
            traceback.print_exc()
            row(f"{name}: failed", error=repr(error)[-600:])
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        print(f"    ({name}: {time.perf_counter() - started:.1f} s, {time.perf_counter() - begin:.1f} s in all)", flush=True)
        if given.out:
            about = {
                "model": given.model,
                "device": torch.cuda.get_device_name() if GPU else "cpu",
                "torch": torch.__version__,
                "rows": ROWS,
            }
            with open(given.out, "w") as file:
                json.dump(about, file, indent=1)


if __name__ == "__main__":
    main()
