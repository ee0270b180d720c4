"""What holds for every test: no device means Triton's interpreter, one thread, one seed, and nothing left behind."""

import gc
import importlib.util
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.interpreter import remember_what_is_wrapped

if not torch.cuda.is_available():
    # The decorators of triton read this once, when the kernels are defined: before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    remember_what_is_wrapped()

torch.set_num_threads(1)

# Set by torch or CUDA once per process, on first use, and harmless to whoever comes after.
SET_ONCE = {"CUDA_MODULE_LOADING", "KINETO_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
NUM_DEVICES_NEEDED = {"gpu": 1, "multigpu": 2}
BROWSER_PROGRAMS = ("chromium", "chromedriver")
# Files that take more than half a minute. A worker has a whole file: one that begins late is waited for by all.
LONGEST = (
    "trainer_strategy",
    "trainer_checkpoints",
    "pipeline_3d",
    "pipeline_trainer",
    "parity",
    "seam",
    "launch",
    "codec_kernels",
    "examples_models",
    "fabric_strategy",
    "data_parallel",
    "data_parallel_strategies",
    "activation_examples",
)
deselected = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreter: runs kernels on the CPU, in Triton's interpreter")
    config.stash[deselected] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what this machine cannot run, which `pytest_terminal_summary` says; the longest files come first."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)  # else in the order they are in
    reasons = [reason_to_deselect(item) for item in items]
    removed = [item for item, reason in zip(items, reasons, strict=True) if reason]
    if removed:
        config.stash[deselected].update(reason for reason in reasons if reason)
        config.hook.pytest_deselected(items=removed)
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]


def pytest_collection_finish(session: pytest.Session) -> None:
    """A million objects of torch and its like will not be garbage: a collection takes 0.3 s with them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def reason_to_deselect(item: pytest.Item) -> str | None:
    num_devices = torch.cuda.device_count()
    for marker, num_needed in NUM_DEVICES_NEEDED.items():
        if item.get_closest_marker(marker) and num_devices < num_needed:
            return f"marked {marker}: needs {num_needed} CUDA device(s), this machine has {num_devices}"
    if item.get_closest_marker("browser") and not all(map(shutil.which, BROWSER_PROGRAMS)):
        return f"marked browser: needs {' and '.join(BROWSER_PROGRAMS)} (Debian: chromium, chromium-driver)"
    if item.get_closest_marker("slow") and "slow" not in item.config.option.markexpr:
        return "marked slow: minutes on many ranks; runs with -m slow"
    if item.get_closest_marker("torchao") and importlib.util.find_spec("torchao") is None:
        return "marked torchao: needs torchao, which the extra `test` installs"
    if item.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") != "1":
        return "marked interpreter: kernels run on this machine's CUDA device, in the tests marked gpu"
    return None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several workers, which have no terminal
        session.config.workeroutput["deselected"] = dict(session.config.stash[deselected])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker has left out; each of them leaves out the same."""
    node.config.stash[deselected] = Counter(getattr(node, "workeroutput", {}).get("deselected", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, number in sorted(config.stash[deselected].items()):
        terminalreporter.write_line(f"{number} test(s) not run, {reason}")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def compiler_is_loaded() -> None:
    """Import what torch.compile imports at its first use: 1.5 s here instead of in each forked rank of each test."""
    torch.compile(torch.neg, backend="aot_eager")(torch.zeros(1))


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Fail a test that leaves an environment variable set, changed or removed; put it back for the next one."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    leaked = sorted(name for name in names if name not in SET_ONCE and not name.startswith("PYTEST_"))
    for name in leaked:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not leaked, f"the test leaves environment variables changed: {', '.join(leaked)}"


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    """Fail a test that leaves a default process group; destroy it for the next one."""
    before = dist.is_initialized()
    yield
    leaked = dist.is_initialized() and not before
    if leaked:
        dist.destroy_process_group()
    assert not leaked, "the test leaves a default process group; call torch.distributed.destroy_process_group()"


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread running which would keep the process alive."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(timeout=2)  # one that is just ending is no leak
    leaked = sorted(thread.name for thread in left if thread.is_alive())
    assert not leaked, f"the test leaves threads running: {', '.join(leaked)}"
