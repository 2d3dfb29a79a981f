"""The trainer: ``accelerate launch ... -m trainer.train runs/<name>/run.json``.

Full fine-tuning and LoRA, one process and many, are this one loop. What happened is in ``outcome.json``, which rank 0
writes last, or the first process that fails.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel

from bootstrap import clocks
from bootstrap.lora_file import LoraFileError
from bootstrap.outcome import CRASH, DONE, JOB_WRONG, POD_WRONG, STOPPED, Outcome, PodError
from bootstrap.run_file import RunFile
from bootstrap.state import State, StateError, Validated, best_of, list_states, read_state
from bootstrap.tensor_files import TensorFileError
from bootstrap.volume import Volume
from bootstrap.whereabouts import End, Phase, Place
from jobs.problem import JobError
from trainer.adapter import paces
from trainer.adapter_files import load_adapter, resume_adapter
from trainer.agreement import Agreement
from trainer.checkpoint import Saver, load_average, load_optimizer, publish_output
from trainer.data import Batch, Latents, StepData, TrainingData
from trainer.ema import Ema
from trainer.flow import image_losses
from trainer.make_optimizer import make_optimizer
from trainer.metadata import metadata
from trainer.metrics import Metrics, NonFiniteLossError, StepRecord, StepSums
from trainer.model import build_model, fill, keep_gathered, predict, sources
from trainer.optimizer import Optimizer, OptimizerStateError
from trainer.out_of_memory import is_out_of_memory, measure
from trainer.pace import Pace
from trainer.requests import Requests
from trainer.sample import Sampler
from trainer.schedule import Schedule, make_schedule
from trainer.self_check import choose_attention
from trainer.state_files import NonFiniteError
from trainer.streamed import StreamedWeights
from trainer.time_left import TimeLeft
from trainer.trained import Trained, local, trained_tensors
from trainer.validation import Validator
from trainer.world import World, join_world

log = logging.getLogger(__name__)


def train(t: Training) -> Outcome:
    """From the state the run goes on from, or from the start, to the last step or to a signal."""
    if t.sampler.due(t.start):  # also what a stop or a kill came before
        t.draw(t.start)
    if t.start == 0:
        t.validate(0)
    if t.rest(t.start):
        return t.stopped(t.start)
    for done in t.steps():
        asked = t.requests.ask(done, t.saver.busy)
        if not asked.writing:
            t.publish()
        if asked.stop and done < t.last:
            return t.stopped(done)
        saving = done == t.last or asked.save or asked.pause or t.postponed
        t.validate(done, saving)
        if saving:
            t.save(done)
        if asked.pause and done < t.last and t.rest(done):
            return t.stopped(done)
        if t.sampler.due(done):
            t.draw(done)
    return t.finish()


@dataclass
class Training:
    """Everything the loop works with."""

    run: RunFile
    world: World
    state: State | None
    data: TrainingData
    model: FluxTransformer2DModel
    tensors: list[Trained]
    optimizer: Optimizer
    schedule: Schedule
    metrics: Metrics
    sampler: Sampler
    validator: Validator
    requests: Requests
    saver: Saver
    ema: Ema | None
    start: int  # updates done before this process began
    done: int = field(default=0, init=False)  # updates that this process has seen the end of, those before it included
    last_pass: bool = field(default=True, init=False)  # of the step: its backward may update
    sizes: set[tuple[int, ...]] = field(default_factory=set, init=False)  # of batches so far
    postponed: bool = field(default=False, init=False)  # a save was due after a step that was no number
    validated: tuple[int, Validated | None] = field(default=(-1, None), init=False)  # of which step, and what was found

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.model, self.tensors, self.start, self.world)
        self.pace = Pace(self.world, self.run.weights.shape.width, sharded=self.tensors[0].sharded)

    @property
    def streamed_weights(self) -> StreamedWeights | None:
        return StreamedWeights.of(self.model)

    @property
    def last(self) -> int:
        return self.run.plan.steps

    @classmethod
    def set_up(cls, run: RunFile, world: World) -> Training:
        """In the order in which things need each other."""
        job, plan, weights = run.job, run.plan, run.weights
        state = read_state(run.resume) if run.resume else None
        if state and job.method == "full":
            places = sources(weights.shape, [state.model], "bfl")
        else:
            places = sources(weights.shape, weights.transformer, weights.layout, weights.prefix)
        world.place.enter(Phase.CHECKING)
        attention = choose_attention(run, world, run.read_items())  # before the model takes the memory
        world.place.enter(Phase.LOADING)
        model = build_model(
            job, plan, weights.shape, world, lambda model: fill(model, places, world), assistant=run.assistant
        )
        attention.switch_on(model)
        return cls.assemble(run, world, model, state)

    @classmethod
    def assemble(cls, run: RunFile, world: World, model: FluxTransformer2DModel, state: State | None) -> Training:
        """From a model that is ready to train: its data, its optimizer, and what a state brings back."""
        job, plan, start = run.job, run.plan, state.step if state else 0
        world.place.enter(Phase.SETTING_UP, start)
        data = TrainingData(run, run.read_items(), latents_of(run.weights.vae), world.rank)
        model.train()
        tensors = trained_tensors(model, world.rank, world.size, paces(job, run.weights.shape))
        optimizer = make_optimizer(tensors, job, plan, world)
        if job.lora and state:
            resume_adapter(state, tensors, job.lora)
        elif job.lora and job.lora.start:
            load_adapter(Volume(run.volume).resolve(job.lora.start), tensors, job.lora)
        start = state.step if state else 0
        ema = Ema(job.ema, job.seed, model, tensors, start, host=plan.ema_on_host) if job.ema else None
        if state:
            load_optimizer(state, optimizer, world.place.move)
            load_average(state, tensors, ema)
        schedule = make_schedule(job, plan.steps)
        sampler, validator = Sampler(run, model, world, ema, start), Validator(run, model, world, data, start)
        requests, saver = Requests(run, world), Saver(run, world)
        time_left = TimeLeft(run, map(data.pixels, range(plan.steps)), validator.images_of_a_process, saver.guess())
        metrics = Metrics(run.folder, start, world, job.non_finite_steps, time_left)
        parts = (data, model, tensors, optimizer, schedule, metrics, sampler, validator, requests, saver, ema)
        training = cls(run, world, state, *parts, start)
        if plan.optimizer_in_backward:
            device = world.device
            update_in_backward(tensors, optimizer, ema, training.streamed_weights, device, lambda: training.last_pass)
        return training

    def steps(self) -> Iterator[int]:
        """Takes the steps that are left, one each time it is asked; gives how many updates are done."""
        asked = self.pace.begin()
        for step, data in enumerate(self.data.prepared(self.start, self.last), start=self.start):
            waited = time.monotonic() - asked
            record = self.take_step(step, data, waited)
            self.metrics.record(record)
            self.agreement.ask(step + 1, self.data.step(step), record.learning_rate)
            self.pace.end(waited)
            self.done = step + 1
            yield step + 1
            asked = self.pace.begin()

    def take_step(self, step: int, data: StepData, waited: float) -> StepRecord:
        """One optimizer update from this process's passes; the loss is the mean over all the step's images.

        ``waited``: seconds that this process waited for ``data``.
        """
        job, world = self.run.job, self.world
        # A step of fewer images moves the weights less, so that every image counts the same.
        learning_rate = job.learning_rate * self.schedule(step) * data.images / job.images_per_step
        sums = StepSums(world, waited)
        for number, batch in enumerate(data.batches, start=1):
            self.last_pass = number == len(data.batches)
            self._enter_pass(step, batch)
            if not self.run.plan.reshard_after_forward:
                keep_gathered(self.model, not self.last_pass)
            batch = batch.to(world.device)
            prediction = predict(self.model, batch, job.guidance, job.t5_mask)
            losses = image_losses(prediction, batch.target, batch.mask)
            loss = (losses * batch.weights).sum() / data.images
            sums.add(loss, losses, batch.weights, batch.sigma)
            if self.last_pass:  # whose backward may update: every process must know by then whether to
                self.pace.meet()
                dist.all_reduce(sums.values)
                self.optimizer.begin_step(step, learning_rate, torch.isfinite(sums.loss).float())
                if self.ema:
                    self.ema.begin_step(step)
            loss.backward()
        if not self.tensors[0].sharded and world.size > 1:
            sum_gradients(self.tensors)
        norm = clip_gradients(self.tensors, job.max_grad_norm) if job.max_grad_norm else None
        self.optimizer.finish_step()
        if self.ema:
            self.ema.finish_step()
        skipped = self.optimizer.skipped
        dist.all_reduce(skipped)
        return StepRecord(step + 1, sums.loss, norm, learning_rate, data.images, skipped, sums.values, data.pixels)

    def draw(self, step: int) -> None:
        """Samples of the model after ``step`` updates."""
        drawn = self.sampler.draw(step)
        if drawn:
            self.metrics.pictures(step)
        self.metrics.restart_clock("samples" if drawn else None)

    def validate(self, step: int, saving: bool = False) -> None:
        """Tries the model on pictures it is not shown, where it is time to. ``saving``: a state is saved next."""
        if self.validator.due(step, saving):
            self.world.place.enter(Phase.VALIDATING)
            with self.ema.shown() if self.ema else nullcontext():  # what is saved is what is tried
                self.validated = step, self.validator.round(step, self.metrics)
            self.metrics.restart_clock("validation")

    def _enter_pass(self, step: int, batch: Batch) -> None:
        """Says that a pass begins; the first one of a size may compile for minutes."""
        self.pace.enter_pass(batch, self.last_pass)
        size = tuple(batch.noisy.shape)
        compiles = self.run.plan.compile and size not in self.sizes
        self.sizes.add(size)
        self.world.place.enter(Phase.COMPILING if compiles else Phase.TRAINING, step)

    def save(self, step: int) -> None:
        """Begins a state, once the one before it stands. A volume that does not take it is told, and ends the run where
        the job says so; the last state of a run must succeed.

        After a step that was no number nothing is published: the next good step is saved instead. Raises NonFiniteError
        for a weight that is no number, and NonFiniteLossError where there is no next step.
        """
        self.publish()
        self.world.place.enter(Phase.SAVING)
        self.metrics.flush()
        self.agreement.answer()
        if streamed := self.streamed_weights:
            streamed.settle()
        self.postponed = bool(self.metrics.wrong)
        if self.postponed and step == self.last:
            raise NonFiniteLossError(f"{self.metrics.wrong}, the last of the run")
        if self.postponed:
            log.warning("step %d is not saved: %s. The next good step is.", step, self.metrics.wrong)
            return
        with self._told_when_not_saved(step):
            validated = self.validated[1] if self.validated[0] == step else None
            told = metadata(self.run, step)
            self.saver.begin(step, self.tensors, self.optimizer, told, validated, self.ema)
        self.requests.saved_one()
        if self.saver.writing and not self.saver.writing.thread:
            self.publish()
        self.metrics.restart_clock()

    def publish(self) -> None:
        """Makes what was begun a state, waiting for it to be written."""
        if self.saver.writing is None:
            return
        self.world.place.enter(Phase.SAVING)
        with self._told_when_not_saved(self.saver.writing.step):
            self.state = self.saver.publish()
            self.metrics.took("save", self.saver.stood_still)
            self.metrics.took("last save", self.state.manifest.seconds)
        self.metrics.restart_clock()

    @contextmanager
    def _told_when_not_saved(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the same on every process
            if step == self.last or self.run.job.save.on_error == "stop":
                raise
            log.error("the state of step %d was NOT saved: %s. The older ones stand; training goes on.", step, error)

    def rest(self, step: int) -> bool:
        """Waits while the run is paused; whether a stop ended it."""
        if not self.world.any(self.world.leads and self.run.folder.pause.exists())[0]:
            return False
        self.publish()
        newest = self.state.step if self.state else 0
        self.world.place.enter(Phase.PAUSED)
        log.info("paused after step %d, saved is step %d: remove %s to go on", step, newest, self.run.folder.pause)
        stop = self.requests.rest()
        log.info("going on after the pause" if not stop else "stopped during the pause")
        self.metrics.restart_clock()
        return stop

    def stopped(self, step: int) -> Outcome:
        """The end after a signal: a state under way is finished and another one saved, as far as the time allows."""
        begun = time.monotonic()
        while self.saver.writing:
            (busy,) = self.world.any(self.saver.busy)
            if not busy:
                self.publish()
            elif self.world.from_lead(time.monotonic() - begun > clocks.SAVE):
                log.warning("the state of step %d is given up: there is no time to finish it", self.saver.writing.step)
                self.saver.discard()
            else:
                time.sleep(0.05)
        saved = self.state.step if self.state else 0
        if saved < step and self._save_fits(clocks.SAVE - (time.monotonic() - begun)):
            self.save(step)
            self.publish()
            saved = self.state.step if self.state else 0
        self.metrics.flush()
        self.metrics.close()
        return Outcome(STOPPED, f"stopped by a signal after step {step}; the newest state is of step {saved}", saved)

    def _save_fits(self, seconds: float) -> bool:
        """Whether a save takes less than that, by the last one's measure; an unmeasured one is taken to be too long
        where a state is larger than what a volume of 100 MB/s takes. Rank 0's measure: saving is entered by all or
        none."""
        if self.state:
            return self.world.from_lead(self.state.manifest.seconds < seconds)
        return self.world.from_lead(self.run.plan.state_bytes < seconds * 100e6)

    def finish(self) -> Outcome:
        """The output from the last state, or from the best one where the job says so."""
        self.publish()
        assert self.state is not None
        self.world.place.enter(Phase.FINISHING)
        output, validation = self.state, self.run.job.validation
        if self.world.leads:
            if validation and validation.best == "output":
                output = best_of(list_states(self.run.folder.states)[0]) or output
            target = self.run.folder.output / f"{self.run.job.name}.safetensors"
            publish_output(output, target, self.world.place.move)
        self.metrics.flush()
        self.metrics.close()
        done = f"all {self.last} steps are done"
        if output.step != self.last:
            done += f"; the output is step {output.step}, of the lowest validation loss of those saved"
        return Outcome(DONE, done, self.last)


def update_in_backward(
    tensors: list[Trained],
    optimizer: Optimizer,
    ema: Ema | None,
    streamed: StreamedWeights | None,
    device: torch.device,
    due: Callable[[], bool],
) -> None:
    """Lets backward, where it is ``due``, update each tensor as soon as its gradient is there (under FSDP2: reduced),
    and drop it."""

    def update(tensor: Trained) -> None:
        optimizer.update(tensor)
        if ema:
            ema.follow(tensor)

    for tensor in tensors:

        def use(_: torch.Tensor, tensor: Trained = tensor) -> None:
            if due():
                if optimizer.any_stream:
                    update(tensor)
                else:
                    on_default_stream(lambda: update(tensor), device)
                if streamed:
                    streamed.updated(tensor.parameter)

        tensor.parameter.register_post_accumulate_grad_hook(use)


def on_default_stream(work: Callable[[], None], device: torch.device) -> None:
    """Runs ``work`` on the default stream, for what knows no other; FSDP2's hooks run on the stream of its
    reduce-scatters. It costs the overlap: the default stream waits for the sum of the gradients."""
    if device.type != "cuda":
        work()
        return
    here, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    if here == default:
        work()
        return
    default.wait_stream(here)
    with torch.cuda.stream(default):
        work()
    here.wait_stream(default)


@torch.no_grad()
def sum_gradients(tensors: list[Trained]) -> None:
    """Sums the gradients of replicas, as one flat buffer in one message."""
    gradients = [local(t.parameter.grad) for t in tensors if t.parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


@torch.no_grad()
def clip_gradients(tensors: list[Trained], most: float) -> torch.Tensor:
    """Shortens the whole gradient to at most ``most``; gives its length before. Nothing waits for the GPU."""
    gradients = [local(t.parameter.grad) for t in tensors if t.parameter.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
    if tensors[0].sharded:
        dist.all_reduce(squares)
    elif dist.get_world_size() > 1:  # replicas must stay so to the bit, and cards of other models add in another order
        dist.broadcast(squares, src=0)
    norm = squares.sqrt()
    # An infinite length would make the finite gradients 0, and those be used; NaN keeps all of them from being used.
    torch._foreach_mul_(gradients, torch.where(norm.isfinite(), most / (norm + 1e-6), torch.nan).clamp(max=1.0))
    return norm


def latents_of(vae: Path) -> Latents:
    config = json.loads((vae / "config.json").read_text(encoding="utf-8"))
    return Latents(shift=config["shift_factor"], scale=config["scaling_factor"])


def failure(error: BaseException, place: Place, during: str = "training") -> Outcome:
    """What an error means: whose it is, and what to do."""
    text, step = f"{error}", place.step
    if isinstance(error, (JobError, LoraFileError, OptimizerStateError, StateError, TensorFileError)):
        return Outcome(JOB_WRONG, text, step)
    if isinstance(error, PodError):
        return Outcome(POD_WRONG, text, step)
    if is_out_of_memory(error):  # the entrypoint, which knows the pod, tells the ways out
        shortage = measure(error, during, place.number)
        return Outcome(POD_WRONG, f"out of GPU memory: {shortage}", step, shortage)
    if isinstance(error, MemoryError):
        return Outcome(POD_WRONG, f"{text}: take a pod with more RAM, or an optimizer with smaller states", step)
    if isinstance(error, (NonFiniteLossError, NonFiniteError)):
        return Outcome(CRASH, f"{text}; the newest state stands. A lower learning_rate usually helps.", step)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Outcome(POD_WRONG, f"the volume is full ({text}): make room, or choose a larger one", step)
    told = f"{type(error).__name__}: {text} ({place.told()})"
    compiler = sys.modules.get("torch._dynamo.exc")  # slow to load, and loaded where anything is compiled
    if compiler and isinstance(error, compiler.TorchDynamoException):
        told += ". The compiler failed: plan: { compile: false } trains without it, slower and in more memory"
    return Outcome(CRASH, told, step)


def at_work_on(training: Training | None) -> str:
    """What a process does, for messages."""
    if training is None:
        return "setting up weights and optimizer"
    first = training.done <= training.start
    return f"step {training.start + 1}, the first of this start" if first else f"step {training.done + 1}"


def main(run_file: Path) -> int:
    run = RunFile.read(run_file)
    rank = int(os.environ.get("RANK", "0"))
    place = Place.take(rank)
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    training: Training | None = None
    try:
        with join_world(run, place) as world:
            training = Training.set_up(run, world)
            outcome = train(training)
            if world.leads:
                outcome.write(run.folder.outcome)
        return outcome.code
    except Exception as error:
        # Not a clean-up: the other processes may wait in a collective that this one will never enter. The entrypoint
        # ends them when it sees this one go, or else the launcher.
        traceback.print_exc()
        # The first to fail tells why: what the others see then is only that it is gone.
        if not run.folder.outcome.exists():
            failure(error, place, at_work_on(training)).write(run.folder.outcome)
        place.ends(End.FAILED)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
