"""Exposed communication on a slow network: how much of its cost does the pipeline hide?

Two gloo ranks run on one host each (a network namespace, see slow_network.py; needs root), with one
core a rank. gloo's threads and the matrix products share that core, so time that is hidden here is
really hidden. The transport of one optimizer is switched from step to step, interleaved in one run.
All times are those of the slowest rank. The modes are:

- *pipeline on*: the optimizer as it is;
- *pipeline off*: the same waves, but each collective is waited for at once;
- *compute alone*: the same work on what an earlier step left in the buffers, without collectives;
- *collectives alone*: the collectives of one step, one after the other;
- *backward alone*: gradients arrive one after the other, from the last layer to the first, each
  after the products that the backward of its layer takes for 1,024 tokens;
- *backward, then step*: both, one after the other;
- *backward, gathers in it, step*: the same with ``overlap_backward``.

The rows below them are computed round by round:

- *exposed*: a step minus compute alone;
- *cost* of communication: what is exposed with the pipeline off;
- *hidden*: the cost minus what is exposed with the pipeline on;
- *exposed after backward*, *exposed, gathers in backward*: the two modes with both, minus compute
  alone and backward alone;
- *saved by gathers in backward*: backward, then step minus the same with gathers in backward;
- *could hide*: the most that Newton-Schulz is long enough for. For each wave it is the shorter of
  its Newton-Schulz and of the collectives in flight at that time.

The column *waits* is the time that the optimizer waits for collectives or for the other rank. The
hidden part of it does not depend on how fast the machine computes at the moment, but it leaves out
the core time that communication takes. The column *cpu* is the time of all threads.

    python benchmarks/exposed.py [--rate 1gbit] [--preset torch] [--wave-mib 4] [--rounds 25]
        [--json] [--picture docs/results/pictures/exposed.png]

Ranks that are started in another way, with the environment variables of torch.distributed, use
their own network.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from common import layers, mebibytes, quartiles, sharded, show, slowest, summary
from slow_network import ADDRESSES, INTERFACE, two_hosts, why_not
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from omn_dist import DualOptimizer
from omn_dist.exchange import pipeline
from omn_dist.exchange.transport import Pending, WaveTransport

MODES = ON, OFF, COMPUTE, COLLECTIVES, BACKWARD, LATE, EARLY = (
    "pipeline on",
    "pipeline off",
    "compute alone",
    "collectives alone",
    "backward alone",
    "backward, then step",
    "backward, gathers in it, step",
)
NUM_TOKENS = 1024


class Span(NamedTuple):
    """The time of one wave in one range of a rank: ``gather``, ``wait_gather``, ``unpack`` ..."""

    name: str
    wave: int
    start: float
    end: float


class Stamps:
    """Replaces ``record_function`` and stores the ranges; ranks on one machine share its clock."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """A range such as ``omn_dist::gather(3)``."""
        name, wave = re.findall(r"(\w+)\((\d+)\)", label)[0]
        start = time.perf_counter()
        yield
        self.spans.append(Span(name, int(wave), start, time.perf_counter()))


class Switch(WaveTransport):
    """The transport of an optimizer, switched to one of the modes."""

    def __init__(self, transport: WaveTransport, stamps: Stamps) -> None:
        self.traffic = transport.traffic
        self.mode = ON
        self._transport, self._stamps = transport, stamps
        self._calls: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        """As the mode says."""
        return self._launch("gather", number, sent, received)

    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        """As the mode says."""
        return self._launch("scatter", number, sent, received)

    def run_collectives(self) -> None:
        """Run the collectives of a step, one after the other."""
        for (phase, number), buffers in self._calls.items():
            _Waiting(getattr(self._transport, phase)(number, *buffers), self._stamps, f"wait_{phase}({number})").wait()

    def _launch(self, phase: Literal["gather", "scatter"], number: int, sent: Tensor, received: Tensor) -> Pending:
        self._calls[phase, number] = (sent, received)
        if self.mode == COMPUTE:
            return Pending()
        pending = _Waiting(getattr(self._transport, phase)(number, sent, received), self._stamps, f"wait_{phase}({number})")
        if self.mode in (ON, LATE, EARLY):
            return pending
        pending.wait()
        return Pending()


class _Waiting(Pending):
    """Stores the range of the wait."""

    def __init__(self, pending: Pending, stamps: Stamps, label: str) -> None:
        super().__init__()
        self._pending, self._stamps, self._label = pending, stamps, label

    def wait(self) -> None:
        with self._stamps(self._label):
            self._pending.wait()


class Once(NamedTuple):
    """One run of a mode; times are seconds of the slowest rank."""

    seconds: float
    busy: float
    """Core time of all threads of the rank together."""
    waits: float
    """Time in which the optimizer waits for collectives."""
    spans: list[Span]
    """The ranges of this rank."""

    def of_waves(self, name: str) -> dict[int, float]:
        """Seconds of each wave in the ranges of one name."""
        return {span.wave: span.end - span.start for span in self.spans if span.name == name}


def measure(preset: str, wave_bytes: int | None, num_layers: int, num_rounds: int) -> list[dict[str, Once]]:
    """All modes, in each round. Collective."""
    stamps = Stamps()
    switches: list[Switch] = []
    make_transport = pipeline.make_transport

    def make_switch(*arguments: Any) -> Switch:
        switches.append(Switch(make_transport(*arguments), stamps))
        return switches[-1]

    pipeline.make_transport, pipeline.record_function = make_switch, stamps
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrices = layers(num_layers)
    parameters = [sharded(shape, mesh) for shape in matrices.values()]
    groups = [{"params": parameters, "param_names": list(matrices), "algorithm": "muon"}]
    optimizer = DualOptimizer(groups, preset=preset, wave_bytes=wave_bytes)
    (switch,) = switches
    gradients = [parameter.detach().to_local().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()

    def backward() -> None:
        optimizer.zero_grad()
        for parameter, gradient in reversed(list(zip(parameters, gradients, strict=True))):
            # The products for the gradients of inputs and weight; their values do not matter.
            weight, tokens = torch.zeros(parameter.shape).bfloat16(), torch.zeros(NUM_TOKENS, parameter.shape[0]).bfloat16()
            (tokens.mT @ (tokens @ weight)).sum().item()
            (parameter.to_local() * gradient).sum().backward()

    def once(mode: str) -> Once:
        switch.mode, stamps.spans = mode, []
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        if mode == COLLECTIVES:
            switch.run_collectives()
        elif mode == BACKWARD:
            backward()
        else:
            if mode in (LATE, EARLY):
                with optimizer.overlap_backward() if mode == EARLY else nullcontext():
                    backward()
            optimizer.step()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        waits = sum(span.end - span.start for span in stamps.spans if span.name.startswith("wait"))
        return Once(slowest(seconds), slowest(busy), slowest(waits), stamps.spans)

    for mode in MODES:
        once(mode)
    # Every second round runs in reverse order, so that drift of the machine affects all modes.
    return [{mode: once(mode) for mode in MODES[:: (-1) ** number]} for number in range(num_rounds)]


def table(rounds: Sequence[dict[str, Once]]) -> list[dict[str, Any]]:
    """The rows. Collective."""

    def times(mode: str) -> list[float]:
        return [of_mode[mode].seconds for of_mode in rounds]

    rows: list[dict[str, Any]] = [
        {
            "name": mode,
            **summary(times(mode)),
            "waits_ms": 1e3 * median(of_mode[mode].waits for of_mode in rounds),
            "cpu_ms": 1e3 * median(of_mode[mode].busy for of_mode in rounds),
        }
        for mode in MODES
    ]
    newton_schulz, could_hide = [], []
    for of_mode in rounds:
        work = of_mode[COMPUTE].of_waves("orthogonalize")
        gathers, scatters = (of_mode[COLLECTIVES].of_waves(name) for name in ("wait_gather", "wait_scatter"))
        beside = {wave: gathers.get(wave + 1, 0.0) + scatters.get(wave - 1, 0.0) for wave in work}
        newton_schulz.append(slowest(sum(work.values())))
        could_hide.append(slowest(sum(min(work[wave], beside[wave]) for wave in work)))
    rows.append({"name": "Newton-Schulz in it", **summary(newton_schulz)})
    cost = [off - compute for off, compute in zip(times(OFF), times(COMPUTE), strict=True)]
    exposed = [on - compute for on, compute in zip(times(ON), times(COMPUTE), strict=True)]
    hidden = [off - on for off, on in zip(times(OFF), times(ON), strict=True)]
    saved = [late - early for late, early in zip(times(LATE), times(EARLY), strict=True)]
    unhindered = [backward + compute for backward, compute in zip(times(BACKWARD), times(COMPUTE), strict=True)]
    exposed_late, exposed_early = (
        [both - alone for both, alone in zip(times(mode), unhindered, strict=True)] for mode in (LATE, EARLY)
    )
    for name, seconds in (
        ("cost", cost),
        ("exposed", exposed),
        ("hidden", hidden),
        ("could hide", could_hide),
        ("exposed after backward", exposed_late),
        ("exposed, gathers in backward", exposed_early),
        ("saved by gathers in backward", saved),
    ):
        rows.append({"name": name, **summary(seconds), **_share(seconds, cost)})
    waits = [of_mode[OFF].waits for of_mode in rounds]
    unwaited = [of_mode[OFF].waits - of_mode[ON].waits for of_mode in rounds]
    rows.append({"name": "hidden waits, of waits", **summary(unwaited), **_share(unwaited, waits)})
    return rows


def _share(parts: Sequence[float], wholes: Sequence[float]) -> dict[str, float]:
    low, middle, high = quartiles([part / whole for part, whole in zip(parts, wholes, strict=True)])
    return {"share": middle, "share_low": low, "share_high": high}


def _typical(rounds: Sequence[dict[str, Once]], mode: str) -> Once:
    """The run of median time, the same on all ranks."""
    return sorted((of_mode[mode] for of_mode in rounds), key=lambda once: once.seconds)[len(rounds) // 2]


def draw(timelines: dict[str, list[list[Span]]], path: Path) -> None:
    """Draw the lanes of each rank, with the pipeline on above the pipeline off."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = {"gather": 0, "orthogonalize": 1, "scatter": 2, "unpack": 3, "apply": 3, "apply_own": 3}
    colors = {"works": "tab:blue", "in flight": "lightsteelblue", "waits": "tab:red"}
    figure = Figure(figsize=(12, 7), layout="constrained")
    plots = figure.subplots(len(timelines), 1, sharex=True)
    for plot, (mode, by_rank) in zip(plots, timelines.items(), strict=True):
        start = min(span.start for spans in by_rank for span in spans)
        labels = []
        for rank, spans in enumerate(by_rank):
            launched = {(span.name, span.wave): span.end for span in spans if not span.name.startswith("wait")}
            for span in sorted(spans, key=lambda span: span.name.startswith("wait")):
                phase = span.name.removeprefix("wait_")
                if phase == span.name:
                    bars = [(span.start, "works")]
                else:
                    bars = [(min(launched[phase, span.wave], span.start), "in flight"), (span.start, "waits")]
                for begin, kind in bars:
                    width, left = 1e3 * (span.end - begin), 1e3 * (begin - start)
                    plot.barh(5 * rank + lanes[phase], width, left=left, color=colors[kind], edgecolor="white", linewidth=0.3)
            labels += [f"rank {rank}: {lane}" for lane in ("gather", "orthogonalize", "scatter", "unpack, apply")]
        plot.set_yticks([5 * rank + lane for rank in range(len(by_rank)) for lane in range(4)], labels)
        plot.invert_yaxis()
        plot.set_title(f"{mode}: {1e3 * (max(span.end for spans in by_rank for span in spans) - start):.0f} ms", loc="left")
    plots[-1].set_xlabel("ms")
    figure.legend(handles=[Patch(color=color, label=label) for label, color in colors.items()], loc="outside upper right", ncols=3)
    figure.savefig(path, dpi=110)


def run_on_hosts(rate: str) -> None:
    """Run this command again on each host, as its rank."""
    with two_hosts(rate) as hosts:
        ranks = []
        for rank, host in enumerate(hosts):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
            environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            ranks.append(subprocess.Popen([*host, sys.executable, *sys.argv], env=os.environ | environment))
        while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
            time.sleep(0.1)
        # After a failure the other rank would wait forever.
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(statuses):
        sys.exit(1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the network between the hosts, in the notation of tc (1gbit)")
    parser.add_argument("--preset", choices=("omn", "torch"), default="torch")
    parser.add_argument("--wave-mib", type=mebibytes, help="byte budget of a wave (default: the optimizer's)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, help="draw a time line into this file")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        reason = why_not()
        if reason is not None:
            parser.error(reason)
        run_on_hosts(arguments.rate)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds = measure(arguments.preset, arguments.wave_mib, arguments.layers, arguments.rounds)
    rows = table(rounds)
    timelines: list[dict[str, list[Span]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(timelines, {mode: _typical(rounds, mode).spans for mode in (ON, OFF)})
    if dist.get_rank() == 0:
        show(rows, arguments.json)
        if arguments.picture:
            draw({mode: [of_mode[mode] for of_mode in timelines] for mode in (ON, OFF)}, arguments.picture)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
