"""The page in a real browser: it opens in silence, draws, and answers to the hand."""

import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alphastomics.generation.radii import Radii
from alphastomics.report.page import render
from alphastomics.report.prepare import page_data
from tests.report.tissue import EVIL, make_cells, make_findings

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-gl=angle",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
]
DRAWN = "name => document.querySelector(name).dataset.state === 'drawn'"


class Opened:
    """A page and what it said and asked for."""

    def __init__(self, page) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        self.alerts: list[str] = []
        page.on("console", self.hear)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: (self.alerts.append(dialog.message), dialog.dismiss()))

    def hear(self, message) -> None:
        """Keep errors, and what a browser says when it takes a WebGL context away."""
        if message.type == "error" or "context" in message.text.lower():
            self.said.append(message.text)

    def look_at(self, section: str) -> None:
        """Scroll to a section and wait for its pictures."""
        self.page.eval_on_selector(f"#{section}", "e => e.scrollIntoView()")
        opening = "all => all.forEach(fold => { fold.open = true; })"
        self.page.eval_on_selector_all(f"#{section} > details", opening)
        self.page.wait_for_timeout(150)
        for plot in self.page.query_selector_all(f"#{section} .plot"):
            plot.scroll_into_view_if_needed()
            self.page.wait_for_timeout(100)
        self.page.eval_on_selector(f"#{section} .body", "e => e.scrollIntoView()")
        self.page.wait_for_function(DRAWN, arg=f"#{section} .plot")

    def picture(self, selector: str) -> np.ndarray:
        """The pixels of an element."""
        from PIL import Image

        content = self.page.query_selector(selector).screenshot()
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.fixture(scope="module")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


def write(folder: Path, findings) -> Path:
    path = folder / "page.html"
    path.write_text(render(page_data(findings, 1, [], 1000)), encoding="utf-8")
    return path


def open_page(browser, path: Path) -> Opened:
    opened = Opened(browser.new_page(viewport={"width": 1280, "height": 760}))
    opened.page.goto(path.as_uri())
    opened.page.wait_for_selector("body[data-state=ready]")
    return opened


@pytest.fixture(scope="module")
def whole(browser, tmp_path_factory) -> Iterator[Opened]:
    """A page with every part, and names that would do harm as markup."""
    path = write(tmp_path_factory.mktemp("page"), make_findings(make_cells(240)))
    opened = open_page(browser, path)
    yield opened
    opened.page.close()


def colours(picture: np.ndarray) -> int:
    return len(np.unique(picture.reshape(-1, 3), axis=0))


SECTIONS = ("positions", "path", "errors", "predicted", "new", "training", "inside")


def test_every_section_is_drawn_in_silence_and_without_a_request(whole: Opened):
    for section in (*SECTIONS, *reversed(SECTIONS)):
        whole.look_at(section)
        assert colours(whole.picture(f"#{section} .plot")) > 20, section
    assert whole.said == []
    assert whole.alerts == []
    assert [url for url in whole.asked if not url.startswith("file:")] == []
    assert len(whole.asked) == 1
    assert whole.page.query_selector(".note:visible:not(#uncalibrated)") is None


def test_a_tissue_changes_its_colours_when_another_gene_or_type_is_chosen(whole: Opened):
    whole.look_at("positions")
    before = whole.picture("#positions .plot")
    whole.page.select_option("#positions select.colour", label="Gad1")
    whole.page.wait_for_selector("#positions .plot[data-colour=Gad1][data-state=drawn]")
    genes = whole.picture("#positions .plot")
    assert (before != genes).any(-1).mean() > 0.005
    whole.page.select_option("#positions select.colour", label="Cell type")
    whole.page.wait_for_selector("#positions .plot[data-colour='Cell type'][data-state=drawn]")
    np.testing.assert_array_equal(whole.picture("#positions .plot"), before)
    whole.page.click("#positions .chip >> nth=0")
    whole.page.wait_for_selector("#positions .chip[aria-pressed=true]")
    assert (whole.picture("#positions .plot") != before).any()
    whole.page.click("#positions .chip >> nth=0")


def test_another_slice_and_all_slices_can_be_seen(whole: Opened):
    whole.look_at("positions")
    cells = "document.querySelector('#positions .plot').data[0].x.length"
    assert whole.page.evaluate(cells) == 120
    whole.page.select_option("#positions select.slice", "-1")
    whole.page.wait_for_function(f"{cells} === 240")
    whole.page.select_option("#positions select.slice", "0")
    whole.page.wait_for_function(f"{cells} === 120")
    whole.page.wait_for_function(DRAWN, arg="#positions .plot")


def test_both_sides_zoom_together_in_the_plane_and_rotate_together_in_space(whole: Opened):
    whole.look_at("positions")
    plot = "document.querySelector('#positions .plot')"
    whole.page.evaluate(f"Plotly.relayout({plot}, {{'xaxis.range': [-20, 30]}})")
    assert whole.page.evaluate(f"{plot}._fullLayout.xaxis2.range") == pytest.approx([-20, 30])
    whole.page.click("#positions .segments button >> text=3D")
    whole.page.wait_for_function(f"{plot}.data[0].type === 'scatter3d'")
    whole.page.wait_for_function(DRAWN, arg="#positions .plot")
    assert colours(whole.picture("#positions .plot")) > 20
    box = whole.page.query_selector("#positions .plot").bounding_box()
    left = (box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    start = whole.page.evaluate(f"{plot}._fullLayout.scene2.camera.eye")
    whole.page.mouse.move(*left)
    whole.page.mouse.down()
    whole.page.mouse.move(left[0] + 90, left[1] + 20, steps=5)
    whole.page.mouse.up()
    whole.page.wait_for_timeout(300)
    eyes = whole.page.evaluate(
        f"[{plot}._fullLayout.scene.camera.eye, {plot}._fullLayout.scene2.camera.eye]"
    )
    assert eyes[1] != start
    for name in "xyz":
        assert eyes[0][name] == pytest.approx(eyes[1][name], abs=1e-6)
    whole.page.click("#positions .segments button >> text=2D")
    whole.page.wait_for_function(f"{plot}.data[0].type === 'scattergl'")


def test_names_stay_text(whole: Opened):
    page = whole.page
    assert page.text_content("#title") == f"run {EVIL}"
    assert EVIL in page.text_content("#facts")
    assert EVIL in page.text_content("#positions .legend")
    assert EVIL in page.eval_on_selector_all("#positions option", "all => all.map(e => e.text)")
    assert page.query_selector_all("main script, main img, main b:has-text('slice')") == []
    assert whole.alerts == []


def test_a_cell_under_the_pointer_says_what_it_is(whole: Opened):
    whole.look_at("positions")
    whole.page.wait_for_function(DRAWN, arg="#positions .plot")
    position = whole.page.evaluate(
        """() => {
          const plot = document.querySelector('#positions .plot'), layout = plot._fullLayout;
          const box = plot.getBoundingClientRect(), trace = plot.data[0];
          return [box.left + layout.xaxis._offset + layout.xaxis.l2p(trace.x[7]),
                  box.top + layout.yaxis._offset + layout.yaxis.l2p(trace.y[7])];
        }"""
    )
    whole.page.mouse.move(position[0] - 30, position[1] - 30)
    whole.page.mouse.move(*position, steps=4)
    whole.page.wait_for_selector("#tip:not([hidden])")
    assert "cell <i>" in whole.page.text_content("#tip")
    assert "µm from its true position" in whole.page.text_content("#tip")
    assert whole.page.query_selector("#positions .ring:not([hidden])")


def test_the_path_plays_from_noise_to_tissue(whole: Opened):
    whole.look_at("path")
    whole.page.click("#path .play")
    whole.page.wait_for_selector("#path .plot[data-frame='0']")
    noise = whole.page.evaluate("Array.from(document.querySelector('#path .plot').data[0].x)")
    whole.page.wait_for_selector("#path .plot[data-frame='5']")
    tissue = whole.page.evaluate("Array.from(document.querySelector('#path .plot').data[0].x)")
    assert np.abs(np.array(noise) - tissue).max() > 1
    whole.page.wait_for_function(
        "document.querySelector('#path .play').textContent.includes('Play')"
    )


def test_a_thumbnail_shows_its_gene_and_chooses_it(whole: Opened):
    whole.look_at("predicted")
    whole.page.query_selector(".thumb").scroll_into_view_if_needed()
    whole.page.wait_for_selector(".thumb[data-state=drawn]")
    assert colours(whole.picture(".thumb canvas")) > 10
    label = whole.page.text_content(".thumb >> nth=1 >> h3 span")
    whole.page.click(".thumb >> nth=1")
    whole.page.wait_for_function(
        "label => document.querySelector('#predicted .plot').dataset.colour === label", arg=label
    )


def test_a_weak_prediction_can_be_stretched_and_the_truth_stays(whole: Opened):
    whole.look_at("predicted")
    pictures = []
    for name in ("prediction stretched", "same colours"):
        whole.page.click(f"#predicted .segments button >> text={name}")
        whole.page.wait_for_function(DRAWN, arg="#predicted .plot")
        whole.page.wait_for_timeout(200)
        pictures.append(whole.picture("#predicted .plot"))
    half = pictures[0].shape[1] // 2
    np.testing.assert_array_equal(pictures[0][:, :half], pictures[1][:, :half])
    assert (pictures[0] != pictures[1]).any()


def test_light_and_dark_can_be_switched(whole: Opened):
    whole.look_at("training")
    before = whole.picture("#training").mean()
    whole.page.click("#theme")
    whole.page.wait_for_timeout(300)
    assert abs(whole.picture("#training").mean() - before) > 60
    whole.page.click("#theme")
    assert whole.said == []


def test_what_is_missing_is_said(browser, tmp_path: Path):
    cells = make_cells(60, slices=1, dims=3, types=False)
    reason = {"predicted_position": "<u>because</u>", "scores": "nothing was scored"}
    empty = dict.fromkeys(("predicted_position", "predicted", "new", "path", "inside", "scores"))
    findings = make_findings(cells, **empty, curves={}, missing=reason)
    opened = open_page(browser, write(tmp_path, findings))
    notes = opened.page.eval_on_selector_all(".note", "all => all.map(e => e.textContent)")
    assert "Not shown: <u>because</u>." in notes
    assert "No scores: nothing was scored." in notes
    assert any("no cell types" in note for note in notes)
    assert opened.said == []
    opened.page.close()


def test_a_volume_is_shown_in_space_and_few_cells_are_shown_of_many(browser, tmp_path: Path):
    findings = make_findings(make_cells(1200, slices=1, dims=3, types=False))
    findings = replace(findings, missing={})
    opened = open_page(browser, write(tmp_path, findings))
    assert "1,000 of 1,200 cells are drawn" in opened.page.text_content("#subsampled")
    for section in ("positions", "new", "errors"):
        opened.look_at(section)
        assert (
            opened.page.evaluate(f"document.querySelector('#{section} .plot').data[0].type")
            == "scatter3d"
        )
        assert colours(opened.picture(f"#{section} .plot")) > 20
    assert opened.said == []
    opened.page.close()


def test_anchors_are_ringed_and_radii_are_explained_in_words(browser, tmp_path: Path):
    cells = make_cells(120, slices=1)
    free = np.arange(120) % 10 > 0
    radius = np.where(free, 40.0, 0)
    shown = make_findings(cells).predicted_position
    anchored = replace(
        shown,
        error=np.where(free, shown.error, 0),
        radii=Radii(radius, 0.9, "anchors", ~free),
        coverage=((0.5, 0.4), (0.9, 0.8)),
        free=free,
        assigned=True,
    )
    findings = make_findings(cells, predicted_position=anchored, held=(0.9, 0.88, "cells"))
    opened = open_page(browser, write(tmp_path, findings))
    opened.look_at("positions")
    widths = opened.page.evaluate(
        "Array.from(document.querySelector('#positions .plot').data[1].marker.line.width)"
    )
    np.testing.assert_array_equal(np.array(widths) > 0, ~free)
    assert "Assigned" in opened.page.text_content("#positions .panel-titles")
    assert "Ringed cells on the right are anchors" in opened.page.text_content("#anchors")
    opened.page.select_option("#positions select.colour", label="Given or predicted")
    opened.page.wait_for_selector("#positions .chip >> text=anchor")
    words = opened.page.text_content("#calibrated")
    held = round(100 * (anchored.error <= radius)[free].mean())
    assert f"the radius promises to hold 90, and holds {held} here" in words
    assert "anchors of one region say nothing of the others" in words
    assert "here it holds 88" in opened.page.text_content("#intervals")
    assert opened.said == []
    opened.page.close()


def test_cells_that_were_made_are_shown_alone_all_slices_at_once(browser, tmp_path: Path):
    cells = make_cells(240)
    opened = open_page(browser, write(tmp_path, make_findings(cells, is_generated=True)))
    shown = opened.page.query_selector_all("[data-nav]:visible")
    assert [section.get_attribute("id") for section in shown] == ["new"]
    opened.look_at("new")
    assert opened.page.evaluate("document.querySelector('#new .plot').data.length") == 1
    drawn = opened.page.evaluate("document.querySelector('#new .plot').data[0].x.length")
    assert drawn == len(cells.names)
    assert opened.said == []
    opened.page.close()
