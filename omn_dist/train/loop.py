"""The training loop: windows, validation, checkpoints, stopping."""

import logging
import time
from typing import Any

import torch

from omn_dist.optim.groups import set_row_lr
from omn_dist.settings import SettingsError
from omn_dist.train.checkpointing import save_checkpoint
from omn_dist.train.config import RunConfig, to_mapping
from omn_dist.train.gpu_meter import open_gpu_meter
from omn_dist.train.metrics import read_rows
from omn_dist.train.norms import UpdateNorms
from omn_dist.train.passes import accumulate_window, validation_loss
from omn_dist.train.pictures import draw_loss_curve
from omn_dist.train.preflight import CHECKPOINTS, LOSS_CURVE, METRICS, RECORD
from omn_dist.train.progress import Progress
from omn_dist.train.ranks import Ranks, StopRequest, start_process_group, stop_process_group
from omn_dist.train.record import write_record
from omn_dist.train.schedule import learning_rate
from omn_dist.train.setup import Run, set_up
from omn_dist.train.window import RejectedWindowsError, Verdict, clip_gradients, judge_window

logger = logging.getLogger("omn_dist.train")

STOPPED_EXIT_STATUS = 75
"""Exit status of a run that was asked to stop and saved a checkpoint. The same command continues
it."""


def train(config: RunConfig, ranks: Ranks) -> int:
    """Train from the start, or from the checkpoint that the configuration names, to the last step.

    Collective: every rank of the run must call. Starts the process group, and ends it when the run
    ends on all ranks alike. After any other exception the launcher ends the other ranks.

    Returns:
        0, or :data:`STOPPED_EXIT_STATUS` after a stop signal.

    Raises:
        SettingsError: the run cannot start. All ranks raise it.
        RejectedWindowsError: the run cannot go on. All ranks raise it.
    """
    # Signals are caught during set-up too, so that none is lost, and until the process group has
    # ended, so that none ends a rank while the others still wait for it.
    with StopRequest(config.stop_signals) as stop:
        start_process_group(ranks, config.collective_timeout_seconds)
        try:
            status = _Trainer(set_up(config, ranks), stop).train()
        except (SettingsError, RejectedWindowsError):
            stop_process_group()
            raise
        stop_process_group()
        return status


class _Trainer:
    """Takes a run from its set-up to its end. Methods that use the model are collective."""

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._config, self._clock, self._ranks = run.config, run.clock, run.ranks
        self._saved_step = None if run.checks.resume is None else run.clock.steps
        self._update_norms = UpdateNorms(run.groups, run.ranks.device)
        self._gpu, reason = open_gpu_meter(run.ranks.device)
        if reason is not None:
            logger.warning("%s", reason)

    def train(self) -> int:
        """Train to the last step. Returns 0, or the exit status of a run that was asked to stop."""
        run, clock, last_step = self._run, self._clock, self._config.last_step
        if run.checks.resume is None:
            self._validate()
        else:
            for change in run.checks.changes:
                logger.warning("differs from the checkpoint: %s", change)
            logger.info("continuing %s at step %d of %d", run.checks.resume.path, clock.steps, last_step)
        progress = Progress(
            clock.steps,
            last_step,
            print_every_steps=self._config.logging.print_every_steps,
            enabled=self._ranks.is_first,
        )
        stopped = False
        while clock.steps < last_step and not stopped:
            row, stopped = self._window()
            if row is not None:
                progress.step(row)
                self._after_step()
        progress.close()
        if clock.steps < last_step:
            self._save()
            logger.info("asked to stop: saved step %d of %d; the same command continues", clock.steps, last_step)
        else:
            self._finish()
        if run.metrics is not None:
            run.metrics.close()
        return 0 if clock.steps >= last_step else STOPPED_EXIT_STATUS

    def _window(self) -> tuple[dict[str, Any] | None, bool]:
        """Train on one window.

        Returns:
            its metrics row, ``None`` where it was rejected; and whether any rank was asked to stop.
        """
        run, config, clock = self._run, self._config, self._clock
        run.optimizer.zero_grad()
        started = time.perf_counter()
        loss = accumulate_window(run.model, run.optimizer, run.checks.train, config, self._ranks, clock.windows)
        verdict = judge_window(run.groups, loss, stop=self._stop.requested)
        judged = time.perf_counter()
        if not verdict.accepted:
            self._reject(verdict)
            return None, verdict.stop
        clip = clip_gradients(run.groups, verdict, config.clipping.adamw_max_norm)
        measure = _is_due(config.logging.update_norm_every_steps, clock.steps + 1)
        if measure:
            self._update_norms.remember()
        # A window has the rate that the schedule has at its end, see schedule.py.
        tokens = clock.accepted_tokens + config.tokens_per_window
        for group, peak, row_peak in zip(run.optimizer.param_groups, run.peaks, run.row_peaks, strict=True):
            group["lr"] = learning_rate(config.schedule, peak, tokens)
            set_row_lr(group, learning_rate(config.schedule, row_peak, tokens))
        stepping = time.perf_counter()
        run.optimizer.step()
        self._wait_for_device()
        stepped = time.perf_counter()
        clock.accept(config.tokens_per_window)
        row = {
            "kind": "train",
            "step": clock.steps,
            "window": clock.windows,
            "tokens": clock.accepted_tokens,
            "rejected": clock.rejected,
            "loss": verdict.loss,
            "learning_rates": {
                view.label: float(group["lr"]) for view, group in zip(run.groups, run.optimizer.param_groups, strict=True)
            },
            "gradient_norms": verdict.gradient_norms,
            "adamw_clip_factor": clip,
            "update_norms": self._update_norms.measure() if measure else None,
            "seconds_forward_backward": judged - started,
            "seconds_optimizer": stepped - stepping,
            "tokens_per_second": config.tokens_per_window / (time.perf_counter() - started),
        }
        if self._gpu is not None and self._ranks.is_first:
            row["gpu"] = self._gpu.read()
        self._append(row)
        return row, verdict.stop

    def _reject(self, verdict: Verdict) -> None:
        clock, limit = self._clock, self._config.batch.max_consecutive_rejected
        clock.reject()
        logger.warning(
            "window %d rejected, not finite: %s; no step was taken, the run is at step %d (%d rejected so far)",
            clock.windows,
            verdict.offender,
            clock.steps,
            clock.rejected,
        )
        self._append(
            {
                "kind": "rejected",
                "step": clock.steps,
                "window": clock.windows,
                "tokens": clock.accepted_tokens,
                "rejected": clock.rejected,
                "not_finite": verdict.offender,
            }
        )
        if clock.consecutive_rejected >= limit:
            raise RejectedWindowsError(
                f"{clock.consecutive_rejected} windows in a row were rejected after step {clock.steps}, the last one "
                f"for a non-finite {verdict.offender}; expected fewer than batch.max_consecutive_rejected = {limit}; "
                "lower the learning rates or check the data, and continue from the last checkpoint"
            )

    def _after_step(self) -> None:
        """Validate and save where they are due.

        In this order, so that the step of a checkpoint has its validation row.
        """
        step, last = self._clock.steps, self._clock.steps == self._config.last_step
        if last or _is_due(self._config.logging.validation_every_steps, step):
            self._validate()
        if last or _is_due(self._config.checkpoint.every_steps, step):
            self._save()

    def _validate(self) -> None:
        clock = self._clock
        started = time.perf_counter()
        loss = validation_loss(self._run.model, self._run.checks.validation, self._config, self._ranks)
        self._append(
            {
                "kind": "validation",
                "step": clock.steps,
                "window": clock.windows,
                "tokens": clock.accepted_tokens,
                "loss": loss,
                "seconds": time.perf_counter() - started,
            }
        )
        logger.info("step %d  validation loss %.4f", clock.steps, loss)

    def _save(self) -> None:
        if self._saved_step == self._clock.steps:
            return
        if self._run.metrics is not None:
            self._run.metrics.sync()
        path = save_checkpoint(
            self._run.folder / CHECKPOINTS,
            self._run.model,
            self._run.optimizer,
            clock=self._clock,
            config=to_mapping(self._config),
            data_fingerprint=self._run.checks.data.fingerprint,
            keep=self._config.checkpoint.keep,
        )
        self._saved_step = self._clock.steps
        logger.info("step %d  saved %s", self._clock.steps, path)

    def _finish(self) -> None:
        """Add the results to the run record, draw the loss curve, and log where the files are."""
        run, clock = self._run, self._clock
        if not self._ranks.is_first:
            return
        rows = read_rows(run.folder / METRICS)
        losses = [row["loss"] for row in rows if row["kind"] == "validation"]
        result = {
            "steps": clock.steps,
            "tokens": clock.accepted_tokens,
            "rejected_windows": clock.rejected,
            "first_validation_loss": losses[0] if losses else None,
            "last_validation_loss": losses[-1] if losses else None,
        }
        write_record(run.folder / RECORD, run.record | {"result": result})
        if draw_loss_curve(rows, run.folder / LOSS_CURVE):
            logger.info("loss curve  %s", run.folder / LOSS_CURVE)
        else:
            logger.warning("no loss curve: matplotlib is not installed; pip install 'omn-dist[plots]'")
        logger.info("run record  %s", run.folder / RECORD)
        logger.info("metrics     %s", run.folder / METRICS)
        logger.info("validation loss %s -> %s in %d steps", *(_loss_text(losses, i) for i in (0, -1)), clock.steps)

    def _append(self, row: dict[str, Any]) -> None:
        if self._run.metrics is not None:
            self._run.metrics.append(row)

    def _wait_for_device(self) -> None:
        """Wait for the kernels of the step, which CUDA runs asynchronously.

        Without this the time of the optimizer would count as time of the next forward.
        """
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _loss_text(losses: list[float | None], index: int) -> str:
    return f"{losses[index]:.4f}" if losses and losses[index] is not None else "not finite"
