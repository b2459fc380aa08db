"""A run that is taught by given answers or preferences: the trainer alone, and what it reads.

Owns: the order of its start. Does not own: the loop (loop/finetuner.py), Ray and the run's lock (run.py, the caller).
"""

import asyncio
import contextlib

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.run_checkpoint import checkpoints_of, step_of
from slipstream.orchestrator.control.run_state import note_started
from slipstream.orchestrator.data.training_stream import held_out_items, training_stream
from slipstream.orchestrator.files.held_out import TAUGHT_FIGURES
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import RunLog
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.orchestrator.inputs.rows.prompt_rows import lesson_reader
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.orchestrator.loop.finetuner import Finetuner
from slipstream.orchestrator.loop.ports import TaughtServices
from slipstream.orchestrator.run_parts import Ray, RunResult, begin_start, draw, export_policy, open_telemetry


async def finetune(config: RunConfig, folder: RunFolder, log: RunLog, ray: Ray) -> RunResult:
    """The trainer alone, taught by given answers (orchestrator.loop.finetuner)."""
    from slipstream.orchestrator.cluster.placement import Cluster  # imports Ray

    model = prepare_model(config.model, folder.model, folder.began)
    encoder = TextEncoder(folder.model)
    read = lesson_reader(config, encoder)
    lessons = training_stream(config.data, read, seed=config.run.seed)
    held_out = {name: items.found for name, items in held_out_items(config.data, read).items()}
    checkpoints = checkpoints_of(config, folder)
    resume_from = await asyncio.to_thread(checkpoints.to_resume, config.run.resume)
    if resume_from is not None:  # rows that have changed are refused before all starts
        lessons.load_state_dict(checkpoints.prompts_of(resume_from))
    async with contextlib.AsyncExitStack() as stack:
        progress, startup = await begin_start(stack, folder, log, checkpoints)
        cluster = await stack.enter_async_context(Cluster(config, folder, startup, ray.own))
        await stack.enter_async_context(startup)  # left before the cluster: a start that fails is over then
        await cluster.start(model.hf_config)
        startup.end()
        note_started(folder)
        telemetry = stack.enter_context(open_telemetry(config, folder, progress, step_of(resume_from)))
        stack.callback(progress.say, "ending the run's processes")
        services = TaughtServices(
            trainer=cluster.trainer,
            lessons=lessons,
            held_out=held_out,
            telemetry=telemetry,
            checkpoints=checkpoints,
            on_clock=log.context.set,
        )
        tuner = Finetuner(config, services)
        await tuner.train(resume_from)
        export = await export_policy(cluster.trainer, config, folder)
        drawing = asyncio.create_task(draw(config, folder))  # while the processes end
    await drawing
    objective = config.algorithm.objective
    return RunResult(
        folder,
        tuner.step,
        tuner.policy_version,
        TAUGHT_FIGURES[objective][0][0],
        tuner.held_out_figure,
        checkpoints.newest(),
        export,
    )
