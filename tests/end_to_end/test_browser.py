"""What a person sees of a pipeline in Dagster's pages: nothing is missing there, and nothing looks broken."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.end_to_end.project import ASSETS, Project

T = TypeVar("T")

pytestmark = pytest.mark.timeout(900)

BINARY, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1500,1000"
)
OPERATOR = "/assets/auctions/bid_stats"
PATIENCE = 60


class Browser:
    """Chromium, looking at a server's pages."""

    def __init__(self, driver: webdriver.Chrome, url: str, pictures: Path) -> None:
        self.driver = driver
        self.url = url
        self._pictures = pictures

    def open(self, path: str, *texts: str) -> None:
        """Open a page, and wait until it shows all of this."""
        self.driver.get(self.url + path)
        self.shows(*texts)

    def shows(self, *texts: str) -> None:
        """Wait until the page shows all of this."""
        self.wait(lambda: all(text in self.text for text in texts), f"not all of {texts} are shown")

    def find(self, xpath: str) -> list[WebElement]:
        """Wait for elements."""
        return self.wait(lambda: self.driver.find_elements(By.XPATH, xpath), f"there is no {xpath}")

    def click(self, xpath: str) -> None:
        """Click on something, once that is possible."""

        def click() -> bool:
            for element in self.driver.find_elements(By.XPATH, xpath):
                element.click()
                return True
            return False

        self.wait(click, f"{xpath} cannot be clicked")

    def wait(self, look: Callable[[], T], otherwise: str) -> T:
        """Wait until there is something to be seen, while the page is still changing."""
        passing = [StaleElementReferenceException, ElementClickInterceptedException, ElementNotInteractableException]
        try:
            return WebDriverWait(self.driver, PATIENCE, 0.3, passing).until(lambda _: look())
        except TimeoutException:
            self.picture("missing")
            raise AssertionError(f"{self.driver.current_url}: {otherwise}, but:\n{self.text[:2000]}") from None

    def point_at(self, element: WebElement) -> None:
        """Move the mouse there."""
        ActionChains(self.driver).move_to_element(element).perform()

    def scroll_to(self, element: WebElement) -> None:
        """Bring it to the top."""
        self.driver.execute_script("arguments[0].scrollIntoView()", element)

    def picture(self, name: str) -> None:
        """Keep what is to be seen."""
        self.driver.save_screenshot(str(self._pictures / f"{name}.png"))

    @property
    def text(self) -> str:
        """All that can be read."""
        return str(self.driver.execute_script("return document.body.innerText"))

    def complaints(self) -> list[str]:
        """Errors on the page, and those that it wrote to the console."""
        found = [text for text in ("Unexpected error", "PythonError", "GraphQL error") if text in self.text]
        log = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        # It also asks the Internet for what is new; that is not ours.
        return found + [row["message"] for row in log if row["level"] == "SEVERE" and self.url in row["message"]]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of the pages are put."""
    directory = Path(os.environ.get("ARROYO_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="module")
def browser_on(project: Project, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser, while the sensor is off: so all that is to be seen has ended, and stays."""
    options = webdriver.ChromeOptions()
    options.binary_location = BINARY
    for option in (*OPTIONS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    project.pause()
    with webdriver.Chrome(options, Service(DRIVER)) as driver:
        yield Browser(driver, project.server.url, pictures)
    project.unpause()


@pytest.fixture
def browser(browser_on: Browser) -> Iterator[Browser]:
    """A browser that must have nothing to complain about in the end."""
    yield browser_on
    assert browser_on.complaints() == []


@pytest.fixture(scope="module", autouse=True)
def chromium() -> None:
    """Skip all of this where there is no browser."""
    if not (shutil.which(BINARY) and shutil.which(DRIVER)):
        reason = "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def test_the_lineage_is_the_dataflow(browser: Browser) -> None:
    edges = "//*[local-name() = 'path'][@marker-end]"
    browser.open("/asset-groups", "bids", *ASSETS)
    assert len(browser.find(edges)) == 4
    browser.click("//button[.//*[@aria-label = 'panel_show_right']]")  # make room for the graph, here and below
    browser.open("/locations/auctions/asset-groups/auctions/lineage", "bids", *ASSETS)
    browser.shows("5 / 5 Passed", "2 / 2 Passed", "100% filled", "Delta Lake", "Parquet", "PySpark")
    assert len(browser.find(edges)) == 4
    browser.picture("lineage")


def test_an_asset_tells_what_it_is(browser: Browser) -> None:
    browser.open(OPERATOR, "bids = count(), top_price = max(price), by auction", "Takes bids where price > 100")
    browser.shows("Columns", "window_start", "timestamp[us, tz=UTC]", "top_price", "auctions_controller", "PySpark")
    browser.shows("arroyo/rows_in", "arroyo/state_bytes", "arroyo/subtasks", "Upstream assets", "Downstream assets")


def test_numbers_are_plotted_over_the_epochs(browser: Browser) -> None:
    browser.open(OPERATOR, "arroyo/rows_in")
    browser.click("//button[contains(., 'Plots')]")
    browser.shows("arroyo/rows_in", "arroyo/state_rows", "arroyo/handle_checkpoint_ms", "arroyo/watermark_lag_s")
    assert len(browser.find("//canvas")) > 10
    browser.scroll_to(browser.find("//*[text() = 'arroyo/process_ms']")[0])
    drawn = """return Array.from(document.querySelectorAll('canvas')).map(canvas =>
        canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value != 0))"""
    browser.wait(lambda: all(browser.driver.execute_script(drawn)), "some plots stay empty")
    browser.picture("plots")


def test_epochs_are_partitions(browser: Browser, project: Project) -> None:
    epochs = [row["epoch"] for row in project.epochs()]
    last = f"{epochs[-1]:08d}"
    browser.open(f"{OPERATOR}?view=partitions&partition={last}", f"Materialized ({len(epochs)})", "Failed (0)")
    browser.shows(*(f"{epoch:08d}" for epoch in epochs), "arroyo/epoch", "arroyo/delta_rows", "handle_checkpoint_ms")
    browser.picture("partitions")


def test_checks_have_passed(browser: Browser) -> None:
    browser.open(f"{OPERATOR}?view=checks", "Checks (5)", "aligned", "files_whole", "state_chain", "replay_identical")
    browser.shows("watermark_monotonic", "Passed", "Every subtask was aligned once")
    assert not {"Failed", "Not executed", "Running"} & set(browser.text.splitlines())


def test_the_way_of_the_barrier_is_a_picture(browser: Browser) -> None:
    browser.open(OPERATOR, "arroyo/barrier_way")
    opaque = """for (let at = arguments[0]; at; at = at.parentElement)
        if (getComputedStyle(at).opacity != '1') return false;
        return true"""

    def drawn() -> bool:
        """Whether the picture is there. The page may be rendered anew at any time, without the dialog."""
        images = browser.driver.find_elements(By.XPATH, "//img[contains(@src, 'data:image/svg+xml')]")
        if not images:
            for button in browser.driver.find_elements(By.XPATH, "//*[text() = '[Show Markdown]']")[:1]:
                button.click()
            return False
        wide = int(images[0].get_attribute("naturalWidth") or 0) > 500
        return wide and bool(browser.driver.execute_script(opaque, images[0]))

    browser.wait(drawn, "the picture is not drawn")
    browser.picture("barrier_way")


def test_a_run_shows_its_steps(browser: Browser, project: Project) -> None:
    [run] = project.runs(limit=1)
    browser.open(f"/runs/{run['runId']}", "Success", "4 assets", "14 checks", "Launched by", "auctions_controller")
    for step in ("begin_epoch", "bid_stats", "price_records", "commit_epoch"):
        browser.find(f"//*[@data-tooltip = 'auctions_epoch.{step}']")
    # The chart is too low for its steps until one makes room for it.
    divider = browser.find("//*[contains(@class, 'SplitPanelContainer_verticalDivider')]")[0]
    ActionChains(browser.driver).drag_and_drop_by_offset(divider, 0, 120).perform()
    browser.picture("run")


def test_the_job_is_made_of_the_stages(browser: Browser) -> None:
    browser.open("/locations/auctions/jobs/auctions_checkpoint", "Takes one epoch of auctions.")
    browser.click("//label[contains(., 'View as Asset Graph')]")
    browser.click("//label[contains(., 'Explode graphs')]")
    browser.shows("begin_epoch", "bid_stats", "price_records", "commit_epoch", "One Spark job: reads bids")


def test_the_controller_says_why_it_waits(browser: Browser, project: Project) -> None:
    project.unpause()
    browser.open("/locations/auctions/sensors/auctions_controller", "Takes an epoch of auctions every 5 seconds")
    browser.shows("1 run requested", "(1 partition created)", "0 runs requested")

    def read() -> bool:
        # One reads it when the mouse is on the status of a tick.
        for status in browser.driver.find_elements(By.XPATH, "//tbody//td[2]//*[text() = '0 runs requested']")[:8]:
            browser.point_at(status)
            time.sleep(0.5)
            reasons = {str(tick["skipReason"]) for tick in project.ticks()}
            if any(reason in browser.text for reason in reasons if "is being taken by run" in reason):
                return True
        return False

    browser.wait(read, "it does not say that an epoch is being taken")
    browser.picture("controller")
