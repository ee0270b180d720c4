"""How long the report of a long run takes: to build the page, and to open it in a browser.

Writes the log of a run that never was, by `RunLogger` itself: a loss and a gradient norm of each step; every 50 steps
what `CompressionMonitor` logs of each site, by its own settings. In it lie a spike of the loss, one of an error and a
NaN, one step each, which the page has to show. Opens the page in headless Chromium, as a reader's window (the plots
that are on the screen) and in a window so high that all plots are drawn at once.

    python examples/benchmarks/report_page.py
    python examples/benchmarks/report_page.py --steps 20000 --sites 100 --opens 3

Needs the extra ``test`` (plotly, selenium) and Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_taco.callbacks.events import Event
from lightning_taco.callbacks.run_logger import RunLogger
from lightning_taco.report import report_of, write_page

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

SAMPLE_EVERY, NUM_EXACT_SITES, NUM_HISTOGRAMS = 50, 8, 4  # of CompressionMonitor
QUANTILES = ("50", "90", "99", "99.9", "100")
SPIKE, ERROR_SPIKE = 987.0, 0.987
WINDOWS = {"a window of 1280 x 900": 900, "all plots at once": 8000}
TIME_LIMIT_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--sites", type=int, default=300)
    parser.add_argument("--opens", type=int, default=5, help="how often the page is opened in each window")
    options = parser.parse_args()
    if options.steps < 4 * SAMPLE_EVERY or options.sites < 2 or options.opens < 1:
        parser.error(f"give --steps of at least {4 * SAMPLE_EVERY}, --sites of at least 2 and --opens of at least 1.")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        write_run(run, options.steps, site_names(options.sites))
        num_bytes = sum(path.stat().st_size for path in run.iterdir())
        print(f"log: {options.steps} steps, {options.sites} sites, {num_bytes / 1e6:.0f} MB")
        started = time.perf_counter()
        page = write_page(report_of(run), run / "report.html")
        print(f"built in {time.perf_counter() - started:.1f} s, {page.stat().st_size / 1e6:.2f} MB")
        with headless_chromium() as browser:
            for name, height in WINDOWS.items():
                seconds = [seconds_to_open(browser, page, height) for _ in range(options.opens)]
                check_page(browser)
                times = f"{median(seconds):.2f} s (median of {len(seconds)}; {min(seconds):.2f} to {max(seconds):.2f})"
                print(f"{name}: {num_drawn(browser)} plots in {times}")


def site_names(num_sites: int) -> list[str]:
    """Places of a deep model, half of them of its forward."""
    places = ("attention.output", "mlp.down")
    return [
        f"{direction}/model.blocks.{index // 2}.{places[index % 2]}/all_reduce"
        for direction, number in (("forward", -(-num_sites // 2)), ("backward", num_sites // 2))
        for index in range(number)
    ]


def write_run(folder: Path, num_steps: int, sites: list[str]) -> None:
    """The log of a run of `num_steps` steps."""
    logger, rng = RunLogger(folder), random.Random(0)
    logger.log_settings({"strategy": "TacoTPStrategy", "num_ranks": 2, "max_steps": num_steps})
    odd_step = num_steps // 2 // SAMPLE_EVERY * SAMPLE_EVERY  # a sampled one
    for step in range(num_steps):
        loss = 2 + 4 * math.exp(-8 * step / num_steps) + rng.gauss(0, 0.05)
        values = {"train_loss": SPIKE if step == odd_step + 1 else loss, "gradient_norm": rng.lognormvariate(0, 0.3)}
        if step % SAMPLE_EVERY == 0:
            values |= sampled(step, sites, rng)
        if step == odd_step:
            values[f"compression/relative_error/{sites[0]}"] = ERROR_SPIKE
            values[f"compression/relative_error/{sites[1]}"] = math.nan
            logger.log_event(Event(step, "guard", "suspend", sites[1], "a value that is not finite"))
        logger.log_metrics(values, step)
    logger.finalize("success")


def sampled(step: int, sites: list[str], rng: random.Random) -> dict[str, float]:
    """What a measured step logs of the compression."""
    values = {"compression/ratio": 3.88, "compression/total_bytes_sent": 1e6 * step}
    for site in sites:
        error = 0.0065 * rng.lognormvariate(0, 0.2)
        values[f"compression/relative_error/{site}"] = error
        values[f"compression/decibels/{site}"] = 20 * math.log10(error)
        values[f"compression/bytes_saved/{site}"] = 12345678.0
    first = step // SAMPLE_EVERY * NUM_EXACT_SITES
    for place in range(NUM_EXACT_SITES):  # sites take turns
        site = sites[(first + place) % len(sites)]
        values[f"compression/collective_error/{site}"] = 0.009 * rng.lognormvariate(0, 0.2)
        values[f"compression/cancellation/{site}"] = rng.lognormvariate(0, 0.2)
    for site in sites[:NUM_HISTOGRAMS]:
        for when in ("before", "after"):
            for percent in QUANTILES:
                values[f"compression/message_{percent}_{when}_rotation/{site}"] = rng.lognormvariate(0, 0.1)
    return values


@contextmanager
def headless_chromium() -> Iterator[Chrome]:
    """A browser without a screen."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    browser = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def seconds_to_open(browser: Chrome, page: Path, height: int) -> float:
    """From the address to the last plot of the window being drawn."""
    browser.get("about:blank")
    size = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    started = time.perf_counter()
    browser.get(page.as_uri())
    while not browser.execute_script("return document.documentElement.dataset.shown"):
        if time.perf_counter() - started > TIME_LIMIT_S:
            raise TimeoutError(f"the page was not drawn within {TIME_LIMIT_S} s")
        time.sleep(0.01)
    return time.perf_counter() - started


def num_drawn(browser: Chrome) -> int:
    """Plots that are there."""
    return int(browser.execute_script("return document.querySelectorAll('.plot .main-svg:first-child').length"))


def check_page(browser: Chrome) -> None:
    """Fail when thinning out has lost what stood out, for which the page is there."""
    content: dict[str, Any] = browser.execute_script(
        "return JSON.parse(document.getElementById('content').textContent).figures"
    )
    losses = [value for trace in content["loss"]["data"] for value in trace["y"]]
    cells, marks = content["error"]["data"]
    highest = max(value for row in cells["z"] for value in row if value is not None)
    if SPIKE not in losses or highest != ERROR_SPIKE or len(marks["x"]) != 1:
        raise RuntimeError("the page lacks a spike or the NaN that lies in the log")


if __name__ == "__main__":
    main()
