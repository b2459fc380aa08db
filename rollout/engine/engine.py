"""One vLLM engine: how it is started, sampled from, paused, and which policy version sampled each token.

Owns: requests, version stamps, calls to the engine's ranks. Uses only what vLLM 0.25.1 (GPUs) and 0.32 (CPUs) have in
common. Does not own what vLLM is told (`engine_options.py`, `vllm_requests.py`), the protocol of a publish
(`worker.py`) nor the weights (`in_vllm/`, inside the engine's processes). Imports vLLM inside functions, so that
importing this module is cheap.
Invariant: a token's stamp is the version whose weights sampled it. Why no stamp can be wrong:

    EngineCore process                       this process, one event loop
      step -> output queue --one socket-->   socket task -> outputs_queue -> [stamp with self.version] -> vLLM's handler
      pause done -> the same queue ------>   socket task -> resolves `await pause()`

    1. Weights change only between pause() and resume(), and no step runs between the two.
    2. Queue, socket and socket task keep order: when pause() returns, all earlier outputs are in outputs_queue.
    3. An output is stamped as it leaves outputs_queue, with no await in between: once that is empty, all are stamped.
    4. set_version() waits for that, and only then changes the version that new stamps get.

Processes: this one, and the EngineCore with the model in it (tp_size=1) or with tp_size workers below it. vLLM's
processes would outlive a parent that is killed. in_vllm/engine_process.py makes them end with it (`die_with_owner.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from conf.schema import Device, DType, PauseMode, RolloutConfig, SamplingConfig
from rollout.crash_reports import death_of_a_child, how_it_ended
from rollout.die_with_owner import OWNER_VARIABLE
from rollout.engine.engine_options import (
    METHOD_VARIABLE,
    SOCKETS_VARIABLE,
    architectures_of,
    engine_arguments,
    set_engine_environment,
    warm_up_lengths,
)
from rollout.engine.same_path import same_path
from rollout.engine.start_failure import OutputSince, why_it_failed
from rollout.engine.start_phase import IMPORTING, phase_in
from rollout.engine.vllm_requests import (
    next_logprobs_of,
    prefill_params,
    probe_params,
    prompt_logprobs_of,
    rollout_of,
    sampling_params,
)
from rollout.errors import EngineDied, EngineError, error_class
from rollout.in_vllm.process_imports import ask_classes_here, has_opened_gpu, import_vllm, without_torchao
from rollout.in_vllm.vllm_patches import stop_watching, watch_outputs
from rollout.text.ends import end_token_ids
from rollout.types import Adapter, AdapterSlotsSpec, Rollout, RoutingShape

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")
CALL_TIMEOUT_S = 1800.0
"""Longest that a call to the engine may take if the caller sets no deadline; recording a large model takes minutes."""
WAIT_LOG_S = 30.0
LOOK_EVERY_S = 1.0
"""Pause between two looks at whether the engine still runs, while a call is under way."""
SHUTDOWN_TIMEOUT_S = 1.0
"""How long the engine's processes get to end after SIGTERM. They hold nothing that must be saved."""
DRAIN_TIMEOUT_S = 30.0
"""Longest wait until vLLM's own handler has taken the outputs that have arrived."""


def vllm_arguments(arguments: dict[str, Any]) -> AsyncEngineArgs:
    """Arguments in vLLM's class.

    Raises:
        EngineError: This vLLM does not know an argument.
    """
    import_vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs

    unknown = set(arguments) - {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown:
        raise EngineError(
            f"this vLLM does not know the engine arguments {', '.join(sorted(unknown))}; "
            "supported releases are 0.25.1 and 0.32.0"
        )
    if arguments["load_format"] == "dummy":
        arguments = {**arguments, "model": str(same_path(Path(arguments["model"])))}
    return AsyncEngineArgs(**arguments)


def make_llm(arguments: dict[str, Any]) -> AsyncLLM:
    """vLLM's engine, started. Its processes are forked from this one, which has imported vLLM, unless it has used a GPU
    or METHOD_VARIABLE says otherwise. Raises: see vllm_arguments().
    """
    given = os.environ.get(METHOD_VARIABLE)
    chosen = vllm_arguments(arguments)
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    with without_torchao():
        ask_classes_here(architectures_of(Path(arguments["model"])))
        config = chosen.create_engine_config(UsageContext.ENGINE_CONTEXT)
        os.environ[METHOD_VARIABLE] = given or ("spawn" if has_opened_gpu() else "fork")  # for CPUs, vLLM has set spawn
        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=chosen.disable_log_stats)
        finally:
            del os.environ[METHOD_VARIABLE]
            if given is not None:
                os.environ[METHOD_VARIABLE] = given


def gpu_bytes() -> int:
    """Memory of this process's GPU, by the driver's management library: no GPU is opened."""
    import_vllm()
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


class Engine:
    """See the module's docstring. All methods belong to one event loop.

    Args:
        folder: config.json (and generation_config.json) of the model; weights are not read.
        config: Sizes and parallelism.
        dtype: Format of weights and activations.
        device: cpu or cuda; the caller has resolved `auto`.
        seed: Seed of the engine's own random numbers; give every worker another one.
        adapters: Slots for adapters; None: requests use no adapters.
        routing: Shape of the model's routing, to record routes; None: rollouts carry none.
        batch_invariant: Take kernels whose results for a token do not depend on the batch that it is in.
        make_llm: Called with the arguments of AsyncEngineArgs.
    """

    def __init__(
        self,
        folder: Path,
        config: RolloutConfig,
        *,
        dtype: DType,
        device: Device,
        seed: int,
        adapters: AdapterSlotsSpec | None = None,
        routing: RoutingShape | None = None,
        batch_invariant: bool = False,
        make_llm: Callable[[dict[str, Any]], AsyncLLM] = make_llm,
    ) -> None:
        self._folder = folder
        self._config = config
        self._device = device
        self._arguments = engine_arguments(
            folder,
            config,
            dtype=dtype,
            device=device,
            seed=seed,
            adapters=adapters,
            records_routes=routing is not None,
            batch_invariant=batch_invariant,
        )
        self._batch_invariant = batch_invariant
        self._routing = routing
        self._make_llm = make_llm
        self._llm: AsyncLLM | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        """Folder for the sockets between vLLM's processes. vLLM does not remove them, and would leave them in /tmp."""
        self._output: OutputSince | None = None
        """What the engine's processes have written since they were started."""
        self._request_numbers = itertools.count()
        self._stamps: dict[str, list[int]] = {}
        self._adapters: dict[str, Adapter] = {}
        """The adapter of each request in flight that names one. All of that request's tokens get its version."""
        self._end_token_ids = end_token_ids(folder)
        self._processes: list[BaseProcess] = []
        """The engine's, of those that this one has started."""
        self._hangs = False
        """Whether a call passed its deadline. From then on it is unknown what the engine's ranks hold."""
        self.version = -1
        """Policy version that stamps new tokens; -1 while the weights are dummies."""
        self.num_generated_tokens = 0
        """Tokens since the start, including those of unfinished responses."""
        self.num_finished_responses = 0
        """Responses that have ended since the start."""
        self.first_token_at: float | None = None
        """When the first of them came, in seconds since 1970."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine's process runs and answers, and its outputs are handled."""
        return self._llm is not None and not self._llm.errored and not self._hangs

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the KV cache; 0 while the engine is down."""
        return 0 if self._llm is None else self._llm.vllm_config.cache_config.num_gpu_blocks or 0

    @property
    def start_phase(self) -> str:
        """What start() is doing."""
        return IMPORTING if self._output is None else phase_in(self._output.read())

    async def prepare(self) -> None:
        """Do the part of start() that needs no device, which may still be another engine's: import vLLM."""
        self._begin()
        await asyncio.to_thread(import_vllm)

    async def start(self) -> None:
        """Start the engine's processes and wait until it could serve (with dummy weights).

        Raises:
            EngineError: vLLM refused an argument or failed to come up.
        """
        self._begin()
        # In a thread, so that the event loop goes on, and vLLM's output handler starts only after watch_outputs().
        self._llm = await asyncio.to_thread(self._build)
        watch_outputs(self._llm, self._stamp)

    def _begin(self) -> None:
        set_engine_environment(self._device, batch_invariant=self._batch_invariant)
        os.environ[OWNER_VARIABLE] = str(os.getpid())

    def _build(self) -> AsyncLLM:
        own = SOCKETS_VARIABLE not in os.environ
        if own:
            self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
            os.environ[SOCKETS_VARIABLE] = self._sockets.name
        self._output = output = OutputSince()
        others = multiprocessing.active_children()
        try:
            llm = self._make_llm(self._arguments)
            self._processes = [child for child in multiprocessing.active_children() if child not in others]
            return llm
        except Exception as e:  # the edge to vLLM: pydantic, ValueError, RuntimeError, EngineDeadError
            self._drop_sockets()
            if isinstance(e, EngineError):
                raise
            raise EngineError(f"the engine did not start: {why_it_failed(e, output.read())}") from e
        finally:
            if own:  # the next engine of this process makes a folder of its own
                del os.environ[SOCKETS_VARIABLE]

    def _stamp(self, output: Any) -> None:
        """Note the current version for each token of an output that leaves the queue (step 3 of the proof)."""
        request_id, _, _ = output.request_id.rpartition("-")  # vLLM appends 8 random characters
        if request_id in self._stamps:
            adapter = self._adapters.get(request_id)
            version = self.version if adapter is None else adapter.version
            self._stamps[request_id].extend([version] * len(output.new_token_ids))
            if self.first_token_at is None and output.new_token_ids:
                self.first_token_at = time.time()
            self.num_generated_tokens += len(output.new_token_ids)
            self.num_finished_responses += output.finish_reason is not None

    async def warm_up(self, adapter: Adapter | None = None) -> None:
        """Sample once at every batch size whose kernels vLLM has not compiled at its start; with an adapter, if given.

        vLLM itself runs its largest batch and those that it captures. The first batch of a size in between (a prefill)
        waits for kernels to be compiled, most of a second each, and a publish that comes then waits for that step.
        """
        config: Any = self._running().vllm_config
        if self._device is not Device.cuda:
            return
        lengths = warm_up_lengths(
            config.compilation_config.max_cudagraph_capture_size or 0,
            min(config.scheduler_config.max_num_batched_tokens, self._config.max_model_len - 1),
        )
        sampling = SamplingConfig(max_tokens=1, stop_at_eos=False)
        num_tokens = config.model_config.get_vocab_size()
        for length in lengths:
            # No two prompts share a first block, because a shared one would not be computed again.
            prompt = [(length + index) % num_tokens for index in range(length)]
            try:
                await self.generate_group(prompt, 1, sampling, adapter=adapter)
            except EngineDied:
                raise
            except EngineError as e:  # dummy weights may give any output; the kernels have run
                logger.info("the warm-up at %d tokens returned no sample: %s", length, e)
        self.num_generated_tokens, self.num_finished_responses, self.first_token_at = 0, 0, None

    def check(self) -> None:
        """Raise EngineDied if one of the engine's processes has ended, or a call was left unanswered."""
        if self._llm is not None and any(process.exitcode is not None for process in self._processes):
            raise self._death()
        self._running()

    async def generate_group(
        self,
        prompt_token_ids: Sequence[int],
        n: int,
        sampling: SamplingConfig,
        *,
        seed: int | None = None,
        adapter: Adapter | None = None,
    ) -> list[Rollout]:
        """Sample `n` responses to one prompt. Their `text` is empty: the engine has no tokenizer.

        Args:
            prompt_token_ids: The prompt.
            n: Number of responses; each is a request of its own, and they share the prompt's KV blocks.
            sampling: Temperature, bounds and end of a response.
            seed: The first response's seed; the others' follow it. None: the engine's own stream (much faster on GPUs).
            adapter: Applied to all of them, from first token to last. The caller holds a lease on its slot.

        Returns:
            Rollouts in order; finish_reason is "stop", "length", or ABORTED if a pause or abort_version() ended the
            request.

        Raises:
            EngineDied: The process is gone.
            EngineError: vLLM refused the request or answered inconsistently.
        """
        seeds = [None if seed is None else seed + index for index in range(n)]
        tasks = [asyncio.create_task(self._generate(prompt_token_ids, sampling, own, adapter)) for own in seeds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one failed, or the caller gave up: end the others inside the engine, too
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingConfig, seed: int | None, adapter: Adapter | None
    ) -> Rollout:
        params = sampling_params(sampling, self._end_token_ids, seed)
        request_id = f"rollout-{next(self._request_numbers)}"
        stamps = self._stamps[request_id] = []
        try:
            final = await self._run(prompt_token_ids, params, request_id, adapter)
        finally:
            del self._stamps[request_id]
        return rollout_of(request_id, final, stamps, len(prompt_token_ids), self._routing)

    async def _run(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, adapter: Adapter | None
    ) -> Any:
        """Run one request to its end. Returns vLLM's last output."""
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        # The salt keeps requests from using prefix blocks of another version that were not dropped.
        salt = f"policy version {self.version}" if adapter is None else adapter.name
        prompt: Any = {"prompt_token_ids": list(prompt_token_ids), "cache_salt": salt}
        lora = None
        if adapter is not None:
            self._adapters[request_id] = adapter
            lora = LoRARequest(adapter.name, adapter.lora_id, "slot")  # it is loaded already: vLLM never reads the path
        try:
            final = None
            async for output in self._running().generate(prompt, params, request_id, lora_request=lora):
                final = output
            return final
        except EngineDeadError as e:
            raise self._death() from e
        except EngineError:
            raise
        except Exception as e:  # the edge to vLLM, whose refusals share no base between releases
            what = f"a request of {len(prompt_token_ids)} prompt and at most {params.max_tokens} new tokens"
            raise EngineError(f"the engine refused or failed {what}: {type(e).__name__}: {e}") from e
        finally:
            self._adapters.pop(request_id, None)

    async def next_logprobs(self, prompt_token_ids: Sequence[int], adapter: Adapter | None) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens, and of the one that was sampled."""
        name = f"probe-{next(self._request_numbers)}"
        return next_logprobs_of(await self._run(prompt_token_ids, probe_params(), name, adapter))

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None = None) -> list[float]:
        """Log-probability of every token but the first, at temperature 1, from one prefill of the whole sequence.

        Args:
            token_ids: At least two, and fewer than rollout.max_model_len.
            adapter: Applied to all of them. The caller holds a lease on its slot.

        Raises:
            EngineDied: The process is gone.
            EngineError: vLLM refused the request, or it was ended before its prefill was complete.
        """
        name = f"score-{next(self._request_numbers)}"
        return prompt_logprobs_of(await self._run(token_ids, prefill_params(), name, adapter), token_ids)

    async def abort_version(self, version: int) -> None:
        """End the requests in flight that use this version's adapter. Each returns what it has so far, as ABORTED."""
        requests = [request for request, adapter in self._adapters.items() if adapter.version == version]
        await self._running().abort(requests)

    async def pause(self, mode: PauseMode, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Stop stepping. When this returns the device is idle and new requests queue up until resume().

        Args:
            mode: keep and keep_kv freeze requests in flight; wait lets them finish; abort ends them.
            timeout_s: Longest wait for the step in flight; with `wait`, for the requests.

        Raises:
            EngineDied: The step took longer.
            EngineError: Requests took longer. They go on, and a later pause() waits for the rest of them.
        """
        # AsyncLLM.pause_generation() makes this call and then sleeps for 20 ms, in the hope that outputs are handled
        # meanwhile. Here set_version() waits until they are.
        core: Any = self._running().engine_core
        call = core.pause_scheduler_async(
            mode=str(PauseMode.keep if mode is PauseMode.keep_kv else mode), clear_cache=False
        )
        if mode is not PauseMode.wait:
            return await self._in_time(call, "pause", timeout_s)
        try:
            await self._within(call, "pause", timeout_s)
        except TimeoutError as e:
            raise EngineError(
                f"requests in flight did not end within {timeout_s:g} s; raise weight_sync.timeout_s, or set "
                "weight_sync.pause_mode=keep"
            ) from e

    async def clear_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Drop all KV blocks. Requests that pause() froze are prefilled again, with the weights that resume() finds."""
        call = self._running().reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not await self._in_time(call, "clear_cache", timeout_s):
            raise EngineError("the engine did not drop its KV blocks: they are of weights that are gone")

    async def resume(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Go on with requests in flight and queued ones."""
        await self._in_time(self._running().resume_generation(), "resume", timeout_s)

    async def set_version(self, version: int) -> None:
        """Stamp tokens with `version` from now on. Only between pause() and resume().

        Raises:
            EngineError: Outputs from before the pause are still unhandled after DRAIN_TIMEOUT_S.
        """
        core: Any = self._running().engine_core
        outputs = core.outputs_queue
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while not outputs.empty():
                    await asyncio.sleep(0)
        except TimeoutError as e:
            raise EngineError(
                f"{outputs.qsize()} outputs of version {self.version} were not handled within {DRAIN_TIMEOUT_S:g} s"
            ) from e
        self.version = version

    async def call_ranks(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Call a method of the worker extension on every rank of the engine.

        Args:
            method: A method of WeightReceiver.
            args: Plain values and bytes.
            timeout_s: Longest that all ranks together may take.

        Returns:
            Results by rank.

        Raises:
            SlipstreamError: The first rank's error, as its own class.
            EngineDied: A rank did not answer in time; the engine takes no further calls.
            EngineError: The call itself failed.
        """
        try:
            # vLLM's own timeout is not used: the next call would take a late answer for its own.
            replies = await self._in_time(self._running().collective_rpc(method, args=args), method, timeout_s)
        except EngineError:
            raise
        except Exception as e:  # the edge to vLLM
            raise EngineError(f"{method} failed inside the engine: {type(e).__name__}: {e}") from e
        for error, text, _ in replies:
            if error:
                raise error_class(error)(text)
        return [result for _, _, result in replies]

    async def _in_time(self, call: Awaitable[T], what: str, timeout_s: float) -> T:
        """The call's result. If it does not come in time, the engine takes no further calls."""
        try:
            return await self._within(call, what, timeout_s)
        except TimeoutError as e:
            self._hangs = True
            raise EngineDied(
                f"the engine did not answer {what} within {timeout_s:g} s: a rank of it hangs; this rollout worker must"
                " be restarted"
            ) from e

    async def _within(self, call: Awaitable[T], what: str, timeout_s: float) -> T:
        """Return the call's result, or raise TimeoutError. Logs every WAIT_LOG_S what it waits for.

        Raises:
            EngineDied: The engine died meanwhile; vLLM leaves calls under way unanswered then.
        """
        task, began, logged_s = asyncio.ensure_future(call), time.monotonic(), 0.0
        try:
            while (left_s := began + timeout_s - time.monotonic()) > 0:
                done, _ = await asyncio.wait([task], timeout=min(LOOK_EVERY_S, left_s))
                if done:
                    return task.result()
                self._running()
                waited_s = time.monotonic() - began
                if waited_s - logged_s >= WAIT_LOG_S:
                    logged_s = waited_s
                    logger.warning("waited %.0f s of at most %g s for the engine's %s", waited_s, timeout_s, what)
        finally:
            task.cancel()
        raise TimeoutError

    def _death(self) -> EngineDied:
        """The engine's process is gone: how, where that is known."""
        codes = [code for process in self._processes if (code := process.exitcode) is not None]
        how = death_of_a_child() or (how_it_ended(codes[0]) if codes else "died")
        return EngineDied(f"the engine's process {how}; this rollout worker must be restarted")

    def shutdown(self) -> None:
        """End the engine's processes. Idempotent."""
        if self._llm is not None:
            stop_watching(self._llm)
            self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
            self._llm = None
            self._drop_sockets()

    def _drop_sockets(self) -> None:
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the engine is not running")
        if self._llm.errored:
            raise self._death()
        if self._hangs:
            raise EngineDied("the engine left a call unanswered; this rollout worker must be restarted")
        return self._llm
