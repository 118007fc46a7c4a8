"""Threads, tasks, cancellation, memory, and the life of shared weights."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from tiny_models import noisy_copy, random_prompts, tiny_llama, tiny_tokenizer

from fly_llm import EngineClosedError, FLyEngine, FLyError, ModelLoadError
from fly_llm.models import registry

PROMPTS = [prompt * 2 for prompt in random_prompts(16, 8)]
OPTIONS = [{}, {"lossless": True}, {"temperature": 0.8, "seed": 3}, {"window": 1, "theta": 0.0}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = tiny_llama()
    for name, model in (("target", target), ("draft", noisy_copy(target))):
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return root / "target", root / "draft"


@pytest.fixture
def engine(folders):
    with FLyEngine.from_pretrained(*folders, max_tokens=40) as engine:
        yield engine


class Forwards:
    """Counts target forwards, and can make each of them slow."""

    def __init__(self, engine, delay=0.0):
        self.count = 0
        self.delay = delay
        model = engine.load()._handle.models.pair().target.model
        self._hook = model.register_forward_pre_hook(self._tick)

    def _tick(self, *_):
        self.count += 1
        time.sleep(self.delay)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_sixteen_threads_give_what_sixteen_calls_give(engine):
    def answer(i):
        result = engine.generate(PROMPTS[i], **OPTIONS[i % 4])
        return result.text, result.token_ids, result.relaxed, result.usage

    expected = [answer(i) for i in range(16)]
    assert len({row[0] for row in expected}) == 16
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(answer, range(16))) == expected


def test_tokens_are_counted_in_many_threads_while_answers_are_written(engine):
    """Encoding messages sets switches on a fast tokenizer ("Already borrowed"): nobody shares one."""
    messages = [{"role": "user", "content": "the <|im_end|> quick brown fox " * 20}]
    expected = engine.count_tokens(messages), engine.generate(messages, max_tokens=60, lossless=True).text
    tokenizer = engine.tokenizer
    assert tokenizer is not engine._handle.models.pair().target.tokenizer

    def count(_):
        return [engine.count_tokens(messages) for _ in range(30)]

    with ThreadPoolExecutor(8) as pool:
        counts = pool.map(count, range(8))
        texts = [engine.generate(messages, max_tokens=60, lossless=True).text for _ in range(4)]
        assert set(texts) == {expected[1]}
        assert {n for row in counts for n in row} == {expected[0]}


def test_two_streams_in_one_thread_take_turns(engine):
    expected = [engine.generate(prompt).text for prompt in PROMPTS[:2]]
    first, second = (engine.stream(prompt) for prompt in PROMPTS[:2])
    texts = ["", ""]
    for a, b in zip(first, second, strict=False):
        texts[0] += a.text
        texts[1] += b.text
    texts[0] += "".join(event.text for event in first)
    texts[1] += "".join(event.text for event in second)
    assert texts == expected


def test_a_stream_nobody_reads_blocks_nobody(engine):
    unread = engine.stream(PROMPTS[0])
    assert engine.generate(PROMPTS[1]).text
    assert unread.result().text == engine.generate(PROMPTS[0]).text


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_cancelling_a_stream_frees_the_engine_within_one_forward(engine, how):
    with Forwards(engine, delay=0.02) as forwards:
        stream = engine.stream(PROMPTS[0], num_speculative_tokens=0, max_tokens=400)
        next(stream)
        seen = forwards.count
        if how == "close":
            stream.close()
            assert list(stream) == []
        elif how == "with":
            with stream:
                pass
        else:
            del stream
            gc.collect()
        start = time.perf_counter()
        engine.generate(PROMPTS[1], num_speculative_tokens=0, max_tokens=1)
        waited = time.perf_counter() - start
        assert forwards.count - seen <= 2 + 2  # the one running, one that began meanwhile; prefill and one token
        assert waited < 0.5


def test_cancelling_reaches_prefill_and_drafting(engine):
    with Forwards(engine, delay=0.01) as forwards:
        stream = engine.stream((PROMPTS[0] * 32)[:500])
        wait_until(lambda: forwards.count >= 1)
        stream.close()
        time.sleep(0.1)
        assert forwards.count <= 2
    with pytest.raises(FLyError, match="closed before its end"):
        stream.result()


def test_a_queued_request_that_is_cancelled_never_runs(engine):
    with Forwards(engine, delay=0.01) as forwards:
        running = engine.stream(PROMPTS[0], num_speculative_tokens=0, max_tokens=20)
        queued = engine.stream(PROMPTS[1], num_speculative_tokens=0, max_tokens=20)
        queued.close()
        running.result()
        engine.generate(PROMPTS[2], max_tokens=1)
        assert forwards.count <= 21 + 2


def test_async_answers_equal_sync_ones_and_the_loop_goes_on(engine):
    expected = [engine.generate(prompt, lossless=True).text for prompt in PROMPTS[:4]]

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(tick())
        with Forwards(engine, delay=0.01):
            results = await asyncio.gather(*(engine.agenerate(prompt, lossless=True) for prompt in PROMPTS[:4]))
            streamed = "".join([event.text async for event in engine.astream(PROMPTS[0], lossless=True)])
        ticker.cancel()
        return [result.text for result in results], streamed, ticks

    start = time.perf_counter()
    texts, streamed, ticks = asyncio.run(main())
    assert (texts, streamed) == (expected, expected[0])
    assert ticks > (time.perf_counter() - start) / 0.005 * 0.4


@pytest.mark.parametrize("kind", ["task", "timeout", "break"])
def test_cancelling_a_task_stops_compute_within_one_forward(engine, kind):
    async def main(forwards):
        if kind == "break":
            events = engine.astream(PROMPTS[0], num_speculative_tokens=0, max_tokens=400)
            async for _ in events:
                break
            await events.aclose()
        elif kind == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await engine.agenerate(PROMPTS[0], num_speculative_tokens=0, max_tokens=400)
        else:
            task = asyncio.create_task(engine.agenerate(PROMPTS[0], num_speculative_tokens=0, max_tokens=400))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        seen = forwards.count
        await asyncio.sleep(0.15)
        return forwards.count - seen

    with Forwards(engine, delay=0.01) as forwards:
        assert asyncio.run(main(forwards)) <= 1
        assert forwards.count < 100


def test_an_event_loop_that_is_gone_cancels_its_request(engine):
    with Forwards(engine, delay=0.01) as forwards:
        loop = asyncio.new_event_loop()
        events = engine.astream(PROMPTS[0], num_speculative_tokens=0, max_tokens=400)
        loop.run_until_complete(events.__anext__())
        loop.close()
        time.sleep(0.1)
        seen = forwards.count
        time.sleep(0.1)
        assert forwards.count == seen < 100
        del events


def test_an_error_ends_its_own_request_only(engine):
    model = engine.load()._handle.models.pair().target.model
    hook = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of luck")))
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.generate(PROMPTS[0])
    hook.remove()
    assert engine.generate(PROMPTS[0]).text


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("kept", [0, 300_000], ids=["no-caches-kept", "300-kB-of-caches-kept"])
def test_memory_stays_flat_between_calls_50_and_200(engine, kept):
    process = psutil.Process()
    marks = {}
    for i in range(1, 201):
        options = {**OPTIONS[i % 4], "prefix_cache_bytes": kept}
        if i % 3:
            engine.generate(PROMPTS[i % 16], max_tokens=12, **options)
        else:
            with engine.stream(PROMPTS[i % 16], max_tokens=12, **options) as stream:
                next(stream)
            # so that the cancelled one has ended
            engine.generate(PROMPTS[0], max_tokens=1, prefix_cache_bytes=kept)
        if i in (50, 200):
            settled = threading.Event()
            engine._handle.models.submit(settled.set)
            assert settled.wait(10)
            marks[i] = (process.memory_info().rss, live_tensors())
    assert marks[200][0] - marks[50][0] < 20e6
    prefixes = engine._handle.models.pair().prefixes
    assert prefixes.nbytes <= kept
    assert (len(prefixes) > 1) == (kept > 0)
    assert abs(marks[200][1] - marks[50][1]) <= (60 if kept else 0)


def test_making_an_engine_takes_milliseconds_and_loads_nothing(folders):
    FLyEngine.from_pretrained("no/such-model").close()  # imports done
    start = time.perf_counter()
    engines = [FLyEngine.from_pretrained(*folders) for _ in range(20)]
    assert (time.perf_counter() - start) / 20 < 0.01
    assert not engines[0]._handle.models.is_loaded
    for engine in engines:
        engine.close()


def test_two_users_share_weights_which_go_with_the_last(folders):
    first = FLyEngine.from_pretrained(*folders, theta=0.1).load()
    second = FLyEngine.from_pretrained(*folders, theta=0.9, max_tokens=5)
    other = FLyEngine.from_pretrained(folders[0])
    assert second._handle.models is first._handle.models is not other._handle.models
    model = weakref.ref(first._handle.models.pair().target.model)
    assert second.generate(PROMPTS[0]).settings["theta"] == 0.9
    first.close()
    first.close()
    gc.collect()
    assert model() is not None
    assert second.generate(PROMPTS[0]).text
    second.close()
    wait_until(lambda: gc.collect() is not None and model() is None)
    for call in (lambda: second.generate("x"), lambda: second.stream("x"), second.load):
        with pytest.raises(EngineClosedError, match="has been closed"):
            call()
    other.close()


def test_a_dropped_engine_releases_its_weights(folders):
    engine = FLyEngine.from_pretrained(*folders).load()
    model = weakref.ref(engine._handle.models.pair().target.model)
    before = len(registry._shared)
    del engine
    wait_until(lambda: gc.collect() is not None and model() is None)
    assert len(registry._shared) == before - 1


def test_closing_does_not_cut_off_a_running_answer(folders):
    engine = FLyEngine.from_pretrained(*folders, max_tokens=40)
    expected = engine.generate(PROMPTS[0]).text
    stream = engine.stream(PROMPTS[0])
    next(stream)
    engine.close()
    assert stream.result().text == expected


def test_a_model_that_failed_to_load_is_tried_again(tmp_path, folders):
    folder = tmp_path / "late"
    with FLyEngine.from_pretrained(folder, max_tokens=4) as engine:
        with pytest.raises(ModelLoadError, match="does not exist"):
            engine.generate("hello")
        folder.symlink_to(folders[0])
        assert engine.generate("hello").token_ids


def test_engines_pickle_by_name_and_live_ones_say_why_not(engine, folders):
    for other in (pickle.loads(pickle.dumps(engine)), copy.deepcopy(engine)):
        assert other._handle.models is engine._handle.models
        assert other.generate(PROMPTS[0]).text == engine.generate(PROMPTS[0]).text
        other.close()
    live = FLyEngine.from_pretrained(tiny_llama(), tokenizer=tiny_tokenizer())
    with pytest.raises(TypeError, match="made from loaded objects cannot be pickled"):
        pickle.dumps(live)


def test_many_engines_from_many_threads_load_once(folders, monkeypatch):
    loads = []
    original = registry.ModelSpec.load
    monkeypatch.setattr(registry.ModelSpec, "load", lambda spec: loads.append(spec) or original(spec))
    barrier = threading.Barrier(8)

    def use(_):
        barrier.wait()
        with FLyEngine.from_pretrained(*folders, max_tokens=4) as engine:
            text = engine.generate(PROMPTS[0]).text
            barrier.wait()  # nobody closes before everybody has answered
            return text

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(use, range(8)))) == 1
    assert len(loads) == 2  # target and draft


@pytest.mark.parametrize(
    "end", ["", "stream.close()", "engine.close()", "stream.close(); engine.close()", "del engine"]
)
def test_the_process_ends_cleanly_while_an_answer_is_running(folders, end):
    code = f"""
from fly_llm import FLyEngine
engine = FLyEngine.from_pretrained({str(folders[0])!r}, ignore_eos=True)
stream = engine.stream([5, 6, 7], num_speculative_tokens=0, max_tokens=500)
print(len(next(stream).token_ids))
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_a_forked_process_is_told_so(engine):
    """The worker thread does not survive a fork: an error, not a wait for ever."""
    import multiprocessing

    engine.generate(PROMPTS[0], max_tokens=2)
    pipe, end = multiprocessing.Pipe()

    def child():
        try:
            engine.generate(PROMPTS[0], max_tokens=2)
        except FLyError as error:
            end.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert pipe.poll(20)
    assert "forked" in pipe.recv()
    process.join(20)
    assert process.exitcode == 0


def test_a_request_that_starts_after_the_end_is_refused(folders):
    engine = FLyEngine.from_pretrained(*folders, max_tokens=4)
    late = engine.astream(PROMPTS[0])
    engine.close()

    async def read():
        return [event async for event in late]

    with pytest.raises(EngineClosedError, match="has been closed"):
        asyncio.run(read())


def test_a_kept_exception_keeps_no_models(folders):
    engine = FLyEngine.from_pretrained(*folders).load()
    target = engine._handle.models.pair().target.model
    reference = weakref.ref(target)
    target.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of luck")))
    del target
    with pytest.raises(RuntimeError, match="out of luck") as kept:
        engine.generate(PROMPTS[0])
    engine.close()
    del engine
    wait_until(lambda: gc.collect() is not None and reference() is None)
    assert "in advance" in kept.value.__notes__[0]  # where it came from is still said


def test_two_readers_of_one_stream_both_end(engine):
    stream = engine.stream(PROMPTS[0])
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda _: len(list(stream)), range(2), timeout=20))
    assert sum(counts) > 2


def test_messages_changed_after_the_call_do_not_change_the_request(engine):
    messages = [{"role": "user", "content": "the dog"}]
    with Forwards(engine, delay=0.01):
        first = engine.stream(PROMPTS[0], max_tokens=10)
        second = engine.stream(messages, max_tokens=2)
        messages[0]["content"] = "the dog and the fox " * 10
        first.result()
        assert second.result().usage.prompt_tokens < 20
