"""`fxshard doctor`: what it finds, and that it finds what is broken."""

import socket
import tomllib
from pathlib import Path

import pytest
import torch

import fxshard
from fxshard.cli import doctor, main
from fxshard.runtime.kernels import computed_by

PYPROJECT = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_this_installation_is_not_broken(capsys, monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 0
    lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    assert {level for level, *_ in lines} <= {"ok", "-", "warn"}
    found = {what: text for _, what, text in lines}
    assert found["torch"].startswith(torch.__version__)
    assert found["kernels"].startswith("on cpu: torch")
    assert "the plain model's, within rounding" in found["step"] and "forms and sums" in found["gloo"]
    assert not torch.distributed.is_initialized()


def test_the_supported_versions_are_those_of_the_package():
    low, before = (f"{major}.{minor}" for major, minor in doctor.TORCH)
    assert f"torch>={low},<{before}" in PYPROJECT["project"]["dependencies"]


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.10.1", "warn"),
        ("2.11.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("2.14.0a0+git1", "warn"),
        ("3.0", "warn"),
        ("x", "warn"),
    ],
)
def test_versions_of_torch(version, level):
    assert doctor.torch_version(version).level == level


def test_a_wrong_step_is_broken(capsys, monkeypatch):
    """Parameters that come back changed; and a compile that fails. Both end in exit status 1."""
    whole = fxshard.ShardedParameter.full_tensor
    monkeypatch.setattr(fxshard.ShardedParameter, "full_tensor", lambda self: whole(self) + 1)
    assert main(["doctor"]) == 1
    assert "broken  step          on cpu: AssertionError: Tensor-likes are not close" in capsys.readouterr().out

    def fail(*args, **kwargs):
        raise OSError("no compiler\nat all")

    monkeypatch.setattr(fxshard, "compile", fail)
    found = doctor.step(torch.device("cpu"))
    assert found.level == "broken" and found.text.startswith("on cpu: OSError: no compiler;")


def test_a_gloo_that_forms_no_group_is_broken(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    found = doctor.gloo()
    assert found.level == "broken" and "no group of one rank could be made" in found.text
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ({}, "ok", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 LOCAL_RANK=1"),
        (dict.fromkeys(TORCHRUN), "ok", "none is described"),
        ({"LOCAL_RANK": None}, "ok", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "broken", "but no MASTER_ADDR, MASTER_PORT: start with torchrun"),
        ({"RANK": "2"}, "broken", "RANK has to be below WORLD_SIZE"),
        ({"WORLD_SIZE": "two"}, "broken", "WORLD_SIZE is no number"),
        ({"RANK": "-1"}, "broken", "RANK is no number"),
    ],
)
def test_the_world_that_the_environment_describes(change, level, text):
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    found = doctor.world(environment)
    assert found.level == level and text in found.text


def test_a_master_without_an_address_is_broken(monkeypatch):
    def unknown(*args):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = doctor.world(TORCHRUN)
    assert found.level == "broken" and "MASTER_ADDR has no address" in found.text and "not known" in found.text


def test_more_ranks_than_devices_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert doctor.world(TORCHRUN).level == "warn"
    assert doctor.world({**TORCHRUN, "LOCAL_RANK": "0"}).level == "ok"


def test_what_is_not_installed_is_no_fault_unless_it_is_needed():
    assert doctor._package("no_such_package", "nothing").level == "-"
    assert doctor._package("no_such_package", "nothing", needed=True).level == "warn"


def test_tensors_on_a_cpu_are_computed_by_torch():
    assert computed_by(torch.device("cpu")) == "torch"
