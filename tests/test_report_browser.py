"""The report's page in a real browser: drawn, without errors, searched, sorted, live, dark and light, on a phone."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lightning_taco.callbacks.run_logger import FILE_NAME
from lightning_taco.report import report_of, write_page
from lightning_taco.report.server import LiveReport, LiveServer
from tests.run_logs import DOWN, UP, error_tag, event, scalars, usual_run, write_log

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser

NASTY = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
SITES = [f"forward/model.blocks.{index}.mlp.down/all_reduce" for index in range(12)]
PLOTS = ("loss", "error", "events", "gradients", "bytes", "choice")


@pytest.fixture(scope="module")
def browser() -> Iterator["Chrome"]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(autouse=True)
def no_console_error(browser: "Chrome") -> Iterator[None]:
    browser.get_log("browser")
    yield
    assert browser.get_log("browser") == []
    assert not browser.execute_script("return Boolean(window.hacked)")


def resize(browser: "Chrome", width: int, height: int = 900) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(browser: "Chrome", scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


def shown(browser: "Chrome") -> int:
    """How often the page has drawn itself."""
    return int(browser.execute_script("return document.documentElement.dataset.shown || 0"))


def open_page(browser: "Chrome", address: str, width: int = 1280, height: int = 900) -> None:
    resize(browser, width, height)
    browser.get(address)
    wait(lambda: shown(browser) >= 1, "drawn")


def is_drawn(browser: "Chrome", plot: str) -> bool:
    script = "return Boolean(document.querySelector(arguments[0]))"
    return bool(browser.execute_script(script, f"#plot-{plot} .main-svg"))


def column(browser: "Chrome", table: str, index: int) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(cell => cell.textContent)"
    return browser.execute_script(script, f"#table-{table} tbody td:nth-child({index})")


def screenshot(browser: "Chrome", path: Path) -> Any:
    """Of what is visible, as an array ``[height, width, 3]``; the file stays for whoever wants to look."""
    from PIL import Image

    browser.save_screenshot(str(path))
    return Image.open(path).convert("RGB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [*usual_run(60, SITES), scalars(58, **{error_tag(SITES[3]): "Infinity"}), scalars(59, train_loss="NaN")]
    folder = write_log(tmp_path_factory.mktemp("browser") / "run", lines)
    write_page(report_of(folder, folder), folder / "report.html")
    return folder


def test_page_is_drawn(browser: "Chrome", folder: Path) -> None:
    prefer(browser, "light")
    open_page(browser, (folder / "report.html").as_uri())
    assert not is_drawn(browser, "bytes"), "far below the screen"
    browser.execute_script("location.hash = 'bytes'")
    wait(lambda: is_drawn(browser, "bytes"), "drawn when the reader comes to it")
    open_page(browser, (folder / "report.html").as_uri(), height=6000)
    drawn = "return [...document.querySelectorAll('.plot .main-svg')].map(svg => svg.closest('.plot').id)"
    assert set(browser.execute_script(drawn)) == {f"plot-{name}" for name in PLOTS}
    count = "return document.querySelectorAll(arguments[0]).length"
    assert browser.execute_script(count, "#plot-loss .scatterlayer .trace") >= 5
    assert browser.execute_script(count, "#plot-error .heatmaplayer image") == 1
    assert browser.execute_script(count, "#plot-error .scatterlayer .point") == 1, "the infinite error has a mark"
    assert browser.execute_script(count, "#plot-events .scatterlayer .point") == 1
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    buttons = "return [...document.querySelectorAll('#plot-loss .modebar-btn')].map(button => button.dataset.title)"
    usual = ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]
    assert browser.execute_script(buttons) == usual, "none that uploads"
    assert browser.execute_script("return document.documentElement.scrollWidth") == 1280
    image = screenshot(browser, folder / "light.png")
    assert len(image.crop((0, 300, 1280, 900)).getcolors(1 << 20)) > 50, "something is drawn"


def test_search_and_sort(browser: "Chrome", folder: Path) -> None:
    """By the keyboard alone."""
    from selenium.webdriver import Keys

    open_page(browser, (folder / "report.html").as_uri())
    first = column(browser, "sites", 1)
    assert len(first) == 12
    assert first[0] == "model.blocks.3.mlp.down", "the infinite one"
    search = browser.find_element("id", "search-sites")
    search.send_keys("blocks.1 FORWARD")
    assert sorted(column(browser, "sites", 1)) == [f"model.blocks.{index}.mlp.down" for index in (1, 10, 11)]
    assert browser.find_element("id", "count-sites").text == "3 of 12 rows."
    search.send_keys(Keys.CONTROL + "a", Keys.DELETE)
    headings = browser.find_elements("css selector", "#table-sites th")
    site = headings[0].find_element("tag name", "button")
    site.send_keys(Keys.ENTER)
    assert headings[0].get_attribute("aria-sort") == "ascending"
    in_order = [f"model.blocks.{index}.mlp.down" for index in range(12)]
    assert column(browser, "sites", 1) == in_order, "numbers by their value"
    site.send_keys(Keys.SPACE)
    assert headings[0].get_attribute("aria-sort") == "descending"
    assert column(browser, "sites", 1) == in_order[::-1]
    assert browser.execute_script("return document.activeElement === arguments[0]", site)
    headings[5].find_element("tag name", "button").send_keys(Keys.ENTER)
    assert [heading.get_attribute("aria-sort") for heading in headings[:6:5]] == ["none", "descending"]
    largest = [float(text.rstrip("%")) for text in column(browser, "sites", 6)[1:]]
    assert largest == sorted(largest, reverse=True)


def test_dark_and_light(browser: "Chrome", folder: Path) -> None:
    prefer(browser, "dark")
    open_page(browser, (folder / "report.html").as_uri())
    ink = "return getComputedStyle(document.querySelector('#plot-loss .xtick text')).fill"

    def brightness(name: str) -> int:
        return sum(screenshot(browser, folder / name).getpixel((5, 400)))

    assert brightness("dark.png") < 150
    dark_ink = browser.execute_script(ink)
    browser.find_element("id", "theme").click()
    wait(lambda: browser.execute_script(ink) != dark_ink, "the plot's ink follows")
    assert brightness("switched.png") > 600
    browser.refresh()
    wait(lambda: shown(browser) >= 1, "drawn")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light", "the choice is kept"
    browser.execute_script("localStorage.clear()")
    prefer(browser, "light")


def test_phone(browser: "Chrome", folder: Path) -> None:
    open_page(browser, (folder / "report.html").as_uri(), width=390)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390, "nothing sticks out"
    ends = "return [...document.querySelectorAll('.main-svg')].map(svg => svg.getBoundingClientRect().right)"
    assert max(browser.execute_script(ends)) <= 390
    screenshot(browser, folder / "phone.png")


def test_names_of_a_log_are_text(browser: "Chrome", tmp_path: Path) -> None:
    """Whatever they hold: neither the page nor plotly makes anything else of them."""
    tags = {f"loss {NASTY}": 1.0, error_tag(f"forward/{NASTY}/all_reduce"): 0.5, f"x {NASTY}": 2.0}
    lines = [scalars(0, **tags), event(0, action=NASTY, site=NASTY, reason=NASTY) | {"source": NASTY}]
    folder = write_log(tmp_path / "run", lines)
    (folder / "config.yaml").write_text(NASTY)
    (folder / "break_even.json").write_text(json.dumps([{NASTY: NASTY}]))
    open_page(browser, write_page(report_of(folder), folder / "report.html").as_uri())
    assert column(browser, "sites", 1) == [NASTY]
    assert column(browser, "break_even", 1) == [NASTY]
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert "<img src=x" in browser.execute_script("return document.querySelector('#plot-loss .legendtext').textContent")


def test_live_page_refreshes_and_keeps_the_readers_place(browser: "Chrome", tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", usual_run(30, [DOWN, UP]))
    with LiveServer(LiveReport(report_of(folder), poll_seconds=0.1), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            open_page(browser, server.url)
            wait(lambda: browser.find_element("id", "live").text == "live", "live")
            browser.find_element("id", "search-sites").send_keys("down")
            browser.execute_script("Plotly.relayout('plot-loss', {'xaxis.range': [5, 9]}); window.scrollTo(0, 700)")
            before, place = shown(browser), browser.execute_script("return window.scrollY")
            with (folder / FILE_NAME).open("a") as file:
                file.write(json.dumps(scalars(30, train_loss=0.5, **{error_tag(DOWN): 0.9})) + "\n")
            wait(lambda: shown(browser) > before, "drawn again")
            assert browser.find_element("css selector", "#cards .value").get_attribute("textContent") == "30"
            assert column(browser, "sites", 5) == ["90%"], "the new error of the site that is searched for"
            assert browser.execute_script("return document.getElementById('plot-loss').layout.xaxis.range") == [5, 9]
            assert browser.execute_script("return window.scrollY") == place > 0
            last = "return document.getElementById('plot-loss').data[0].x.at(-1)"
            assert browser.execute_script(last) == 30
            assert browser.execute_script("return document.activeElement.id") == "search-sites"
        finally:
            server.shutdown()
            thread.join()
    wait(lambda: "not connected" in browser.find_element("id", "live").text, "not connected")
    browser.get("about:blank")
    refused = [entry["message"] for entry in browser.get_log("browser")]
    # The connection is refused, or reset under a request: the network's errors have many names, and no other may come.
    assert all("net::ERR_" in message for message in refused), refused
