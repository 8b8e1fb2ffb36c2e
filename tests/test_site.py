"""The documentation site in a browser, opened from files as `make docs` writes them."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from test_page import ABSENT, browser

SITE = Path(__file__).parent.parent / "site"
NAMES = ["index.html", "precision.html", "method.html", "pinns.html", "gallery.html", "coming-from.html"]
absent = [*ABSENT, *([] if (SITE / NAMES[0]).exists() else ["the site (make docs)"])]
pytestmark = pytest.mark.skipif(bool(absent), reason=f"needs a browser and the site: {', '.join(absent)} absent")

__all__ = ["browser"]  # a fixture


@pytest.fixture
def visit(browser):
    """Opens a page; afterwards the browser must have had nothing to complain about and no address but files."""

    def open_page(name, width=1300, scheme="light"):
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get((SITE / name).as_uri())
        browser.execute_script("localStorage.clear()")  # the scheme of an earlier visit
        browser.refresh()
        browser.execute_async_script("const done = arguments[0]; document.fonts.ready.then(() => done())")
        return browser

    yield open_page
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert browser.get_log("browser") == []
    sources = browser.execute_script("return performance.getEntriesByType('resource').map(own => own.name)")
    assert [source for source in sources if not source.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("width", [400, 1300])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_its_formulas_and_figures_and_fits_the_screen(visit, name, width):
    page = visit(name, width)
    unset = "return [...document.querySelectorAll('.arithmatex')].filter(a => !a.querySelector('.katex')).length"
    assert page.execute_script(unset) == 0
    text = page.execute_script("return document.querySelector('.md-content').innerText")
    assert "$" not in text and "\\(" not in text
    figures = "return [...document.querySelectorAll('.md-content img')].filter(own => !own.naturalWidth).length"
    assert page.execute_script(figures) == 0
    whole = "const root = document.documentElement; return root.scrollWidth - root.clientWidth"
    assert page.execute_script(whole) <= 0


def test_formulas_are_set_in_their_own_letters(visit):
    page = visit("method.html")
    assert len(page.find_elements("css selector", ".arithmatex .katex-display")) == 4
    loaded = "return [...document.fonts].filter(own => own.status === 'loaded').map(own => own.family)"
    assert {"KaTeX_Main", "KaTeX_Math"} <= {family.strip('"') for family in page.execute_script(loaded)}


def test_search_finds_a_page_without_a_server(visit):
    page = visit("index.html")
    box = page.find_element("css selector", ".md-search__input")
    box.click()
    box.send_keys("troubleshooting")
    page.implicitly_wait(20)  # for the first hit
    hit = page.find_element("css selector", ".md-search-result__item a")
    page.implicitly_wait(0)
    assert "troubleshooting.html" in hit.get_attribute("href")


def test_figures_follow_the_dark_scheme(visit):
    page = visit("index.html", scheme="dark")
    scheme = page.execute_script("return document.body.dataset.mdColorScheme")
    figure = page.find_element("css selector", ".md-content img")
    assert scheme == "slate" and "invert" in figure.value_of_css_property("filter")
    page = visit("index.html")
    assert page.find_element("css selector", ".md-content img").value_of_css_property("filter") == "none"
