import pytest
from playwright.sync_api import sync_playwright

from grader.report import render
from tests.fixtures.records import half_done

CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_report_needs_no_sideways_scroll_and_no_network(tmp_path, width, language):
    page_file = tmp_path / "report.html"
    page_file.write_text(render(half_done(), "html", language=language), encoding="utf-8")
    requested = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("request", lambda request: requested.append(request.url))
        page.goto(page_file.as_uri())
        inner, outer = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('p,td,th,li,pre,code,dd')]"
            ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
        )
        browser.close()
    assert inner <= outer
    assert smallest >= 11
    assert [address for address in requested if not address.startswith(("file:", "data:"))] == []
