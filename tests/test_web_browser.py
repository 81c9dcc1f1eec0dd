"""The page in a real browser: Debian's Chromium, steered by playwright.

Skipped, and said so at the end, where one of the two is missing: `apt-get install chromium`, `pip install playwright`
(165 MB, so it is no dependency of development; scripts/test fetches it where a Chromium is).
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nodes import SECONDS, Gpuguard, until
from proc import free_port
from random_machines import a_random_machine
from web_pages import a_busy_node, a_page, a_server, ask

from gpuguard.claims.directory import lock_directory
from gpuguard.device_state import uses
from gpuguard.locale.messages import dumps, sentence
from gpuguard.users import user_name
from gpuguard.views import who

for needed in ("starlette", "uvicorn", "playwright"):
    pytest.importorskip(needed, reason=f"the page in a browser (no {needed}: .venv/bin/pip install {needed})")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("the page in a browser (no chromium: apt-get install chromium)", allow_module_level=True)

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\x1b[31m&lt; 训练任务"
WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=2000 * SECONDS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The page of a node of 8 devices, of which no test changes more than their utilization."""
    gpuguard = a_node(tmp_path_factory.mktemp("quiet"), "8xH100-80GB")
    gpuguard("sim", "set", "--device", "all", "--utilization", "40%")
    with a_page(gpuguard) as port:
        yield port


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The page of one on which jobs run and wait."""
    gpuguard = a_node(tmp_path_factory.mktemp("busy"), "8xH100-80GB")
    with a_busy_node(gpuguard), a_page(gpuguard) as port:
        yield port


@contextmanager
def a_tab(browser: Any, port: int, view: str = "", **options: Any) -> Iterator[Any]:
    """A tab with the page in it, at #*view*; whatever the browser complains of fails the test."""
    context = browser.new_context(**{"viewport": WIDE, "locale": "en-US", **options})
    context.set_default_timeout(1000 * SECONDS)
    tab, said = context.new_page(), []
    tab.on("console", lambda line: said.append(line.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
    try:
        tab.goto(f"http://127.0.0.1:{port}/{view}")
        yield tab
    finally:
        context.close()
    assert [line for line in said if "ERR_" not in line] == []  # ERR_: the server was away


def a_node(place: Path, spec: str = "4xH100-80GB") -> Gpuguard:
    gpuguard = Gpuguard(place, None)
    assert gpuguard("sim", "start", spec).returncode == 0
    return gpuguard


# Whether there is more than one colour in the chart: read from a copy, for Chromium advises against reading twice.
PAINTED = (
    "(() => { const it = document.querySelector('#chart canvas'); if (!it || !it.width) return false;"
    " const copy = new OffscreenCanvas(it.width, it.height).getContext('2d', {willReadFrequently: true});"
    " copy.drawImage(it, 0, 0);"
    " const all = copy.getImageData(0, 0, it.width, it.height).data;"
    " const seen = new Set(); for (let at = 0; at < all.length; at += 4)"
    " seen.add(all[at] + ',' + all[at + 1] + ',' + all[at + 2]); return seen.size > 3; })()"
)


def fits(tab: Any) -> bool:
    return bool(tab.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_charts_are_drawn_for_each_metric_and_span(quiet, browser):
    with a_tab(browser, quiet) as tab:
        tab.wait_for_selector("#chart canvas")
        for group in ("metrics", "spans"):
            for number in range(tab.locator(f"#{group} a").count()):
                tab.locator(f"#{group} a").nth(number).click()
                tab.locator(f"#{group} a:nth-child({number + 1})[aria-current]").wait_for()
                tab.wait_for_function(PAINTED)

        assert tab.locator("#chart canvas").count() == 1
        assert tab.locator("#chart .u-legend .u-series").count() == 9  # time and eight devices


def test_a_chart_grows_without_being_asked_for_again(quiet, browser):
    with a_tab(browser, quiet) as tab:
        tab.wait_for_selector("#chart canvas")
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.evaluate("window.canvas = document.querySelector('#chart canvas')")
        tab.wait_for_timeout(5000)

        assert [url for url in asked if "chart" in url] == []
        assert tab.evaluate("window.canvas === document.querySelector('#chart canvas')")


def test_what_strangers_wrote_is_text(tmp_path, browser):
    gpuguard = a_node(tmp_path)
    job = ("run", "-n", "4", "--note", HOSTILE, "--", "sh", "-c", "exec sleep 600", HOSTILE)
    waiting = ("run", "-n", "1", "--note", HOSTILE, "--", "true", HOSTILE)
    submitted = {"id": 17, "tasks": 3, "gpus": 2, "submitted": 1.7e9, "what": HOSTILE}
    records = lock_directory(gpuguard.environment["GPUGUARD_DIR"]).records
    Path(records, f"jobs.{os.geteuid()}.0").write_text(json.dumps({"jobs": [submitted]}))
    with running(gpuguard, *job):
        until(lambda: gpuguard.json("who")["devices"][0]["claims"])
        with running(gpuguard, *waiting), a_page(gpuguard) as port, a_tab(browser, port) as tab:
            tab.wait_for_selector("#queue-table td")
            claim = tab.locator(".card .who li").first.text_content()
            waiting_job = tab.locator("#queue-table").text_content()

            submitted_job = tab.locator("#jobs-table").text_content()
            assert f"{user_name(os.geteuid())}/173 waiting2" in submitted_job  # the cells without what is between them
            assert submitted_job.count("<img src=x onerror=alert(1)>") >= 1
            for shown in (claim, waiting_job):
                assert shown.count("<img src=x onerror=alert(1)><script>alert(2)</script>") >= 2  # note and command
                assert shown.count("&lt; 训练任务") >= 2
            assert tab.locator("main img, main script").count() == 0


@contextmanager
def running(gpuguard: Gpuguard, *words: str) -> Iterator[None]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with gpuguard.start(*words, **quiet) as process:
        try:
            yield
        finally:
            process.terminate()


def test_the_page_speaks_chinese(quiet, browser):
    with a_tab(browser, quiet, locale="zh-CN") as tab:
        tab.wait_for_selector("#chart .u-legend")
        assert tab.locator("#charts-title").text_content() == "图表"
        assert "显存" in tab.locator(".card").first.text_content()
        assert "午" not in tab.locator("#chart").text_content()  # 24 hours, not 上午 and 下午
        assert tab.evaluate("document.documentElement.lang") == "zh-CN"

        tab.click("#language")
        assert tab.locator("#charts-title").text_content() == "Charts"
        tab.reload()
        assert tab.locator("#charts-title").text_content() == "Charts"  # kept


def test_a_sentence_of_the_log_is_chinese_and_the_same_words_of_a_user_are_not(tmp_path, browser):
    gpuguard = a_node(tmp_path)
    assert gpuguard("run", "--", "true").returncode == 0  # makes the log
    [log] = tmp_path.rglob("events.jsonl")
    line = json.loads(log.read_text().splitlines()[0])
    text = sentence("queue.starts", "starts in about {seconds}", seconds="1h29m")
    with log.open("ab") as file:
        for message in (text, "starts in about 2h"):
            file.write(dumps({**line, "kind": "warn", "outcome": "failed", "message": message}) + b"\n")
    with a_page(gpuguard) as port, a_tab(browser, port, locale="zh-CN") as tab:
        tab.locator("#events-table td", has_text="1小时29分").first.wait_for()
        tab.locator("#events-table td", has_text="starts in about 2h").first.wait_for()


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_reaches_beyond_the_window(busy, browser, viewport):
    with a_tab(browser, busy, viewport=viewport) as tab:
        tab.wait_for_selector("#chart canvas")
        tab.check("#curious")
        tab.wait_for_selector(".flow")

        assert fits(tab)
        assert tab.locator(".card").count() == 8


def test_an_event_of_many_gpus_that_are_gone_fits_into_the_window(tmp_path, browser):
    gpuguard = a_node(tmp_path, "16xH100-80GB")
    assert gpuguard("run", "-n", "16", "--", "true").returncode == 0
    assert gpuguard("sim", "start", "--force", "2xRTX4090").returncode == 0
    with a_page(gpuguard) as port, a_tab(browser, port) as tab:
        tab.locator("#events-table td", has_text="GPU-").first.wait_for()

        assert fits(tab)


def test_it_comes_back_when_the_server_does(tmp_path, browser):
    gpuguard, port = a_node(tmp_path), free_port()
    with a_server(gpuguard, port=port) as (_, server), a_tab(browser, port) as tab:
        tab.locator("#status", has_text="live").wait_for()
        server.terminate()
        server.wait(60)
        tab.locator("#status", has_text="connection lost").wait_for()
        with a_page(gpuguard, port=port):
            tab.locator("#status", has_text="live").wait_for()


def test_a_driver_that_fails_is_said_as_text(tmp_path, browser):
    gpuguard = a_node(tmp_path)
    with a_page(gpuguard) as port, a_tab(browser, port) as tab:
        tab.wait_for_selector(".card")
        gpuguard("sim", "stop")
        tab.wait_for_selector("#status.bad")

        assert "sim start" in tab.locator("#status").text_content()
        assert tab.locator(".card").count() == 4  # what was seen last stays


@pytest.mark.parametrize(
    ("spec", "cards", "legend"),
    [("1xA100-40GB:mig=3g.20gb,3g.20gb+1xMI300X:partition=dpx+1xStrixHalo", 7, 8), ("64xRTX4090", 64, 65)],
)
def test_every_device_has_a_card_and_a_line(tmp_path, browser, spec, cards, legend):
    with a_page(a_node(tmp_path, spec)) as port, a_tab(browser, port, viewport=PHONE) as tab:
        tab.wait_for_selector("#chart .u-legend")

        assert tab.locator(".card").count() == cards
        assert not any(text.startswith(("NVIDIA", "AMD")) for text in tab.locator(".card .model").all_text_contents())
        assert tab.locator(".card", has_text="memory (host's)").count() == spec.count("StrixHalo")
        assert tab.locator("#chart .u-series").count() == legend
        assert fits(tab)


def test_events_are_a_table_with_the_number_of_the_gpu_and_words_for_people(tmp_path, browser):
    gpuguard = a_node(tmp_path)
    assert gpuguard("run", "-n", "1", "--note", "short", "--", "true").returncode == 0
    with a_page(gpuguard) as port, a_tab(browser, port) as tab:
        tab.locator("#events-table", has_text="release ended").wait_for()
        newest = tab.locator("#events-table tbody tr:first-child td").all_text_contents()

    assert newest[3] == "release ended"
    assert newest[1] in ("0", "1", "2", "3")
    assert "exit status 0" in newest[4] and "wall time" in newest[4] and "joules" not in newest[4]


def test_the_page_shows_the_states_that_who_tells(quiet, browser):
    with a_tab(browser, quiet) as tab:
        seen = json.loads(ask(quiet, "/api/now")[1])
        event: dict[str, str] = {"content_type": "text/event-stream"}
        tab.route("**/api/stream", lambda route: route.fulfill(**event))
        for seed in range(20):
            snapshot, stats = a_random_machine(seed)
            told = who.to_json(snapshot, uses(snapshot, stats))
            event["body"] = f"data: {json.dumps({**seen, 'devices': told['devices'], 'users': told['users']})}\n\n"
            tab.reload()
            tab.wait_for_selector(".card .state")

            shown = tab.evaluate("[...document.querySelectorAll('.card .state')].map(state => state.className)")
            assert shown == [f"state {device['exact_state']}" for device in told["devices"]]


def test_it_begins_with_what_is_free_and_what_needs_attention(tmp_path, browser):
    gpuguard = a_node(tmp_path)
    gpuguard("quarantine", "3", "--reason", "XID 79")
    with a_page(gpuguard) as port, a_tab(browser, port) as tab:
        tab.locator("#alerts", has_text="XID 79").wait_for()

        assert tab.locator("#summary").text_content() == "3 of 4 GPUs free, none waiting"
        assert tab.locator("#alert-list li").all_text_contents() == ["GPU 3 quarantined by the administrator: XID 79"]
        assert tab.title().startswith("3 of 4 GPUs free")


@pytest.mark.parametrize(
    ("view", "cards"), [("", 8), ("#gpu=2", 1), ("#user=no-such-user", 0), ("#gpu=2&metric=memory&span=hour", 1)]
)
def test_an_address_shows_one_device_or_user(quiet, browser, view, cards):
    with a_tab(browser, quiet, view) as tab:
        tab.wait_for_selector("#chart canvas")

        assert tab.locator(".card").count() == cards
        assert tab.locator("#chart .u-series").count() == cards + 1
        assert tab.locator("#filter").is_visible() == bool(view)


def test_an_address_shows_an_earlier_time(quiet, browser):
    view = "#from=2026-11-20T10:00:00Z&until=2026-11-20T11:00:00Z"
    with a_tab(browser, quiet, view, timezone_id="UTC") as tab:
        tab.wait_for_selector("#chart canvas")

        assert tab.input_value("#until") == "2026-11-20T11:00"
        assert "10:00 to Nov 20 11:00" in tab.locator("#chart canvas").get_attribute("aria-label")
        tab.click("#live")
        tab.wait_for_selector("#live", state="hidden")


def test_what_is_focused_or_opened_stays_so_while_the_page_goes_on(busy, browser):
    with a_tab(browser, busy) as tab:
        tab.wait_for_selector(".card details")
        tab.focus(".card:nth-child(2) h3 a")
        tab.locator(".card details").first.evaluate("(details) => { details.open = true; }")
        tab.wait_for_timeout(5000)

        assert tab.evaluate("document.activeElement.textContent") == "GPU 1"
        assert tab.locator(".card details").first.evaluate("(details) => details.open")


def test_all_of_it_fits_on_a_phone_without_moving_sideways(busy, browser):
    with a_tab(browser, busy, viewport=PHONE) as tab:
        tab.wait_for_selector("#queue-table td")
        tab.wait_for_selector("#chart canvas")
        reaches_out = "(it) => it.getBoundingClientRect().right > innerWidth"
        beyond = tab.evaluate(f"[...document.querySelectorAll('td, .card *, li')].filter({reaches_out}).length")

        assert fits(tab) and beyond == 0
        assert tab.evaluate("document.documentElement.scrollHeight") < 4500


# What a screen reader needs: what is wrong, and the nodes with which it is.
ALL = "const all = (kind) => [...document.querySelectorAll(kind)].filter((it) => !it.hidden); return "
NAMED_BY = "document.getElementById(it.getAttribute('aria-labelledby'))?.textContent.trim()"
FAULTS = {
    "not one h1": "all('h1').slice(1)",
    "a level of headings is left out": (
        "all('h1, h2, h3').filter((it, at, heads) => at && it.tagName[1] - heads[at - 1].tagName[1] > 1)"
    ),
    "an image without words": "all('[role=img]').filter((it) => !it.getAttribute('aria-label'))",
    "a link or button without words": "all('a, button, summary').filter((it) => !it.textContent.trim())",
    "a field without a label": "all('input').filter((it) => !it.labels.length)",
    "a section without a name": (
        f"all('section, article, nav').filter((it) => !it.getAttribute('aria-label') && !{NAMED_BY})"
    ),
    "a table without heads": "all('table[role]').filter((it) => !it.querySelector('th[scope]'))",
    "the same id twice": "all('[id]').filter((it) => document.getElementById(it.id) !== it)",
}


def faults(tab: Any, planted: str = "") -> list[str]:
    """The names of those that are there, after *planted* was run; in one go, before the next frame mends it."""
    found = ", ".join(f"[{json.dumps(name)}, {script}.length]" for name, script in FAULTS.items())
    return list(tab.evaluate(f"() => {{ {planted}; {ALL} [{found}].filter((it) => it[1]).map((it) => it[0]); }}"))


PLANTED = {
    "not one h1": "document.body.append(document.createElement('h1'))",
    "a level of headings is left out": "document.querySelector('h1').after(document.createElement('h3'))",
    "an image without words": "document.querySelector('canvas').removeAttribute('aria-label')",
    "a link or button without words": "document.querySelector('#language').textContent = ''",
    "a field without a label": "document.body.append(document.createElement('input'))",
    "a section without a name": "document.body.append(document.createElement('section'))",
    "a table without heads": "document.querySelector('#events-table thead').remove()",
    "the same id twice": "document.querySelector('nav').id = 'chart'",
}


def test_a_screen_reader_finds_its_way_and_what_would_lose_it_is_found(busy, browser):
    with a_tab(browser, busy) as tab:
        tab.wait_for_selector("#chart canvas")
        tab.wait_for_selector("#queue-table td")

        assert faults(tab) == []
        assert {name: name in faults(tab, planted) for name, planted in PLANTED.items()} == dict.fromkeys(FAULTS, True)


AXE = os.environ.get("GPUGUARD_AXE")  # the path of axe.min.js: `npm pack axe-core`


@pytest.mark.skipif(AXE is None, reason="the page for screen readers (no axe-core: GPUGUARD_AXE=.../axe.min.js)")
def test_axe_finds_nothing_on_any_screen_in_any_theme_and_language(busy, browser):
    found = []
    for viewport, theme, locale in itertools.product((WIDE, PHONE), ("light", "dark"), ("en-US", "zh-CN")):
        options = {"viewport": viewport, "color_scheme": theme, "locale": locale, "bypass_csp": True}
        with a_tab(browser, busy, **options) as tab:
            tab.wait_for_selector("#chart canvas")
            tab.wait_for_selector("#queue-table td")
            tab.evaluate(Path(str(AXE)).read_text(encoding="utf-8"))
            result = tab.evaluate("axe.run()")
        assert len(result["passes"]) > 20, "it looked at the page"
        found += [(theme, locale, fault["id"], fault["nodes"][0]["html"]) for fault in result["violations"]]

    assert found == []
