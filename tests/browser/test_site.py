"""The docs build as a site without a warning, every link and public name leads somewhere, and search works."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser

import thinwire
import thinwire.testing
from support.site import build_site

ELSEWHERE = {  # links that a reader may follow; nothing is loaded from them
    "https://semver.org",
    "https://squidfunk.github.io/mkdocs-material/",
    "https://ui.perfetto.dev",
    "https://www.fatiando.org/pooch/",
}


class Page(HTMLParser):
    """The links, what is loaded, and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loaded, self.anchors = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        self.loaded |= {given[name] for name in ("src", "href") if name in given and tag != "a"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


def test_links_lead_to_files_of_the_site_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path.name: Page(path.read_text()) for path in site.glob("*.html")}
    assert len(pages) > 15
    for name, page in pages.items():
        for link in page.loaded | page.links:
            parts = urlsplit(link)
            if parts.scheme:
                assert link in ELSEWHERE, f"{name} links to {link}"
                assert link not in page.loaded, f"{name} loads {link}"
                continue
            assert not parts.path.startswith("/") or name == "404.html", f"{name}: {link}"
            target = unquote(parts.path).lstrip("/") or name
            assert (site / target).exists(), f"{name} links to {link}"
            if target in pages and parts.fragment and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].anchors, f"{name} links to {link}"


def test_the_reference_has_every_public_name(site: Path) -> None:
    anchors = Page((site / "reference.html").read_text()).anchors
    names = {f"thinwire.{name}" for name in thinwire.__all__}
    names |= {f"thinwire.testing.{name}" for name in thinwire.testing.__all__}
    names |= {"thinwire.frameworks.lightning.Attach", "thinwire.frameworks.transformers.TrainerMixin"}
    names |= {"thinwire.AdamW.consolidate_state_dict"}
    assert len(names) > 30
    assert sorted(names - anchors) == []


def test_markdown_of_code_hosts_and_docstrings_is_read(site: Path) -> None:
    """A list after a paragraph, a table and a block of code become elements, also where Python's Markdown differs."""
    for path in site.glob("*.html"):
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"^(<p>)?([*-] |\| ?-|```)", text, re.MULTILINE), path.name
    reference = (site / "reference.html").read_text()
    assert "<li><code>chunk</code>: a power of two" in reference  # a list of arguments
    assert "<blockquote>" not in reference  # a doctest that is not marked as code
    assert ":::" not in reference


def test_search_works_without_a_server(browser: Browser, site: Path) -> None:
    """And opened as files, pages ask for nothing from elsewhere."""
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto((site / "index.html").as_uri())
    page.fill("input.md-search__input", "consolidate_state_dict")
    page.locator(".md-search-result__meta", has_text="matching documents").wait_for(timeout=120_000)
    links = page.locator("a.md-search-result__link").evaluate_all("links => links.map(link => link.href)")
    page.close()
    assert any("/reference.html" in link for link in links), links
    assert any("/training.html" in link for link in links), links
    assert not errors
