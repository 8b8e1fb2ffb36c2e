"""The page in a browser: what it draws, against the records behind it."""

import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

import demo
from test_report import page_data, write_run
from woodbury.runs import report

try:
    from selenium import webdriver
except ImportError:
    webdriver = None  # type: ignore[assignment]

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = {"selenium": webdriver, "chromium": CHROMIUM, "chromedriver": CHROMEDRIVER}
ABSENT = [name for name, path in NEEDED.items() if path is None]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"needs a browser: {', '.join(ABSENT)} not installed")

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

# After each epoch from epoch 0 on, by seed.
LOSSES = {
    "smw-gn": [[2.3, 0.4, 0.08, 0.011], [2.4, 0.5, 0.1, 0.01], [2.2, 0.3, 0.09, 0.02]],
    "hf": [[2.3, 0.6, 0.2, 0.05]],
    "sgd": [[2.3, 1.1, 0.7, 0.5]],
}
ERRORS = {"smw-gn": [0.9, 0.07, 0.04, 0.03], "hf": [0.9, 0.08, 0.05, 0.04], "sgd": [0.9, 0.1, 0.07, 0.02]}
SECONDS = {"smw-gn": 2.0, "hf": 30.0, "sgd": 0.5}  # per epoch
DEMO = ("woodbury.fit", *(f"{name}, {rate}" for name in ("torch L-BFGS", "torch Adam") for rate in (1, 2, 3)))
CHARTS = ["train_loss", "test_error", "damping", "ratio"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in [*OPTIONS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The page of three optimizers."""
    folder = tmp_path_factory.mktemp("runs")
    for name, losses in LOSSES.items():
        for seed, values in enumerate(losses):
            settings = {"lr": 0.1 if name == "sgd" else 0.3, "momentum": 0.9, "seed": seed}
            more = {"errors": ERRORS[name], "steps_per_epoch": 20, "seconds_per_epoch": SECONDS[name]}
            write_run(folder / f"{name}-{seed}", name, seed, values, settings=settings, **more)
    return page_of(folder)


def page_of(folder):
    path = folder / "report.html"
    path.write_text(report.html(report.load([folder])), encoding="utf-8")
    return path


class Page:
    """What a reader sees and does."""

    def __init__(self, browser):
        self.browser = browser

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        (element,) = self.all(selector)
        return element

    def each(self, selector, read):
        """What a function of JavaScript says of each element: asked one by one they take 25 ms each."""
        script = f"return [...document.querySelectorAll(arguments[0])].map(own => {read})"
        return self.browser.execute_script(script, selector)

    def choose(self, value):
        self.one(f"option[value={value}]").click()

    def legend(self):
        return self.each(".controls label", "own.innerText.trim()")

    def toggle(self, label):
        return self.all(".controls input")[self.legend().index(label)]

    def labels(self, chart):
        curves = f"[data-quantity={chart}] [id^=curve-]"
        names = self.each(curves, "getComputedStyle(own).display === 'none' ? '' : own.id")
        return [label for index, label in enumerate(self.legend()) if f"curve-{index}" in names]

    def axis_title(self, chart):
        return self.all(f"[data-quantity={chart}] [id='matplotlib.axis_1'] text")[-1].text

    def texts(self, rows):
        """The cells of the rows of a table."""
        return self.each(rows, "[...own.querySelectorAll('th, td')].map(cell => cell.innerText.trim())")

    def ends(self):
        return self.texts(".ends tbody tr")


@pytest.fixture
def visit(browser):
    """Opens a page; afterwards the browser must have had nothing to complain about and nothing to fetch."""

    def open_page(path, width=1300):
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(path.as_uri())
        # Charts are drawn once more when the browser has laid the page out: elements found before that go stale.
        settled = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
        browser.execute_async_script(f"const done = arguments[0]; {settled}")
        return Page(browser)

    yield open_page
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_the_horizontal_axis_can_be_time_or_epochs(visit, comparison):
    page = visit(comparison)
    assert page.axis_title("train_loss") == page.axis_title("test_error") == "epochs"
    page.choose("seconds")
    for chart in ("train_loss", "test_error"):
        assert page.axis_title(chart) == "seconds of training, logarithmic"
    assert page.axis_title("damping") == "epochs"
    page.choose("epochs")
    assert page.axis_title("train_loss") == "epochs"


def test_curves_can_be_hidden_with_the_mouse_and_the_keyboard(visit, comparison):
    page, keys = visit(comparison), webdriver.Keys
    assert [page.labels(chart) for chart in CHARTS] == [list(LOSSES)] * 2 + [["smw-gn", "hf"]] * 2
    page.toggle("smw-gn").click()
    assert not page.toggle("smw-gn").is_selected()
    assert [page.labels(chart) for chart in CHARTS] == [["hf", "sgd"], ["hf", "sgd"], ["hf"], ["hf"]]
    page.toggle("sgd").send_keys(keys.SPACE)
    page.toggle("hf").send_keys(keys.SPACE)
    assert [page.labels(chart) for chart in CHARTS] == [[], [], [], []]
    page.choose("seconds")
    assert page.labels("train_loss") == []
    page.toggle("smw-gn").send_keys(keys.SPACE)
    assert page.toggle("smw-gn").is_selected() and page.labels("train_loss") == ["smw-gn"]


def test_verdict_and_tables_are_on_the_page(visit, comparison):
    page = visit(comparison)
    chance = "; with fewer than 3 seeds each this may be chance."
    assert [sentence.text for sentence in page.all(".takeaway")] == [
        f"Lowest train loss: smw-gn, 0.011{chance}",
        f"Lowest test error: sgd, 2.00 %{chance}",
        "Fastest to a train loss of 0.5, the lowest that all reach: sgd, 1.5 s; smw-gn takes 1.33 times as long"
        f"{chance}",
    ]
    assert page.ends() == page_data(report.load([comparison.parent]))[0]["ends"]["rows"]  # see `test_report.py`
    assert page.all(".best") == []  # two of them have one seed
    assert page.texts("section > .settings tbody tr") == [["lr", "0.3", "0.3", "0.1"]]
    assert not page.one("details .settings").is_displayed()
    page.one("section summary").click()
    assert ["momentum", "0.9", "0.9", "0.9"] in page.texts("details .settings tbody tr")


def test_zero_errors_diverged_and_unfinished_runs_are_said(visit, tmp_path):
    write_run(tmp_path / "a", "smw-gn", losses=[2.0, 0.1, 0.0, 0.0], errors=[0.9, 0.01, 0.0, 0.0])
    write_run(tmp_path / "b", "sgd", losses=[2.0, 1e12, None, None], errors=[0.9, 0.9, 0.9, 0.9])
    write_run(tmp_path / "c", "adam", losses=[2.0, 1.5], errors=[0.9, 0.5], planned=3, extra_steps=1)
    page = visit(page_of(tmp_path))
    rows = {row[0]: row for row in page.ends()}
    assert (rows["smw-gn"][1], rows["sgd"][1], rows["adam"][-1]) == ("0", "diverged", "1 of 3")
    sentences = [sentence.text for sentence in page.all(".takeaway")]
    assert "that all but sgd reach" in sentences[2]
    page.choose("seconds")


def test_each_data_set_has_a_section_of_its_own_and_names_are_shown_as_text(visit, tmp_path):
    write_run(tmp_path / "a", "</script><b>x", dataset="<i>&amp;", settings={"note": "<!-- </script>"})
    write_run(tmp_path / "b", "<script>", dataset="mnist")
    page = visit(page_of(tmp_path))
    names = ["<i>&amp;", "mnist"]
    assert [heading.text for heading in page.all("h2")] == [link.text for link in page.all("nav a")] == names
    assert page.browser.title == "woodbury: <i>&amp;, mnist"
    page.all("section summary")[0].click()
    assert ["note", "<!-- </script>"] in page.texts("details .settings tbody tr")
    assert [row[0] for row in page.ends()] == page.legend()
    assert [row[0] for row in page.ends()] == ["</script><b>x", "<script>"]
    page.all("option[value=seconds]")[0].click()
    axes = page.all("[data-quantity=train_loss] [id='matplotlib.axis_1']")
    assert [axis.text.splitlines()[-1] for axis in axes] == ["seconds of training", "epochs"]


def test_the_page_fits_a_phone_and_a_dark_screen(visit, browser, comparison):
    def background():
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    page = visit(comparison, width=380)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 380
    light = background()
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    try:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        assert light == "rgb(255, 255, 255)" != background()
        assert page.all(".chart svg")[0].value_of_css_property("filter").startswith("invert(1)")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_demo_shows_curves_pictures_and_tables_on_a_phone(visit, browser, comparison, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "1")  # no window
    monkeypatch.setattr(demo, "compare_digits", lambda out, epochs: comparison.parent)
    curves = {name: [(0.1 * step, 0.5**step) for step in range(4)] for name in DEMO}
    monkeypatch.setattr(demo, "run_fits", lambda seconds: (curves, {name: curves[name] for name in DEMO[::3]}))
    monkeypatch.setattr(demo, "solve_poisson", lambda steps: (demo.solution, SimpleNamespace(seconds=1.0)))
    demo.main(["--out", str(tmp_path)])
    page = visit(tmp_path / "index.html", width=400)
    for details in page.all("summary"):
        details.click()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    sizes = browser.execute_script("return [...document.images].map((image) => image.naturalWidth)")
    assert sizes == [demo.GRID, 256, demo.GRID, 256] and page.labels("train_loss") == list(DEMO[::3])
    assert [row[0] for row in page.texts("#digits tbody tr")] == list(LOSSES)
    rows = page.texts("#fits tbody tr")
    assert [row[0] for row in rows] == list(DEMO)
    for axis, title in (("seconds", "seconds of training"), ("epochs", "steps")):
        page.choose(axis)
        assert page.axis_title("train_loss") == title and len(page.labels("train_loss")) == 3
