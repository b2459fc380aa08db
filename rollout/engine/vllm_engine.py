"""An Engine (engine.py) that is vLLM: how it is sampled from, paused, and which policy version sampled each token.

Owns: requests, version stamps, calls to the engine's ranks. Does not own the engine's processes (`vllm_process.py`),
what vLLM is told at its start (`engine_options.py`) nor the weights (`in_vllm/`, inside the engine's processes). It
and vllm_process.py use only what vLLM 0.25.1 (GPUs) and 0.32 (CPUs) have in common, and import it inside functions, so
that importing them is cheap.
Invariant: a token's stamp is the version whose weights sampled it. Why no stamp can be wrong:

    EngineCore process                       this process, one event loop
      step -> output queue --one socket-->   socket task -> outputs_queue -> [stamp with self.version] -> vLLM's handler
      pause done -> the same queue ------>   socket task -> resolves `await pause()`

    1. Weights change only between pause() and resume(), and no step runs between the two.
    2. Queue, socket and socket task keep order: when pause() returns, all earlier outputs are in outputs_queue.
    3. An output is stamped as it leaves outputs_queue, with no await in between: once that is empty, all are stamped.
    4. set_version() waits for that, and only then changes the version that new stamps get.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.conf.failures import raised_as
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Device, EvalSampling, EvalSamplingConfig, PauseMode, SamplingConfig
from slipstream.rollout.engine.engine import CALL_TIMEOUT_S, Engine
from slipstream.rollout.engine.engine_options import engine_arguments, warm_up_lengths
from slipstream.rollout.engine.vllm_process import VllmProcess, make_llm
from slipstream.rollout.errors import EngineDied, EngineError, error_class
from slipstream.rollout.in_vllm.vllm_patches import watch_outputs
from slipstream.rollout.routes import read_routes
from slipstream.rollout.text.ends import end_token_ids
from slipstream.rollout.types import ABORTED, Adapter, EngineOptions, Rollout, RoutingShape

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

ABORT_RETRY_S = 0.02
NUM_PROBE_LOGPROBS = 16
DRAIN_TIMEOUT_S = 30.0
"""Longest wait until vLLM's own handler has taken the outputs that have arrived."""


class VllmEngine(Engine):
    """See the module's docstring, and Engine for what each method promises. `seed` is of the engine's own random
    numbers: give every worker another one."""

    def __init__(
        self, options: EngineOptions, seed: int, *, make_llm: Callable[[JsonObject], AsyncLLM] = make_llm
    ) -> None:
        self._config = options.config
        self._device = options.device
        arguments = engine_arguments(options, seed)
        self.process = VllmProcess(arguments, options.device, batch_invariant=options.batch_invariant, make=make_llm)
        """The engine's, for what is known of vLLM alone."""
        self._routing = options.routing
        self._request_numbers = itertools.count()
        self._stamps: dict[str, list[int]] = {}
        self._adapters: dict[str, Adapter] = {}
        """The adapter of each request in flight that names one. All of that request's tokens get its version."""
        self._end_token_ids = end_token_ids(options.folder)
        self.version = -1
        self.num_generated_tokens = 0
        self.num_finished_responses = 0
        self.first_token_at: float | None = None

    @property
    def num_kv_blocks(self) -> int:
        return 0 if self.process.llm is None else self.process.llm.vllm_config.cache_config.num_gpu_blocks or 0

    @property
    def start_phase(self) -> str:
        return self.process.start_phase

    async def prepare(self) -> None:
        """Import vLLM."""
        await self.process.prepare()

    async def start(self) -> None:
        """With dummy weights."""
        await self.process.start()
        watch_outputs(self.process.running(), self._stamp)

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
        """Sample once at every batch size whose kernels vLLM has not compiled at its start: it runs its largest batch
        and those that it captures. The first batch of a size in between (a prefill) would wait for kernels to be
        compiled, most of a second each, and a publish that comes then for that step."""
        config: Any = self.process.running().vllm_config
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
        self.process.check()

    async def generate_group(
        self,
        prompt_token_ids: Sequence[int],
        n: int,
        sampling: SamplingConfig,
        *,
        seed: int | None = None,
        adapter: Adapter | None = None,
    ) -> list[Rollout]:
        """Each response is a request of its own, and they share the prompt's KV blocks."""
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
            final = await self.process.or_death(self._run(prompt_token_ids, params, request_id, adapter))
        except EngineDied:
            final = self.process.last_output(request_id)
            if final is None:
                raise
        finally:
            del self._stamps[request_id]
        return rollout_of(request_id, final, stamps, len(prompt_token_ids), self._routing)

    async def _run(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, adapter: Adapter | None
    ) -> Any:
        """Run one request to its end. Returns vLLM's last output."""
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        # The salt keeps requests from using prefix blocks of another version that were not dropped.
        salt = f"policy version {self.version}" if adapter is None else adapter.name
        prompt: Any = {"prompt_token_ids": list(prompt_token_ids), "cache_salt": salt}
        lora = None
        if adapter is not None:
            self._adapters[request_id] = adapter
            lora = LoRARequest(adapter.name, adapter.lora_id, "slot")  # it is loaded already: vLLM never reads the path
        what = f"a request of {len(prompt_token_ids)} prompt and at most {params.max_tokens} new tokens"
        with raised_as(EngineError, f"the engine refused or failed {what}: "):  # refusals share no base in vLLM
            try:
                final = None
                async for output in self.process.running().generate(prompt, params, request_id, lora_request=lora):
                    final = output
                return final
            except EngineDeadError as e:
                raise self.process.death() from e
            except EngineGenerateError as e:  # it has no word of its own
                raise (e.__cause__ or e) from None
            finally:
                self._adapters.pop(request_id, None)

    async def next_logprobs(self, prompt_token_ids: Sequence[int], adapter: Adapter | None) -> dict[int, float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, seed=1, logprobs=NUM_PROBE_LOGPROBS, detokenize=False)
        name = f"probe-{next(self._request_numbers)}"
        final = await self.process.or_death(self._run(prompt_token_ids, params, name, adapter))
        if final is None or not final.outputs[0].logprobs:
            raise EngineError("a probe of the engine ended without an output")
        return {token: entry.logprob for token, entry in final.outputs[0].logprobs[0].items()}

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None = None) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # of the given token alone
            flat_logprobs=True,
            skip_reading_prefix_cache=True,  # blocks that decoding filled would be returned as they are
            detokenize=False,
        )
        name = f"score-{next(self._request_numbers)}"
        final = await self.process.or_death(self._run(token_ids, params, name, adapter))
        flat = None if final is None else final.prompt_logprobs
        if flat is None or list(flat.token_ids) != list(token_ids[1:]):
            raise EngineError(f"the engine ended a prefill of {len(token_ids)} tokens without their log-probabilities")
        return list(flat.logprobs)

    async def abort_version(self, version: int) -> None:
        requests = [request for request, adapter in self._adapters.items() if adapter.version == version]
        await self.process.running().abort(requests)

    async def abort_all(self) -> None:
        """Some requests may reach vLLM only after a try."""
        while self._stamps:
            await self.process.running().abort(list(self._stamps))
            await asyncio.sleep(ABORT_RETRY_S)

    async def pause(self, mode: PauseMode, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        # AsyncLLM.pause_generation() makes this call and then sleeps for 20 ms, in the hope that outputs are handled
        # meanwhile. Here set_version() waits until they are.
        core: Any = self.process.running().engine_core
        call = core.pause_scheduler_async(
            mode=str(PauseMode.keep if mode is PauseMode.keep_kv else mode), clear_cache=False
        )
        if mode is not PauseMode.wait:
            return await self.process.in_time(call, "pause", timeout_s)
        try:
            await self.process.within(call, "pause", timeout_s)
        except TimeoutError as e:
            raise EngineError(
                f"requests in flight did not end within {timeout_s:g} s; raise weight_sync.timeout_s, or set "
                "weight_sync.pause_mode=keep"
            ) from e

    async def clear_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        call = self.process.running().reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not await self.process.in_time(call, "clear_cache", timeout_s):
            raise EngineError("the engine did not drop its KV blocks: they are of weights that are gone")

    async def resume(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        await self.process.in_time(self.process.running().resume_generation(), "resume", timeout_s)

    async def set_version(self, version: int) -> None:
        """Raises EngineError if outputs from before the pause are still unhandled after DRAIN_TIMEOUT_S."""
        core: Any = self.process.running().engine_core
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
        """As Engine.call_ranks. Also raises EngineError if the call itself failed."""
        with raised_as(EngineError, f"{method} failed inside the engine: "):
            # vLLM's own timeout is not used: the next call would take a late answer for its own.
            replies = await self.process.in_time(
                self.process.running().collective_rpc(method, args=args), method, timeout_s
            )
        for error, text, _ in replies:
            if error:
                raise error_class(error)(text)
        return [result for _, _, result in replies]

    def shutdown(self) -> None:
        self.process.shutdown()


def sampling_params(sampling: SamplingConfig, stop_token_ids: Sequence[int], seed: int | None) -> SamplingParams:
    """Ask for a response, which the model's end-of-sequence tokens (`stop_token_ids`) end if `stop_at_eos` says so. No
    seed: the engine's own stream."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    drawing = sampling.drawing if isinstance(sampling, EvalSampling) else EvalSamplingConfig()
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=drawing.top_p,
        top_k=drawing.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=[*(stop_token_ids if sampling.stop_at_eos else []), *sampling.stop_token_ids],
        ignore_eos=not sampling.stop_at_eos,
        seed=seed,
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,  # lists of numbers; a dict and an object per token make full garbage collections long
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop text may be, or contain, a special token's
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def rollout_of(
    request_id: str, final: Any, stamps: list[int], num_prompt_tokens: int, routing: RoutingShape | None
) -> Rollout:
    """A response, without text.

    Args:
        final: vLLM's last output of the request.
        stamps: The policy version of each token that the engine sampled for it.
        routing: Shape of the routes that came with it; None: none did.

    Raises EngineError if tokens, log-probabilities and stamps do not belong together, or are not finite.
    """
    if final is None or not final.outputs:
        raise EngineError(f"{request_id} ended without an output")
    (completion,) = final.outputs
    token_ids = list(completion.token_ids)
    flat = completion.logprobs
    if (flat.token_ids if flat else []) != token_ids:
        raise EngineError(f"{request_id} has log-probabilities of other tokens than it returned")
    logprobs = list(flat.logprobs) if flat else []
    was_aborted = completion.finish_reason == ABORTED
    if was_aborted or isinstance(completion.stop_reason, str):
        stamps = stamps[: len(token_ids)]  # tokens that arrived after the request was ended, here by a stop text
    if len(stamps) != len(token_ids):
        raise EngineError(f"{request_id} has {len(token_ids)} tokens and {len(stamps)} version stamps")
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(f"{request_id} has a log-probability that is not finite; are the weights finite?")
    routes = None
    if routing is not None:
        num_tokens = num_prompt_tokens + len(token_ids)
        routes = read_routes(completion.routed_experts, routing, num_tokens, was_aborted=was_aborted)
    return Rollout(token_ids, logprobs, list(stamps), "", str(completion.finish_reason), routes=routes)
