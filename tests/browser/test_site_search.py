"""The site of the docs, opened as files: search works, and nothing is fetched from elsewhere."""

from pathlib import Path

from playwright.sync_api import Browser

from support.site import build_site


def test_search_works_without_a_server(browser: Browser, tmp_path: Path) -> None:
    site = build_site(tmp_path)
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto((site / "index.html").as_uri())
    page.fill("input.md-search__input", "consolidate_state_dict")
    page.locator(".md-search-result__meta", has_text="matching documents").wait_for(timeout=30_000)
    links = page.locator("a.md-search-result__link").evaluate_all("links => links.map(link => link.href)")
    page.close()
    assert any("/reference.html" in link for link in links), links
    assert any("/training.html" in link for link in links), links
    assert not errors
