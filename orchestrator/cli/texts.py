"""What `--help` says of each command: what it is for, with examples.

    usage

    meaning, examples
    {flags}
    exit code

Owns: words on the screen. Does not own: flags and their defaults (flags.py), options and presets (option_help.py).
"""

TOP = """\
usage: slipstream COMMAND ...

Trains mixture-of-experts language models by reinforcement learning, the trainer and the rollout engines apart, and
carries the policy's new weights from one to the other after every step.

commands
  train     start a run; its options are the words that follow
  resume    go on with a run that ended, from its newest checkpoint
  eval      evaluate a run's checkpoint, an adapter or a model; makes no step
  merge     write the model of a run's checkpoint, its adapter merged in, as a Hugging Face folder
  stop      let a run finish its step, save its state and end
  launch    write a job for SLURM, KubeRay or SkyPilot that starts a run; starts nothing
  plan      say what a publish of a run would move, hold and take, on any cluster; starts nothing
  parity    say how well trainer and engine agree about a model, and at which operation they part
  push      bring a checkpoint on disk into vLLM engines, started here or running
  record    write down how an engine lays out a model; needs no GPU and no weights
  doctor    look at this machine: versions, devices and links, limits, ports
  view      show runs as a page in the browser: curves, timelines, fleet, responses token by token
  status    say where a run stands: its step, its last figures, its last warnings
  recover   restart a rollout worker of a run that goes on
  scale     have more or fewer rollout workers in a run that goes on
  drain     let one rollout worker of a run that goes on hand its requests over, and end it
  chaos     harm a run that goes on, on purpose, and say what that cost

start here
  slipstream doctor
  slipstream train experiment=quickstart      a whole run on this machine in minutes, no GPU
  slipstream train --help                     what can be set, and how

  slipstream help COMMAND                     what a command does, with examples, flags and exit codes
  slipstream --version"""

TRAIN = """\
slipstream train [GROUP=CHOICE ...] [SECTION.OPTION=VALUE ...] [--cfg job | --dry-run] [--config-dir DIR]

examples
  slipstream train experiment=quickstart
      a tiny random model learns a small task; trainer ranks, engines and weight sync are the real ones
  slipstream train experiment=quickstart trainer=full trainer.optim.lr=3e-3
      the same with another preset of one section, and one option changed
  slipstream train model=checkpoint model.path=/models/Qwen3-30B-A3B data=files data.path=prompts.jsonl
      your own model and prompts
  slipstream train algorithm=sft model=checkpoint model.path=/models/Qwen3-30B-A3B data=files data.path=talks.jsonl
      the trainer alone, taught by conversations: {"messages": [{"role": ..., "content": ...}, ...]} a line
  slipstream train experiment=mine --config-dir ~/slipstream
      options kept in a file, ~/slipstream/experiment/mine.yaml, whose first line is `# @package _global_`; below it,
      as in conf/experiment/: sections with their options (trainer: {ep_size: 8}), and defaults for presets
{flags}
exit code: 0 all steps are made; 1 Slipstream or a library failed, or the run gave up; 2 something that you can repair,
nothing was trained; 129 the terminal went away, 130 Ctrl-C, 143 SIGTERM or slipstream stop"""

RESUME = """\
slipstream resume RUN|URL [SECTION.OPTION=VALUE ...] [--cfg job | --dry-run]

Goes on with the run in the folder RUN, with the options that it had: with its trainer ranks and engines, if its command
was killed and they are alive, or from its newest checkpoint that is whole. Rows of metrics.jsonl, logs and curves
continue. A damaged checkpoint is named and put aside. Options that a checkpoint does not depend on may be changed: a
learning rate, the number of steps or of rollout workers.

examples
  slipstream resume runs/latest
  slipstream resume runs/quickstart-20260131-120000 run.num_steps=200 trainer.optim.lr=1e-3
      train longer, with another learning rate
  slipstream resume s3://bucket/runs/quickstart-20260131-120000
      on any machine, from the object store that run.checkpoint_dir named, in a folder of this name below run.dir

It works from any folder: relative paths among the run's options (data.path, model.path) start where the run was
started, and those that you give now where you are.
{flags}
exit code: as of slipstream train; 2 when RUN is no run folder or has no whole checkpoint"""

EVAL = """\
slipstream eval RUN [SECTION.OPTION=VALUE ...] [flags]
       slipstream eval MODEL [--adapter DIR] [GROUP=CHOICE ...] [SECTION.OPTION=VALUE ...] [flags]

Samples and judges held-out prompts with the weights of a run's checkpoint, of a model's folder, or of an adapter beside
it, and prints mean reward, pass@k and majority vote with standard errors. Options are the run's; others may follow.
Writes a folder below RUN/evals (of a model, below run.dir/evals) with evaluation.json, samples.jsonl (every response)
and logs.

examples
  slipstream eval runs/latest --checkpoint best run.eval_samples_per_prompt=16
  slipstream eval runs/latest data.eval_path=null data.eval_sets.aime=aime.jsonl
  slipstream eval MODEL data.eval_path=test.jsonl reward=math
      a base model, or one that slipstream merge wrote
  slipstream eval MODEL --adapter DIR data.eval_path=test.jsonl reward=math
      rank and alpha are the adapter's
{flags}
exit code: as of slipstream train; 2 when there are no such weights or nothing is held out"""

MERGE = """\
slipstream merge RUN [--checkpoint C] [--output DIR]

Writes W + scale * B @ A of the newest checkpoint of a run, or of its end, in the model's format: a folder with weights,
config.json and tokenizer, which transformers, vLLM and model.path read; with trainer.mode=full, all weights of the
checkpoint. The run may go on meanwhile. It computes on the CPU and needs memory for the whole model there.

examples
  slipstream merge runs/latest && vllm serve runs/latest/merged
  slipstream merge runs/latest --checkpoint best --output models/best
{flags}
exit code: 0, or 2 when there are no such weights or the folder is there already"""

STOP = """\
slipstream stop RUN [--timeout-s S]

Asks the run that goes on in the folder RUN to end, and waits until it has: it finishes its present step (for at most a
minute), saves its state and ends all its processes, as with Ctrl-C in its terminal. Works from any machine that mounts
the folder, also while the run still starts. Of a run whose command was killed it ends what is alive on this machine.

examples
  slipstream stop runs/latest
  slipstream stop runs/latest && slipstream resume runs/latest trainer.optim.lr=1e-5
      go on with another learning rate
{flags}
exit code: 0 when the run has ended, 2 when there is no such run or it still goes on after --timeout-s. The run itself
ends with 143, as with SIGTERM"""

LAUNCH = """\
slipstream launch slurm|kuberay|skypilot [GROUP=CHOICE ...] [SECTION.OPTION=VALUE ...] [flags]

Writes the file with which a cluster starts the run that these options describe, as many machines as it needs: a batch
script of SLURM, a RayJob of KubeRay (with its script), a task of SkyPilot. The options are those of `slipstream train`.
A job that is started again, because it ran out of time or lost a machine, goes on from the run's newest checkpoint.

examples
  slipstream launch slurm experiment=qwen3_30b_a3b_8gpu model=checkpoint model.path=/models/Qwen3-30B-A3B \\
      --time-limit 12:00:00 --output qwen3.sbatch && sbatch -p gpu qwen3.sbatch
  slipstream launch kuberay experiment=qwen3_30b_a3b_8gpu model=checkpoint model.path=/shared/Qwen3-30B-A3B \\
      --volume models --image registry.example.org/slipstream:gpu | kubectl apply -f -
  slipstream launch skypilot experiment=kimi_k2_thinking_32gpu model=checkpoint model.path=/shared/Kimi-K2-Thinking \\
      --volume models --gpu-type H200 --output kimi.yaml
{flags}
exit code: 0, or 2 for a mistake. Nothing is started, and no model or data file is looked at"""

PLAN = """\
slipstream plan [GROUP=CHOICE ...] [SECTION.OPTION=VALUE ...] [flags]

Plans one publish of a run and predicts its time, for a cluster that need not exist: bytes that it moves, balance of
senders and receivers, memory of a GPU on both sides (an estimate), seconds per stage. Takes the options of
`slipstream train`; cluster.device=auto is planned as cuda. The engine's own loader is recorded without weights, once,
and then kept.

examples
  slipstream plan experiment=qwen3_moe_2gpu
  slipstream plan experiment=qwen3_moe_2gpu trainer.num_ranks=8 trainer.ep_size=8 rollout.tp_size=4
      another layout of trainer and engines than the preset's
  slipstream plan experiment=qwen3_moe_2gpu trainer.num_ranks=16 --nic-gb-s 44 --slow-rank 3=2
      slower NICs, a rank at half speed
  slipstream plan experiment=kimi_k2_fp8_merged trainer.num_ranks=256 rollout.num_workers=8
      a preset carried to a cluster of another size"""

PUSH = """\
slipstream push CHECKPOINT --start N [flags] [-- WORDS FOR vllm serve]
       slipstream push CHECKPOINT --to URL[,URL...] [--base CHECKPOINT] [flags]

Brings the weights of a Hugging Face checkpoint (safetensors) into vLLM engines, and proves every byte in their memory
before they serve. The checkpoint is read once, by several ranks in parallel, each its share.

examples
  slipstream push /models/Qwen3-30B-A3B --start 2 --tp 2
      two engines on GPUs 0,1 and 2,3; they start while the disk is read; http://127.0.0.1:8000 and :8001
  slipstream push /models/Qwen3-30B-A3B --start 1 -- --max-model-len 8192 --enable-prefix-caching
      further words are for `vllm serve`
  slipstream push /checkpoints/step-400 --to http://127.0.0.1:8000,http://127.0.0.1:8001
      other weights of the same model into engines that run; requests in flight are frozen meanwhile, then go on
  slipstream push /checkpoints/step-500 --base /checkpoints/step-400 --to http://127.0.0.1:8000
      only what differs between the two, if the engine proves to hold the first; otherwise every byte

An engine of yours can be pushed to when it was started with
  VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "slipstream"}'
and, for experts on GPUs, --moe-backend triton. On CPUs add
--worker-extension-cls slipstream.rollout.served.backend.ServedWorker
{flags}
exit code: 0 all engines serve the checkpoint; 1 one does not (it stays paused and is named), or an engine or rank
failed; 2 the command cannot work as given; 130 Ctrl-C, 143 SIGTERM"""

PARITY = """\
slipstream parity [MODEL] [GROUP=CHOICE ...] [SECTION.OPTION=VALUE ...] [flags]

Lets vLLM sample with a model, lets the trainer score what it sampled, and says how well the two agree, beside the
floor: how well the engine agrees with itself when it prefills what it decoded. Then compares them operation by
operation, each on the engine's own inputs, and names the layer and the operation where they part by more than rounding.
Starts no run; one device holds one model after the other.

MODEL is a checkpoint's folder, or a run's: its trained adapter on the trainer's side, merged into the weights on the
engine's. Without it the options name a model, as those of `slipstream train`, which may follow in any case.

examples
  slipstream parity model=tiny_qwen3_moe
  slipstream parity /models/Qwen3-30B-A3B --transformers
  slipstream parity /models/Qwen3-30B-A3B data=files data.path=prompts.jsonl --prompts 64 --max-tokens 200
      prompts of your own instead of random tokens
  slipstream parity /models/Qwen3-30B-A3B trainer.numerics.match=transformers --usual parity/parity.json --output other
      an option changed: what differs more than in an earlier report is named, however small it is
  slipstream parity runs/latest
{flags}
exit code: 0 when no operation differs by more than rounding, 1 when one does or the engine fails, 2 for a mistake"""

RECORD = """\
slipstream record MODEL [flags]

Writes down how an engine would lay out a model: which rectangle of which checkpoint tensor goes to which place of which
parameter, on every rank. The engine's own loader runs once on tensors without memory, so no GPU, no weights and no
engine are needed, however large the model. `slipstream plan` uses the same recordings.

examples
  slipstream record /models/Qwen3-30B-A3B --tp 4
      digest, parameters and bytes of every rank, on the screen
  slipstream record ./config-only --tp 16 --expert-parallel --out kimi-tp16.layouts
      from a config.json alone, and into a file

MODEL is a folder with config.json. With safetensors beside it, their headers say which tensors there are; without, the
architecture does."""

DOCTOR = """\
slipstream doctor [--json]

Looks at this machine and says what a run would find: versions, CPUs, memory, GPUs and their links, network cards,
limits, ports, Ray, Mooncake. Starts nothing that lasts. Every warning comes with its cure.
{flags}
exit code: 0 when a run can work here, 1 when something that it needs is missing or broken"""

STATUS = """\
slipstream status [RUN] [--json] [--curves]

Says where the run in the folder RUN (runs/latest) stands, whether it goes on or has ended: its step and the time left,
means of its last steps, held-out figures, what failed, its newest checkpoint, the last warnings of its log. Reads files
alone, so that it works wherever the folder is mounted.

examples
  slipstream status                       the newest run below ./runs
  slipstream status runs/NAME --curves    ... and draws curves.png now instead of at the end
  watch -n 5 slipstream status            a view that stays
{flags}
exit code: 0, or 2 when RUN is no run folder"""

VIEW = """\
slipstream view [RUN ...] [--port N] [--export FILE.html]

Serves a page about one or several runs (runs/latest) on this machine, and prints its address. It shows curves of all
runs in the same charts; of each step who did what and who waited for whom; publishes against the watermark; rollout
workers and the versions that they serve; prompts and responses with reward, advantage, version and, token by token, how
far trainer and engine are apart; options that differ. A run that goes on is followed. Reads files alone: the run is
asked nothing, and nothing is written.

examples
  slipstream view                              the newest run below ./runs
  slipstream view runs/one runs/other          two runs side by side
  slipstream view runs/latest --export run.html
      one file to send to a colleague: all curves, the last timelines, the samples that people look for first
  ssh -L 8800:127.0.0.1:8800 machine slipstream view runs/latest --port 8800
      a run on another machine: open the printed address here

The page listens on loopback alone and answers nobody without the token in its address. An exported file holds prompts
and responses: whoever gets it can read them.
{flags}
exit code: 0; 2 when a RUN is no run folder, the port is taken or the file cannot be written; 130 Ctrl-C, 143
SIGTERM"""

RECOVER = """\
slipstream recover RUN [--worker N]

Asks the run that goes on in the folder RUN to start rollout workers again. A worker comes back with dummy weights,
reads the current ones from a healthy worker (or gets them with the next publish) and then samples; trainer and other
workers go on. Workers that fail are restarted without being asked, rollout.max_restarts times each.

examples
  slipstream recover runs/latest               every worker that is out of service
  slipstream recover runs/latest --worker 1    a worker that serves, but behaves oddly
{flags}
exit code: 0 when the run has taken the request, 2 when there is no such run or worker"""

SCALE = """\
slipstream scale RUN rollout=N

Asks the run that goes on in the folder RUN to have N rollout workers from here on. A further one starts beside the
others, reads the current weights from one of them and samples; the trainer writes to it from the next publish on. One
that is too many hands its requests to others, with the tokens that it has sampled, and ends. Neither makes the trainer
or the other workers wait. Nothing is done where there is no room in Ray for all that are missing. A run of
rollout.num_workers=MIN..MAX takes an N between these as its most: those without room start when there is some.

examples
  slipstream scale runs/latest rollout=3
  slipstream scale runs/latest rollout=1       the workers that came last go
{flags}
exit code: 0 when the run has taken the request, 2 when there is no such run, or no room"""

DRAIN = """\
slipstream drain RUN WORKER

Asks the run that goes on in the folder RUN to let one rollout worker go: it takes no request any more, others go on
with what it was sampling, and it ends. From here on the run wants one worker fewer. SIGTERM to the worker's process
does the same, but the worker is wanted still: slipstream scale starts it again, here or elsewhere.

examples
  slipstream drain runs/latest rollout-1       its machine is needed, or will be taken
{flags}
exit code: 0 when the run has taken the request, 2 when there is no such run or worker, or it is the last one"""

CHAOS = """\
slipstream chaos RUN --list
       slipstream chaos RUN [VICTIM[,VICTIM]] [flags]

Kills, stops, ends, slows or cuts off a process of the run that goes on in the folder RUN, or fills its disk, at a
moment of your choice, and waits until the run is as before: steps go on, everybody is there again and serves. Prints
what happened and what it cost, and appends it to RUN/chaos.jsonl. Where several victims, ways or moments are given,
each event draws one of each.

VICTIM is a kind, of which one process is drawn (engine, worker, trainer, keeper, reward, agent, controller, raylet,
gcs, node), or a name that --list shows. Without it one is drawn that a run outlives by itself: engine, worker, trainer,
reward or agent.
A run whose raylet, gcs or node is killed ends; one whose controller is killed waits to be resumed (--resume).
Only processes of this run and this user are touched, on this machine.

slow lets the victim run a tenth of the time. cut drops what the node of the victim sends and gets, where the node is a
network namespace of its own; it needs root and nft. fill takes the free room of a file system that is the run's alone:
its VICTIM is shm (/dev/shm), disk (RUN) or store (run.checkpoint_dir=file:///...). All are undone after --stop-s.

examples
  slipstream chaos runs/latest --list
  slipstream chaos runs/latest trainer-1 --when publish
  slipstream chaos runs/latest engine,worker --what kill,stop,term --when sampling,publish --every 60 --for 600 --seed 1
      ten events; the same seed draws the same again
  slipstream chaos runs/latest controller --when checkpoint --resume
  slipstream chaos runs/latest trainer --when recovery
      kills an engine first, and the trainer rank while that is started again
  slipstream chaos runs/latest disk --what fill --stop-s 60 --resume

verify is when engines check what they got, at the end of a publish. No file says so while it goes on, so it is aimed
at by the time that publishes before took. The column met says whether a moment was still on when the blow fell.
{flags}
exit code: 0 when the run was as before after every event, 1 when it was not, 2 for a mistake"""
