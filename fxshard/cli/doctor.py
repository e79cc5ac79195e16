"""say what is installed, what would run where, and whether a step works; exit status 1 if something is broken"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.cli.syntax import first_line
from fxshard.runtime.kernels import computed_by
from fxshard.viz.dag import find_program

TORCH = ((2, 11), (2, 14))
"""From the first on, before the second."""

EPILOG = """\
examples:
  fxshard doctor
  torchrun --nproc-per-node 2 -m fxshard doctor
"""


@dataclass(frozen=True)
class Finding:
    """`level`: 'ok', '-' (optional and not there), 'warn' (something will be missed), or 'broken'."""

    level: str
    what: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(parsed: argparse.Namespace) -> int:
    broken = 0
    for finding in findings(os.environ):
        broken += finding.level == "broken"
        print(f"{finding.level:<6}  {finding.what:<12}  {finding.text}", flush=True)
    return 1 if broken else 0


def findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What there is to say, line by line, as it is found out."""
    yield Finding("ok", "fxshard", fxshard.__version__)
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield torch_version(torch.__version__)
    yield _package(
        "triton", "the kernels on CUDA; torch stands in with more launches", needed=torch.cuda.is_available()
    )
    yield _package("transformers", "models given as hf:NAME")
    yield _dot()
    yield _package("rich", "tables and colours in the examples")
    devices = _devices()
    yield Finding(
        "ok", "devices", ", ".join([*map(_device_text, devices), f"threads of torch: {torch.get_num_threads()}"])
    )
    yield from _backends()
    yield world(environment)
    for device in devices:
        yield _kernels(device)
    for device in devices:
        yield step(device)


def torch_version(version: str) -> Finding:
    """Whether fxshard was tried on this version of torch."""
    (low, before), numbers = TORCH, re.match(r"(\d+)\.(\d+)", version)
    supported = f"{low[0]}.{low[1]} up to, not including, {before[0]}.{before[1]}"
    if numbers and low <= (int(numbers[1]), int(numbers[2])) < before:
        return Finding("ok", "torch", f"{version} (supported: {supported})")
    return Finding("warn", "torch", f"{version} was not tried; supported: {supported}: install one of these")


def _package(name: str, use: str, needed: bool = False) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding("warn" if needed else "-", name, f"not installed (for {use}); pip install {name}")
    return Finding("ok", name, f"{importlib.metadata.version(name)} (for {use})")


def _dot() -> Finding:
    try:
        found = find_program()
    except RuntimeError as error:
        return Finding("-", "dot", str(error))
    return Finding("ok", "dot", found)


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _device_text(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({os.cpu_count()} cores)"
    found = torch.cuda.get_device_properties(device)
    return f"{device} ({found.name}, {found.total_memory / 2**30:.0f} GiB)"


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding(
            "warn", "distributed", "this torch is built without it: only virtual worlds run; install another build"
        )
        return
    yield gloo()
    cuda = torch.cuda.is_available()
    if dist.is_nccl_available():
        text = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "built in, but there is no CUDA device"
        yield Finding("ok", "nccl", text)
    else:
        text = "not in this build of torch" + (": ranks on CUDA cannot run; install a CUDA build" if cuda else "")
        yield Finding("broken" if cuda else "-", "nccl", text)


def gloo() -> Finding:
    """Whether a group of this process alone forms and sums; it fails where the machine cannot find its own address."""
    if not dist.is_gloo_available():
        return Finding("warn", "gloo", "not in this build of torch: ranks on CPUs cannot run")
    if dist.is_initialized():
        return Finding("ok", "gloo", "not tried, a process group is there")
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    except Exception as error:
        text = f"no group of one rank could be made: {first_line(error)}; GLOO_SOCKET_IFNAME names the network to use"
        return Finding("broken", "gloo", text)
    return Finding("ok", "gloo", "a group of one rank forms and sums")


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world(environment: Mapping[str, str]) -> Finding:
    """What torch.distributed would make of these variables, which torchrun sets."""
    given = {name: environment[name] for name in (*NEEDED, "LOCAL_RANK") if name in environment}
    if not given:
        return Finding(
            "ok", "world", "none is described (no RANK, WORLD_SIZE): compile makes a virtual one in this process"
        )
    text = " ".join(f"{name}={text}" for name, text in given.items())
    if missing := [name for name in NEEDED if name not in given]:
        return Finding(
            "broken", "world", f"{text}, but no {', '.join(missing)}: start with torchrun, or set all of them"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
        if not given.get(name, "0").isdecimal():
            return Finding("broken", "world", f"{text}: {name} is no number")
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        return Finding("broken", "world", f"{text}: RANK has to be below WORLD_SIZE")
    try:
        socket.getaddrinfo(given["MASTER_ADDR"], int(given["MASTER_PORT"]))
    except OSError as error:
        return Finding(
            "broken", "world", f"{text}: MASTER_ADDR has no address ({error}); name a host that all ranks reach"
        )
    devices = torch.cuda.device_count()
    if devices and int(given.get("LOCAL_RANK", "0")) >= devices:
        return Finding(
            "warn", "world", f"{text}: this host has {devices} CUDA devices; start no more ranks on it than that"
        )
    return Finding("ok", "world", text)


def _kernels(device: torch.device) -> Finding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Triton is missing is a line of its own
        found = computed_by(device)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu":
        note = "; Triton's interpreter where use_triton=True asks for it" if interpreted else ""
        return Finding("ok", "kernels", f"on cpu: {found}{note}")
    if interpreted:
        return Finding(
            "warn", "kernels", f"on {device}: {found}, as TRITON_INTERPRET=1 keeps Triton off CUDA: unset it"
        )
    return Finding("ok" if found == "triton" else "warn", "kernels", f"on {device}: {found}")


def step(device: torch.device) -> Finding:
    """Train a small model for one step, plain and over two virtual shards, and compare loss and parameters."""
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
            x = torch.randn(4, 6, device=device)
        model = fxshard.compile(copy.deepcopy(plain), units=nn.Linear, world=fxshard.VirtualWorld(2, device=device))
        losses = []
        for trained in (plain, model):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            loss = trained(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        for expected, parameter in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(parameter.full_tensor(), expected.detach())
    except Exception as error:
        return Finding("broken", "step", f"on {device}: {first_line(error)}; a report is welcome, with this page")
    return Finding("ok", "step", f"on {device}: one step over two virtual shards is the plain model's, within rounding")
