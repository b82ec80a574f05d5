"""The dashboard: its files, its data, and the page in a browser."""

import re
import shutil
import socket
import subprocess

import httpx2 as httpx
import pytest

from baton.client import AdminClient

WAIT_S = 300.0
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return await http.get(url)


async def test_the_page_loads_nothing_from_other_origins(scripted):
    page = await get(f"{scripted.url}/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    wanted = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page.text)
    assert sorted(wanted) == ["/dashboard/charts.js", "/dashboard/page.js", "/dashboard/style.css"]
    scripts = ""
    for path in wanted:
        answer = await get(scripted.url + path)
        assert answer.status_code == 200
        kind = "text/css" if path.endswith(".css") else "text/javascript"
        assert answer.headers["content-type"].startswith(kind)
        scripts += answer.text
    assert "https://" not in page.text + scripts
    # The only URL is the SVG namespace.
    assert set(re.findall(r"http://[^\"]+", scripts)) == {"http://www.w3.org/2000/svg"}
    # The page has every element that the scripts look up.
    looked_for = set(re.findall(r'by\("([\w-]+)"\)', scripts)) | {"pools-chart"}
    looked_for |= {f"{what}-chart" for what in ("ttft", "itl")}
    assert looked_for <= set(re.findall(r'id="([\w-]+)"', page.text))
    # Names come from clients: they are text, never markup.
    assert "innerHTML" not in scripts


async def test_the_data_is_that_of_the_admin_service(cluster, gateway, openai):
    answer = await openai.completions.create(model="demo", prompt=[7] * 100, max_tokens=8)
    seen = (await get(f"{gateway.url}/dashboard/data")).json()
    async with AdminClient(cluster.address) as admin:
        info = await admin.get_request(answer.id)
        status = await admin.get_status()
    assert [(one["pool"], one["serving"]) for one in seen["pools"]] == [
        ("prefill", 1),
        ("decode", 1),
    ]
    assert [one["worker"] for one in seen["workers"]] == ["p1", "d1"]
    interactive = seen["lanes"][0]
    assert interactive["lane"] == "interactive"
    assert interactive["ttft"]["num"] >= 1
    assert interactive["ttft"]["target_ms"] == status.lanes[0].targets.ttft_ms
    assert 0 < interactive["ttft"]["p50_ms"] <= interactive["ttft"]["p99_ms"]
    assert {"prefill", "decode"} <= {one["stage"] for one in interactive["stages"]}
    assert seen["history"][-1]["pools"]["decode"]["serving"] == 1
    assert seen["prompt_tokens"].keys() == {"computed", "device", "host", "disk", "fetched"}
    assert sum(seen["prompt_tokens"].values()) >= 100
    listed = next(one for one in seen["requests"] if one["request_id"] == answer.id)
    assert (listed["prompt_tokens"], listed["output_tokens"]) == (100, 8)
    drawn = (await get(f"{gateway.url}/dashboard/requests/{answer.id}")).json()
    assert drawn["total_ms"] == info.budget.total_us / 1e3
    sum_ms = sum(one["duration_ms"] for one in drawn["stages"])
    assert sum_ms == pytest.approx(drawn["total_ms"], rel=0.02)


async def test_the_root_url_redirects_to_the_page(scripted):
    answer = await get(f"{scripted.url}/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/dashboard")


async def test_missing_things_are_errors_with_a_message(gateway, start_gateway):
    missing = await get(f"{gateway.url}/dashboard/requests/unknown")
    assert missing.status_code == 404
    error = missing.json()["error"]
    assert "unknown" in error["message"]
    assert (error["param"], error["code"]) == (None, "request_not_found")
    assert (await get(f"{gateway.url}/dashboard/other")).status_code == 404
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with start_gateway(address) as alone:
            assert (await get(f"{alone.url}/dashboard")).status_code == 200
            answer = await get(f"{alone.url}/dashboard/data")
    assert answer.status_code == 503
    assert address in answer.json()["error"]["message"]


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
async def test_a_browser_draws_the_charts(gateway, openai, tmp_path, width):
    for _ in range(3):
        await openai.completions.create(model="demo", prompt=[9] * 100, max_tokens=8)
    text = await browse(f"{gateway.url}/dashboard", tmp_path, width)
    assert re.search(r'id="live"[^>]*class="good"[^>]*>live<', text)
    # Every chart has its axes and units.
    for unit in ("in workers", "in requests", "in ms"):
        assert unit in text
    assert text.count("<svg") >= 4
    assert ">p1<" in text
    assert "prefix cache</th>" in text


@needs_browser
async def test_a_browser_draws_a_waterfall(gateway, openai, tmp_path):
    answer = await openai.completions.create(model="demo", prompt=[5] * 100, max_tokens=8)
    text = await browse(f"{gateway.url}/dashboard#{answer.id}", tmp_path, 1280)
    drawn = text[text.index('id="waterfall"') : text.index('id="requests"')]
    assert f"{answer.id}: /v1/completions, finished, first token " in drawn
    for stage in ("prefill", "decode"):
        assert re.search(rf"<title>{stage}: [\d.]+ ms from [\d.]+ ms</title>", drawn)


@needs_browser
async def test_a_browser_shows_that_the_coordinator_is_unreachable(start_gateway, tmp_path):
    async with start_gateway("127.0.0.1:1") as alone:
        text = await browse(f"{alone.url}/dashboard", tmp_path, 1280)
    assert "disconnected: " in text
    assert "no status of the cell yet" in text


async def browse(url: str, home, width: int) -> str:
    """Returns the DOM after the page has been drawn."""
    import asyncio

    def run() -> str:
        done = subprocess.run(
            [
                str(CHROMIUM),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *(f"--user-data-dir={home}", f"--window-size={width},900"),
                *("--virtual-time-budget=3000", "--dump-dom", url),
            ],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        )
        return done.stdout

    return await asyncio.to_thread(run)
