"""Versions, devices without FP8, and machines without triton."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_taco import _compat, codec

PROJECT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0", (2, 11)),
        ("2.11.0+cu130", (2, 11)),
        ("2.12.1", (2, 12)),
        ("2.13.0a0+git1234567", (2, 13)),
        ("2.13.1.dev20260101+cpu", (2, 13)),
    ],
)
def test_tested_torch_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str, expected: tuple[int, int]) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert _compat.torch_version() == expected
    _compat.require_known_torch()


@pytest.mark.parametrize(
    "version", ["1.13.1", "2.1.0", "2.2.0", "2.10.0", "2.10.9+cu130", "2.14.0", "2.14.0.dev20260101+cpu", "3.11.0"]
)
def test_other_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    text = (
        f"torch {version} is installed, but lightning_taco compresses the redistribution of DTensor in torch 2.11 to "
        "2.13 only, since it changes at each minor release. Install 'torch>=2.11,<2.14', or pass compression=None."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        _compat.require_known_torch()


def test_unreadable_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "unknown")
    with pytest.raises(RuntimeError, match=r"^cannot read the version 'unknown'$"):
        _compat.require_known_torch()


def test_the_project_asks_for_the_torch_that_is_accepted() -> None:
    oldest, newest = _compat.OLDEST_TORCH, _compat.NEWEST_TORCH
    requirement = f'"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"'
    assert requirement in (PROJECT / "pyproject.toml").read_text()
    _compat.require_known_torch()  # and this environment has such a one


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    for cached in (_compat.has_native_fp8, _compat.has_triton):
        cached.cache_clear()
    yield
    for cached in (_compat.has_native_fp8, _compat.has_triton):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), False), ((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)],
)
@pytest.mark.usefixtures("fresh_caches")
def test_fp8_needs_capability_8_9(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool) -> None:
    asked = []

    def get_device_capability(index: int) -> tuple[int, int]:
        asked.append(index)
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _compat.supports_fp8(torch.device("cuda", 1)) is expected
    assert _compat.supports_fp8(torch.device("cuda")) is expected
    assert asked == [1, 3], "the device itself is asked, or the current one"
    assert _compat.supports_fp8(torch.device("cuda", 1)) is expected
    assert asked == [1, 3], "asked once a device"


def test_fp8_on_cpu_needs_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("asked CUDA")

    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    assert _compat.supports_fp8(torch.device("cpu")) is True


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.usefixtures("fresh_caches")
def test_kernels_run_on_cuda_with_triton_only(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name) if installed else None)
    assert _compat.has_triton() is installed
    assert codec.uses_triton(SimpleNamespace(is_cuda=True)) is installed
    assert codec.uses_triton(torch.ones(1)) is False


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # import and find_spec both say that there is none
import torch
import lightning_taco
from lightning_taco import _compat
from lightning_taco.codec import decode, decode_sum, encode, requantize
from lightning_taco.config import CodecConfig

assert not _compat.has_triton()
values = torch.randn(2, 300).bfloat16()
for element in ("e4m3", "int8"):
    codec = CodecConfig(element=element)
    messages = encode(values, codec)
    again = requantize(messages, codec, 300)
    assert decode(again, codec, 300, torch.bfloat16).shape == (1, 300)
    error = decode_sum(messages, codec, 300, torch.float32) - values.float().sum(0)
    assert error.norm() < 0.05 * values.float().norm()
assert not torch.cuda.is_initialized()
assert not any(name.startswith("triton") and module for name, module in sys.modules.items())
print("works")
"""


def test_package_works_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "works"
